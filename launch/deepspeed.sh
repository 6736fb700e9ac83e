#!/usr/bin/env bash
# Start megavis with DeepSpeed's launcher, which reaches the other nodes by ssh.
#
#   bash launch/deepspeed.sh CONFIG [key=value ...]                       this node, all its GPUs
#   HOSTFILE=launch/hostfile bash launch/deepspeed.sh CONFIG [...]        the nodes of the file
#   PROCESSES=2 bash launch/deepspeed.sh CONFIG [...]                     2 processes, this node
#
# A hostfile names nodes and their GPUs (hostfile.example). ssh must work between them without a
# password, and the checkout and its environment must have the same path on all of them.
# Variables for the other nodes go into ~/.deepspeed_env, one NAME=value per line: the launcher
# forwards only those that begin with NCCL, PYTHON, UCX or MV2.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,11s/^# \{0,1\}//p' "$0"
  exit 2
fi

# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"

options=()
if [[ -n ${HOSTFILE:-} ]]; then
  [[ -r $HOSTFILE ]] || { echo "deepspeed.sh: $HOSTFILE cannot be read" >&2; exit 2; }
  options+=(--hostfile "$HOSTFILE")
fi
if [[ -n ${PROCESSES:-} ]]; then
  options+=(--num_accelerators "$PROCESSES")
fi
# megavis reads LOCAL_RANK from the environment, so the launcher need not add an argument. `env` sets
# variables that are not forwarded over ssh; without them each process would use all processors.
exec deepspeed ${options[@]+"${options[@]}"} --no_local_rank --no_python \
  env "OMP_NUM_THREADS=$OMP_NUM_THREADS" "PYTORCH_CUDA_ALLOC_CONF=$PYTORCH_CUDA_ALLOC_CONF" \
  "TORCH_FR_BUFFER_SIZE=$TORCH_FR_BUFFER_SIZE" "TORCH_FR_DUMP_TEMP_FILE=$TORCH_FR_DUMP_TEMP_FILE" \
  "TORCH_NCCL_DUMP_ON_TIMEOUT=$TORCH_NCCL_DUMP_ON_TIMEOUT" "$(command -v python)" -m megavis.cli train "$@"
