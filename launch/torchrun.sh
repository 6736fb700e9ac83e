#!/usr/bin/env bash
# Start megavis with torchrun, on one node or on several.
#
#   bash launch/torchrun.sh CONFIG [key=value ...]
#
# One node needs nothing else. On several nodes run the same line on each, with
#   NUM_NODES=4 NODE_RANK=0..3 MASTER_ADDR=<name of node 0> [MASTER_PORT=29500]
# PROCESSES is the number of processes a node; default: its GPUs, of which CUDA_VISIBLE_DEVICES may
# hide some, or 1 without any.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi

# nvidia-smi lists all GPUs of the node, CUDA those of CUDA_VISIBLE_DEVICES up to the first wrong one.
count_gpus() {
  if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
    nvidia-smi --list-gpus 2>/dev/null | wc -l || true
  else
    printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | awk '/^-|^ *$/ { exit } { n++ } END { print n + 0 }'
  fi
}
if [[ -z ${PROCESSES:-} ]]; then
  PROCESSES=$(count_gpus)
  ((PROCESSES > 0)) || PROCESSES=1
fi
num_nodes=${NUM_NODES:-1}

# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"
# Where a process dies, the launcher ends the others; where one hangs, megavis ends all after
# training.hang_timeout. RESTARTS=3 starts them again so many times, from the newest checkpoint.
# Not set here: CUDA_DEVICE_MAX_CONNECTIONS. Megatron-Core recommends 1 with sequence parallelism,
# so that a collective is issued before the matrix product it overlaps with; ZeRO-3, whose gathers
# overlap with the layer before, is better off without.
# Seconds from a SIGTERM that torchrun passes on until it kills: a step and a checkpoint must fit in.
# Its own 30 are few for that.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

if ((num_nodes == 1)); then
  # Standalone picks a free port: two jobs on one node do not collide.
  meeting=(--standalone)
else
  : "${NODE_RANK:?say which of the nodes this is, from 0}"
  : "${MASTER_ADDR:?say the name of node 0}"
  meeting=(
    --nnodes "$num_nodes" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
  )
fi
# elastic.py is torchrun, but for its exit code.
exec python "$(dirname "$0")/elastic.py" "${meeting[@]}" --max-restarts "${RESTARTS:-0}" \
  --nproc-per-node "$PROCESSES" --module megavis.cli train "$@"
