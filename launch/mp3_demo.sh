#!/usr/bin/env bash
# MP3's demo: patches of photographs back into their places, pictures of it, and what the network is
# worth for classification, on CPU.
#
#   bash launch/mp3_demo.sh
#
# Each command is shown as you would type it. Run again, it goes on where it was; after
# `rm -r demo/images64 demo/jpeg288_* runs/mp3_demo runs/mp3_finetune_demo` it begins anew.
set -euo pipefail
cd "$(dirname "$0")/.."

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run=runs/mp3_demo

show python -m data_tools photographs demo/images64 --size 64 --crops 4000 --validation-crops 500
show python -m data_tools jpeg demo/images64/train --out demo/jpeg288_train --size 288
show python -m data_tools jpeg demo/images64/validation --out demo/jpeg288_validation --size 288 \
  --classes-from demo/jpeg288_train
show megavis train yaml_configs/mp3/demo.yaml
show megavis figure positions "$run"
show megavis figure jigsaw "$run" --num-images 4
show megavis figure mixture "$run" --num-images 4
show megavis probe "$run" --train-images 2000
show megavis finetune yaml_configs/mp3/finetune_demo.yaml
