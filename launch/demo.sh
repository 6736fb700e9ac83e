#!/usr/bin/env bash
# The demo: photographs to palette to shards to a small iGPT, its probe and its pictures, on CPU.
#
#   make demo
#
# Each command is shown as you would type it. Run again, it goes on where it was; after
# `rm -r demo runs/igpt_demo` it begins anew.
set -euo pipefail
cd "$(dirname "$0")/.."

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run=runs/igpt_demo

show python -m data_tools photographs demo/images --size 32 --crops 12000 --validation-crops 1000
show python -m data_tools palette fit demo/images/train --out demo/palette.npy --size 16
show python -m data_tools palette shards demo/images/train \
  --palette demo/palette.npy --out demo/train --size 16
for split in selection validation; do
  show python -m data_tools palette shards "demo/images/$split" \
    --palette demo/palette.npy --out "demo/$split" --size 16 --classes-from demo/train
done
show megavis train yaml_configs/igpt/demo.yaml
show megavis probe "$run" --selection demo/selection --train-images 2000
show megavis sample "$run" --num-images 32 --top-p 0.95
show megavis sample "$run" --num-images 10 --top-p 0.95 --prefix half
show megavis report "$run"
