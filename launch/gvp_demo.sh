#!/usr/bin/env bash
# GVP's demo: photographs to groups of patches (p2p), and by way of a small VQGAN to ids (p2d, d2d),
# on CPU.
#
#   bash launch/gvp_demo.sh
#
# Each command is shown as you would type it. Run again, it goes on where it was; after
# `rm -r demo runs/gvp_demo*` it begins anew.
set -euo pipefail
cd "$(dirname "$0")/.."

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

vqgan=runs/gvp_demo_vqgan

show python -m data_tools photographs demo/images --size 32 --crops 12000 --validation-crops 1000
show python -m data_tools jpeg demo/images/train --out demo/jpeg_train --size 32
show python -m data_tools jpeg demo/images/validation --out demo/jpeg_validation --size 32 \
  --classes-from demo/jpeg_train
show megavis train yaml_configs/gvp/demo.yaml
show megavis figure groups runs/gvp_demo
show megavis probe runs/gvp_demo --train-images 1000 --untrained-networks 1
show megavis train yaml_configs/gvp/demo_vqgan.yaml
show megavis train yaml_configs/gvp/demo_p2d.yaml
show python -m data_tools ids demo/jpeg_train --tokenizer "$vqgan" --out demo/ids_train --size 32
show python -m data_tools ids demo/jpeg_validation --tokenizer "$vqgan" --out demo/ids_validation \
  --size 32 --classes-from demo/ids_train
show megavis train yaml_configs/gvp/demo_d2d.yaml
