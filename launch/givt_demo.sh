#!/usr/bin/env bash
# GIVT's demo: photographs to a small β-VAE to its latents to a small GIVT and samples by class, on
# CPU.
#
#   bash launch/givt_demo.sh
#
# Each command is shown as you would type it. Run again, it goes on where it was; after
# `rm -r demo runs/givt_demo runs/givt_demo_vae` it begins anew.
set -euo pipefail
cd "$(dirname "$0")/.."

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

vae=runs/givt_demo_vae
run=runs/givt_demo

show python -m data_tools photographs demo/images --size 32 --crops 12000 --validation-crops 1000
show python -m data_tools jpeg demo/images/train --out demo/jpeg_train --size 32
show python -m data_tools jpeg demo/images/validation --out demo/jpeg_validation --size 32 \
  --classes-from demo/jpeg_train
show megavis train yaml_configs/givt/demo_vae.yaml
show python -m data_tools latents demo/jpeg_train --tokenizer "$vae" --out demo/latents_train --size 32
show python -m data_tools latents demo/jpeg_validation --tokenizer "$vae" \
  --out demo/latents_validation --size 32 --classes-from demo/latents_train
show megavis train yaml_configs/givt/demo.yaml
show megavis sample "$run" --classes 0,1,2,3,4,5,6,7,8,9 --per-class 8 --scale 0.9 --guidance 0.5
show megavis sample "$run" --moments --num-images 512
