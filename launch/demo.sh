#!/usr/bin/env bash
# The demos: each paper on capital letters in matplotlib's fonts, on CPU.
#
#   make demo              iGPT; the same as bash launch/demo.sh
#   make demo PAPER=mp3    another paper; the same as bash launch/demo.sh mp3
#   make demos             all of them, and docs/gallery.md
#   SEED=1 make demo       other weights and another order of images; its runs end in _1
#
# Each step prints a line; its command and output are in demo/PAPER.log. Run again, a demo resumes;
# after `rm -r demo runs/*_demo*` it starts over.

# Words that `seeded` prints are arguments of their own.
# shellcheck disable=SC2046
set -euo pipefail
cd "$(dirname "$0")/.."

# Let waiting threads sleep after a short spin: a long one, the default, takes five times as long while a
# core is busy with other work, and none a quarter longer on idle cores (docs/evaluation.md).
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

seed=${SEED:-0}
tag=
[ "$seed" = 0 ] || tag=_$seed

# seeded NAME [FROM_RUN]: overrides for run NAME with $seed, starting from FROM_RUN with that seed.
seeded() {
  [ -n "$tag" ] || return 0
  echo "seed=$seed name=$1$tag" ${2:+"finetune.from_run=runs/$2$tag"}
}

# step WHAT COMMAND ...: announce and run a step, or only count it if `counting` is set.
step() {
  number=$((number + 1))
  [ -z "$counting" ] || return 0
  printf '[%d/%d] %s\n' "$number" "$total" "$1"
  if [ -z "$other" ]; then
    run_logged "${@:2}"
  else
    OMP_NUM_THREADS=1 run_logged "${@:2}"
  fi
}

# background WHAT COMMAND ...: announce a step and start it in the background. The steps until
# `join_background` run concurrently, each on one thread. Two small concurrent runs use two cores better
# than consecutive runs on both.
other=
trap 'test -z "$other" || kill "$other" 2>/dev/null || true' EXIT
background() {
  number=$((number + 1))
  [ -z "$counting" ] || return 0
  printf '[%d/%d] %s, and meanwhile\n' "$number" "$total" "$1"
  printf '\n$ %s\n' "${*:2}" >"$log.other"
  OMP_NUM_THREADS=1 "${@:2}" >>"$log.other" 2>&1 &
  other=$!
}

join_background() {
  local code=0
  [ -z "$counting" ] || return 0
  wait "$other" || code=$?
  other=
  cat "$log.other" >>"$log"
  [ "$code" -eq 0 ] || fail "$code" "$(sed -n 's/^\$ //p' "$log.other" | head -n 1)"
  rm "$log.other"
}

# Progress bars are written to standard error, and only to a terminal.
run_logged() {
  local code=0
  printf '\n$ %s\n' "$*" >>"$log"
  if [ -t 2 ]; then
    "$@" >>"$log" || code=$?
  else
    "$@" >>"$log" 2>&1 || code=$?
  fi
  [ "$code" -eq 0 ] || fail "$code" "$*"
}

# fail CODE COMMAND: show the end of the log and exit.
fail() {
  printf '\nThis command ended with exit code %d; the end of %s:\n$ %s\n' "$1" "$log" "$2" >&2
  tail -n 20 "$log" >&2
  exit "$1"
}

# finish RUN ...: print a summary of the runs, and write their page.
finish() {
  [ -z "$counting" ] || return 0
  printf '\n'
  megavis report "$@" | tee -a "$log"
}

# letters_12: the data of iGPT, which reads pixels.
letters_12() {
  local split
  step "draw letters of 12² pixels: 14 fonts to train on, 3 to select by, 5 to validate" \
    python -m data_tools letters demo/letters
  step "fit a palette of 128 colours" \
    python -m data_tools palette fit demo/letters/train --out demo/palette.npy --size 12 \
    --num-colors 128
  step "write training images as palette tokens" \
    python -m data_tools palette shards demo/letters/train --palette demo/palette.npy \
    --out demo/train --size 12
  for split in selection validation; do
    step "write $split images as palette tokens" \
      python -m data_tools palette shards "demo/letters/$split" --palette demo/palette.npy \
      --out "demo/$split" --size 12 --classes-from demo/train
  done
}

# probe RUN [SIZE]: linear probe of each layer of a run on letters_12, or on letters_SIZE.
probe() {
  local tail=${2:+_$2}
  step "probe each layer: does a linear classifier of its features name the letter?" \
    megavis probe "$1" --selection "demo/selection$tail" --validation "demo/validation$tail" \
    --train-images 5000 --untrained-networks 1 --seed "$seed"
}

igpt() {
  local run=runs/igpt_demo$tag
  letters_12
  step "train iGPT, 4 layers 160 wide, for 1,600 steps of 8 images" \
    megavis train yaml_configs/igpt/demo.yaml $(seeded igpt_demo)
  probe "$run"
  step "sample letters unconditionally" megavis sample "$run" --num-images 48
  step "complete the lower halves of eight letters, six times each" \
    megavis sample "$run" --num-images 8 --completions 6 --top-p 0.9 --prefix half
  finish "$run"
}

igpt-bert() {
  local run=runs/igpt_demo_bert$tag
  letters_12
  step "train iGPT with BERT's objective, 4 layers 160 wide, for 2,400 steps of 8 images" \
    megavis train yaml_configs/igpt/demo_bert.yaml $(seeded igpt_demo_bert)
  probe "$run"
  step "draw accuracy over depth" \
    megavis figure depth "$run" --probe "$run/evaluation/probe.json"
  finish "$run"
}

# letters_32: the data of the papers that read patches.
letters_32() {
  local part
  step "draw letters of 32² pixels: 14 fonts to train on, 3 to select by, 5 to validate" \
    python -m data_tools letters demo/letters_32 --size 32
  for part in train selection validation; do
    step "write $part images as JPEG shards" \
      python -m data_tools jpeg "demo/letters_32/$part" --out "demo/${part}_32" --size 32
  done
}

mp3() {
  local run=runs/mp3_demo$tag tune=yaml_configs/mp3/finetune_demo.yaml
  letters_32
  step "train MP3, 4 layers 128 wide, for 1,200 steps of 64 images" \
    megavis train yaml_configs/mp3/demo.yaml $(seeded mp3_demo)
  step "measure the accuracy of predicted positions" \
    megavis figure positions "$run" --images demo/validation_32
  step "reassemble shuffled letters" \
    megavis figure jigsaw "$run" --images demo/validation_32 --num-images 4
  background "fine-tune to classify letters" \
    megavis finetune "$tune" $(seeded mp3_finetune_demo mp3_demo)
  step "the same from scratch" \
    megavis finetune "$tune" finetune.from_run=null "name=mp3_scratch_demo$tag" "seed=$seed"
  join_background
  finish "$run" "runs/mp3_finetune_demo$tag" "runs/mp3_scratch_demo$tag"
}

darl() {
  local run=runs/darl_demo$tag mse=runs/darl_mse_demo$tag tune=yaml_configs/darl/finetune_demo.yaml
  letters_32
  background "train DARL to denoise patch by patch, 4 layers 128 wide, for 1,000 steps of 32 images" \
    megavis train yaml_configs/darl/demo.yaml $(seeded darl_demo)
  step "train it to predict patches by squared error" \
    megavis train yaml_configs/darl/demo.yaml objective.loss=mse objective.decoder=null \
    "name=darl_mse_demo$tag" "seed=$seed"
  step "complete lower halves by squared error" megavis figure completions "$mse" \
    --completions 1 --draws 1
  step "train a classifier of letters from scratch" \
    megavis finetune "$tune" finetune.from_run=null finetune.layer_decay=1.0 \
    "name=darl_scratch_demo$tag" "seed=$seed"
  join_background
  background "fine-tune the denoising network to classify letters" \
    megavis finetune "$tune" $(seeded darl_finetune_demo darl_demo)
  step "complete lower halves by denoising patch by patch" megavis figure completions "$run"
  join_background
  finish "$run" "$mse" "runs/darl_finetune_demo$tag" "runs/darl_scratch_demo$tag"
}

# latents_ten: ten letters as latents of a VAE, which GIVT and MAR model.
latents_ten() {
  local vae=runs/givt_demo_vae part
  step "draw ten letters of 32² pixels" \
    python -m data_tools letters demo/letters_ten --size 32 --letters 10 --images 20000 \
    --selection-images 500 --validation-images 1000
  for part in train selection validation; do
    step "write $part images as JPEG shards" \
      python -m data_tools jpeg "demo/letters_ten/$part" --out "demo/${part}_ten" --size 32
  done
  step "train a β-VAE for 5,000 steps of 8 images" megavis train yaml_configs/givt/demo_vae.yaml
  for part in train selection; do
    step "write $part images as latents" \
      python -m data_tools latents "demo/${part}_ten" --tokenizer "$vae" \
      --out "demo/latents_$part" --size 32
  done
}

givt() {
  local vae=runs/givt_demo_vae run=runs/givt_demo$tag npz
  npz=$run/samples/images.npz
  latents_ten
  step "reconstruct 1,000 letters in unseen fonts" \
    megavis evaluate reconstruction "$vae" --images demo/validation_ten --num-images 1000
  step "show ten of them" megavis sample "$vae" --images demo/validation_ten --num-images 10
  step "train GIVT, 4 layers 192 wide, for 2,000 steps of 32 images" \
    megavis train yaml_configs/givt/demo.yaml $(seeded givt_demo)
  step "sample eight images of each letter, with guidance" \
    megavis sample "$run" --classes 0,1,2,3,4,5,6,7,8,9 --per-class 8 --temperature 0.9 --guidance 0.4
  step "sample 1,000 images, letters in turn" \
    megavis sample "$run" --num-images 1000 --npz "$npz" --temperature 0.9 --guidance 0.4
  step "classify the samples with a classifier of real letters" \
    megavis evaluate classes "$run" --train demo/train_ten --images demo/validation_ten \
    --tokenizer "$vae"
  finish "$run" "$vae"
}

givt-dense() {
  local part kind run
  step "draw 10,000 scenes of 64² pixels, with segments and depths" \
    python -m data_tools scenes demo/scenes --images 10000 --objects 3 --wall 4.5 6 --class-colors
  for part in train validation; do
    step "write $part images and panoptic maps" \
      python -m data_tools maps panoptic "demo/scenes/images/$part" "demo/scenes/panoptic/$part" \
      "demo/scenes/panoptic_$part.json" --out "demo/scenes_panoptic/$part"
    step "write $part images and depths" \
      python -m data_tools maps depth "demo/scenes/images/$part" "demo/scenes/depth/$part" \
      --out "demo/scenes_depth/$part"
  done
  background "train a VAE of depths for 1,400 steps of 32 maps" \
    megavis train yaml_configs/givt/demo_vae_depth.yaml
  step "train one of panoptic maps" megavis train yaml_configs/givt/demo_vae_panoptic.yaml
  join_background
  background "train GIVT to predict depths, 4 + 4 layers 128 wide, for 1,000 steps of 32 images" \
    megavis train yaml_configs/givt/demo_depth.yaml $(seeded givt_demo_depth)
  step "train it to predict panoptic maps" \
    megavis train yaml_configs/givt/demo_panoptic.yaml $(seeded givt_demo_panoptic)
  join_background
  for kind in panoptic depth; do
    run=runs/givt_demo_$kind$tag
    step "compare 200 $kind maps that the VAE reconstructs with the truth" \
      megavis evaluate "$kind" "runs/givt_demo_vae_$kind"
    step "compare those that GIVT predicts" \
      megavis evaluate "$kind" "$run" --temperature 0.0001
    step "score answers without a model" \
      python -m benchmarks.label_map_baselines "demo/scenes_$kind" --run "$run"
    step "show ten images, their maps and the predictions" \
      megavis sample "$run" --images "demo/scenes_$kind/validation" --temperature 0.0001 \
      --completions 1 --num-images 10
  done
  finish "runs/givt_demo_panoptic$tag" "runs/givt_demo_depth$tag" runs/givt_demo_vae_panoptic \
    runs/givt_demo_vae_depth
}

# vqgan_32: the tokenizer of the papers that read ids.
vqgan_32() {
  step "train a VQGAN of 256 ids for 600 steps of 32 images" \
    megavis train yaml_configs/gvp/demo_vqgan.yaml
}

gvp() {
  local run=runs/gvp_demo$tag ids=runs/gvp_demo_d2d$tag vqgan=runs/gvp_demo_vqgan part
  letters_32
  step "train GVP on patches (p2p), 4 layers 128 wide, for 600 steps of 64 images" \
    megavis train yaml_configs/gvp/demo.yaml $(seeded gvp_demo)
  probe "$run" 32
  step "predict hidden patches, all at once and in groups" \
    megavis figure groups "$run" --images demo/validation_32
  vqgan_32
  step "reconstruct 1,000 letters in unseen fonts" \
    megavis evaluate reconstruction "$vqgan" --images demo/validation_32 --num-images 1000
  for part in train selection validation; do
    step "write $part images as ids" \
      python -m data_tools ids "demo/${part}_32" --tokenizer "$vqgan" --out "demo/ids_$part" --size 32
  done
  step "train GVP from ids to ids (d2d), for 300 steps of 64 images" \
    megavis train yaml_configs/gvp/demo_d2d.yaml $(seeded gvp_demo_d2d)
  step "sample hidden ids, all at once and in groups" \
    megavis figure groups "$ids" --images demo/ids_validation
  finish "$run" "$ids" "$vqgan"
}

mae() {
  local run=runs/mae_demo$tag tune=yaml_configs/mae/finetune_demo.yaml
  letters_32
  step "train MAE, 4 layers 128 wide with a decoder of 2 layers, for 1,200 steps of 64 images" \
    megavis train yaml_configs/mae/demo.yaml $(seeded mae_demo)
  probe "$run" 32
  step "predict three quarters of the patches from the others" \
    megavis figure reconstructions "$run" --images demo/validation_32
  background "fine-tune the encoder to classify letters" \
    megavis finetune "$tune" $(seeded mae_finetune_demo mae_demo)
  step "the same from scratch" \
    megavis finetune "$tune" finetune.from_run=null finetune.layer_decay=1.0 \
    optimizer.learning_rate=0.001 "name=mae_scratch_demo$tag" "seed=$seed"
  join_background
  finish "$run" "runs/mae_finetune_demo$tag" "runs/mae_scratch_demo$tag"
}

dense() {
  local run=runs/mae_demo_scenes$tag part
  local segments=yaml_configs/mae/segments_demo.yaml instances=yaml_configs/mae/instances_demo.yaml
  step "draw 6,000 scenes of 64² pixels without labels, and 400 to evaluate on" \
    python -m data_tools scenes demo/scenes_hard --images 6000 --validation-images 400 --objects 3 --wall 3 4.5
  step "draw 100 scenes with labels" \
    python -m data_tools scenes demo/scenes_few --images 100 --validation-images 2 --objects 3 --wall 3 4.5 --seed 7
  step "write the images without labels" \
    python -m data_tools jpeg demo/scenes_hard/images/train --out demo/scenes_unlabelled
  step "write those with labels" \
    python -m data_tools maps panoptic demo/scenes_few/images/train demo/scenes_few/panoptic/train \
    demo/scenes_few/panoptic_train.json --out demo/scenes_labelled
  step "write those to evaluate on" \
    python -m data_tools maps panoptic demo/scenes_hard/images/validation \
    demo/scenes_hard/panoptic/validation demo/scenes_hard/panoptic_validation.json \
    --out demo/scenes_held_out
  step "write the objects of those with labels" \
    python -m data_tools maps instances demo/scenes_few/images/train \
    demo/scenes_few/instances_train.json --out demo/labelled_instances
  step "write the objects of those to evaluate on" \
    python -m data_tools maps instances demo/scenes_hard/images/validation \
    demo/scenes_hard/instances_validation.json --out demo/held_out_instances
  step "train MAE on scenes, 6 layers 96 wide, for 2,000 steps of 64 images" \
    megavis train yaml_configs/mae/demo_scenes.yaml $(seeded mae_demo_scenes)
  background "fine-tune it to predict classes of pixels from 100 scenes" \
    megavis finetune "$segments" $(seeded mae_segments_demo mae_demo_scenes)
  step "the same from scratch" \
    megavis finetune "$segments" finetune.from_run=null finetune.layer_decay=1.0 \
    "name=mae_segments_scratch_demo$tag" "seed=$seed"
  join_background
  background "evaluate whole scenes by sliding windows" \
    megavis evaluate segmentation "runs/mae_segments_demo$tag"
  step "those of the run from scratch" \
    megavis evaluate segmentation "runs/mae_segments_scratch_demo$tag"
  join_background
  background "fine-tune it to find objects from 100 scenes" \
    megavis finetune "$instances" $(seeded mae_instances_demo mae_demo_scenes)
  step "the same from scratch" \
    megavis finetune "$instances" finetune.from_run=null finetune.layer_decay=1.0 \
    "name=mae_instances_scratch_demo$tag" "seed=$seed"
  join_background
  background "find the objects of whole scenes" \
    megavis evaluate detection "runs/mae_instances_demo$tag"
  step "those of the run from scratch" \
    megavis evaluate detection "runs/mae_instances_scratch_demo$tag"
  join_background
  finish "runs/mae_segments_demo$tag" "runs/mae_segments_scratch_demo$tag" \
    "runs/mae_instances_demo$tag" "runs/mae_instances_scratch_demo$tag" "$run"
}

aim() {
  local run=runs/aim_demo$tag
  letters_32
  step "train AIM, 4 layers 128 wide, for 1,200 steps of 64 images" \
    megavis train yaml_configs/aim/demo.yaml $(seeded aim_demo)
  step "predict the patches after a prefix" megavis figure reconstructions "$run"
  step "train an attentive probe to classify letters" \
    megavis finetune yaml_configs/aim/probe_demo.yaml $(seeded aim_probe_demo aim_demo)
  finish "$run" "runs/aim_probe_demo$tag"
}

rar() {
  local run=runs/rar_demo$tag
  letters_32
  vqgan_32
  step "train RAR, 4 layers 128 wide, for 800 steps of 32 images" \
    megavis train yaml_configs/rar/demo.yaml $(seeded rar_demo)
  step "sample A to D, with guidance" \
    megavis sample "$run" --classes 0,1,2,3 --guidance 2 --guidance-power 1
  finish "$run" runs/gvp_demo_vqgan
}

randar() {
  local run=runs/randar_demo$tag
  letters_32
  vqgan_32
  step "train RandAR, 4 layers 128 wide, for 800 steps of 32 images" \
    megavis train yaml_configs/randar/demo.yaml $(seeded randar_demo)
  step "sample A to D in 24 rounds" megavis sample "$run" --classes 0,1,2,3 --rounds 24
  step "complete half of the ids of eight letters, six times each" \
    megavis sample "$run" --prefix half --num-images 8 --completions 6
  finish "$run" runs/gvp_demo_vqgan
}

mar() {
  local run=runs/mar_demo$tag
  latents_ten
  step "train MAR, 2 + 2 layers 128 wide, for 2,000 steps of 32 images" \
    megavis train yaml_configs/mar/demo.yaml $(seeded mar_demo)
  step "sample ten letters in 16 rounds, with guidance" \
    megavis sample "$run" --classes 0,1,2,3,4,5,6,7,8,9 --rounds 16 --guidance 1 \
    --guidance-schedule linear
  finish "$run" runs/givt_demo_vae
}

papers=(igpt igpt-bert darl mp3 givt givt-dense gvp mae dense aim rar randar mar)

demo() {
  local began=$SECONDS
  log=demo/$1$tag.log
  mkdir -p demo
  number=0 counting=yes
  "$1"
  total=$number number=0 counting=
  printf '%s: commands and output of each step are in %s\n' "$1" "$log"
  "$1"
  printf '  %-18s%d min %02d s\n' "took" $(((SECONDS - began) / 60)) $(((SECONDS - began) % 60))
}

case " ${papers[*]} all " in
  *" ${1:-igpt} "*) ;;
  *)
    echo "usage: bash launch/demo.sh [PAPER], PAPER one of: ${papers[*]} all" >&2
    exit 2
    ;;
esac
if [ "${1:-igpt}" = all ]; then
  for paper in "${papers[@]}"; do demo "$paper"; done
  [ -n "$tag" ] || python docs/scripts/gallery.py
else
  demo "${1:-igpt}"
fi
