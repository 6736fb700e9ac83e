#!/usr/bin/env bash
# MP3's speech demo: spoken words to cepstral coefficients to a small keyword spotter, with and
# without pre-training, on CPU. Requires `pip install 'megavis[speech]'`.
#
#   bash launch/speech_demo.sh
#
# Each command is shown as you would type it. Run again, it resumes; after
# `rm -r demo/words demo/speech runs/mp3_*speech*` it starts over.
set -euo pipefail
cd "$(dirname "$0")/.."

show() {
  printf '\n$ %s\n' "$*"
  "$@"
}

tune=yaml_configs/mp3/finetune_demo_speech.yaml

show python -m data_tools words demo/words
show python -m data_tools speech demo/words --out demo/speech
show megavis train yaml_configs/mp3/demo_speech.yaml
show megavis finetune "$tune"
show megavis finetune "$tune" name=mp3_scratch_demo_speech finetune.from_run=null
show megavis ensemble runs/mp3_finetune_demo_speech runs/mp3_scratch_demo_speech
