#!/usr/bin/env bash
# MP3's demo: patches of photographs back into their places, and pictures of it, on CPU.
#
#   bash launch/mp3_demo.sh
#
# Each command is shown as you would type it. Run again, it goes on where it was; after
# `rm -r demo/close_ups* runs/mp3_demo runs/mp3_finetune_demo` it begins anew.
set -euo pipefail
cd "$(dirname "$0")/.."

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run=runs/mp3_demo

show python -m data_tools photographs demo/close_ups --size 32 --sides 5 12 --crops 30000 \
  --validation-crops 1000
for part in train validation; do
  show python -m data_tools jpeg "demo/close_ups/$part" --out "demo/close_ups_$part" --size 32
done
show megavis train yaml_configs/mp3/demo.yaml
show megavis figure positions "$run"
show megavis figure jigsaw "$run" --num-images 4
show megavis figure mixture "$run" --num-images 4
