#!/usr/bin/env bash
# Start megavis with torchrun, on one node or on several.
#
#   bash launch/torchrun.sh CONFIG [key=value ...]
#
# This is all for one node. For several nodes run the same line on each, with
#   NUM_NODES=4 NODE_RANK=0..3 MASTER_ADDR=<name of node 0> [MASTER_PORT=29500]
# PROCESSES is the number of processes per node; the default is its number of visible GPUs
# (CUDA_VISIBLE_DEVICES), or 1 without GPUs.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi

fail() {
  echo "torchrun.sh: $1" >&2
  exit 2
}
# An error of torchrun would end with 1, after which schedulers start a job again.
for name in PROCESSES NUM_NODES NODE_RANK MASTER_PORT RESTARTS; do
  case $name:${!name:-1} in
    PROCESSES:auto | PROCESSES:cpu | PROCESSES:gpu) ;;
    PROCESSES:0 | NUM_NODES:0 | *:*[!0-9]*) fail "$name is ${!name}: set it to a whole number" ;;
  esac
done

# nvidia-smi lists all GPUs, below them their MIG instances, or says why it cannot; CUDA uses those of
# CUDA_VISIBLE_DEVICES up to the first invalid entry.
count_gpus() {
  if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]]; then
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true
  else
    printf '%s' "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | awk '/^-|^ *$/ { exit } { n++ } END { print n + 0 }'
  fi
}
if [[ -z ${PROCESSES:-} ]]; then
  PROCESSES=$(count_gpus)
  ((PROCESSES > 0)) || PROCESSES=1
fi
num_nodes=$((10#${NUM_NODES:-1}))

# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"
# If a process dies, the launcher ends the others; if one hangs, megavis ends all after
# training.hang_timeout. RESTARTS=3 restarts the job up to three times, from the newest checkpoint, but not
# after a mistake of the user (exit code 2), without progress (72) or after a requested stop (75). On
# several nodes set it on all of them; each restart uses the next port.
# Seconds between the SIGTERM that torchrun forwards and its SIGKILL: long enough for a step and a
# checkpoint, for which the default of 30 is short.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

if ((num_nodes == 1)) && [[ -n ${MASTER_PORT:-} ]]; then
  meeting=(--master-addr 127.0.0.1 --master-port "$MASTER_PORT")
elif ((num_nodes == 1)); then
  # Standalone picks a free port: two jobs on one node do not collide.
  meeting=(--standalone)
else
  [[ -n ${NODE_RANK:-} ]] || fail "NODE_RANK is missing: set it to the index of this node, from 0"
  [[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR is missing: set it to the name of node 0"
  ((10#$NODE_RANK < num_nodes)) || fail "NODE_RANK is $NODE_RANK, and nodes are 0 to $((num_nodes - 1))"
  meeting=(
    --nnodes "$num_nodes" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
  )
fi
exec python "$(dirname "$0")/elastic.py" --restarts "${RESTARTS:-0}" "${meeting[@]}" \
  --nproc-per-node "$PROCESSES" --module megavis.cli train "$@"
