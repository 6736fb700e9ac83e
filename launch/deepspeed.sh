#!/usr/bin/env bash
# Start megavis with DeepSpeed's launcher, which reaches the other nodes by ssh.
#
#   bash launch/deepspeed.sh CONFIG [key=value ...]                       this node, all its GPUs
#   HOSTFILE=launch/hostfile bash launch/deepspeed.sh CONFIG [...]        the nodes of the file
#   PROCESSES=2 bash launch/deepspeed.sh CONFIG [...]                     2 processes, this node
#   CUDA_VISIBLE_DEVICES=2,3 bash launch/deepspeed.sh CONFIG [...]        these GPUs, this node
#
# Processes meet at MASTER_PORT, or at a free port, so that several jobs run on one node.
# A hostfile names nodes and their GPUs (hostfile.example). ssh must work between them without a
# password, and the checkout and its environment must have the same path on all of them.
# Variables for the other nodes go into ~/.deepspeed_env, one NAME=value per line: the launcher
# forwards only those that begin with NCCL, PYTHON, UCX or MV2.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,13s/^# \{0,1\}//p' "$0"
  exit 2
fi

# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"

fail() {
  echo "deepspeed.sh: $1" >&2
  exit 2
}

[[ ${PROCESSES:-1} =~ ^[1-9][0-9]*$ ]] || fail "PROCESSES is $PROCESSES: set it to a whole number"

options=()
if [[ -n ${HOSTFILE:-} ]]; then
  [[ -r $HOSTFILE ]] || fail "$HOSTFILE cannot be read"
  options+=(--hostfile "$HOSTFILE")
fi

# Print the first PROCESSES of the visible GPUs, all without it. CUDA uses the entries of
# CUDA_VISIBLE_DEVICES up to the first invalid one.
visible_gpus() {
  local entry found=() entries
  IFS=, read -ra entries <<<"${CUDA_VISIBLE_DEVICES// /}"
  for entry in ${entries[@]+"${entries[@]}"}; do
    case $entry in
      GPU-* | MIG-*) fail "CUDA_VISIBLE_DEVICES names $entry, and DeepSpeed's launcher takes numbers of GPUs; use launch/torchrun.sh" ;;
      '' | *[!0-9]*) break ;;
      *) found+=("$entry") ;;
    esac
  done
  if ((${PROCESSES:-0} > ${#found[@]})); then
    fail "PROCESSES is $PROCESSES, and CUDA_VISIBLE_DEVICES names ${#found[@]} GPUs: $CUDA_VISIBLE_DEVICES"
  fi
  found=("${found[@]:0:${PROCESSES:-${#found[@]}}}")
  (IFS=, && echo "${found[*]}")
}

# DeepSpeed ignores CUDA_VISIBLE_DEVICES if it is given a number of processes, and takes GPUs 0, 1, ...
if [[ -z ${HOSTFILE:-} && -n ${CUDA_VISIBLE_DEVICES:-} && $CUDA_VISIBLE_DEVICES != -* ]]; then
  gpus=$(visible_gpus)
  options+=(--include "localhost:$gpus")
elif [[ -n ${PROCESSES:-} ]]; then
  options+=(--num_accelerators "$PROCESSES")
fi

# DeepSpeed's own default is one port for all jobs. Below the range of ephemeral ports, as in
# megavis/parallel/launch.py.
free_port() {
  local port
  while
    port=$((20000 + RANDOM % 12768))
    (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null
  do :; done
  echo "$port"
}
options+=(--master_port "${MASTER_PORT:-$(free_port)}")

# shellcheck disable=SC2317,SC2329 # called by the traps
children() {
  pgrep -P "$1" 2>/dev/null || tr ' ' '\n' 2>/dev/null <"/proc/$1/task/$1/children" || true
}

# Pass a signal on to the processes that train, which then save. DeepSpeed's own processes would end
# without waiting for them: on one node its launcher has no handlers and leaves the job to itself. On
# several it has, and stops the other nodes.
# shellcheck disable=SC2317,SC2329 # called by the traps
forward() {
  local node nodes=() workers=()
  signalled=1
  for node in $(children "$launcher"); do
    [[ $(tr '\0' ' ' 2>/dev/null <"/proc/$node/cmdline") != *deepspeed.launcher.launch* ]] || nodes+=("$node")
  done
  for node in ${nodes[@]+"${nodes[@]}"}; do
    mapfile -t -O "${#workers[@]}" workers < <(children "$node")
  done
  if ((${#workers[@]})); then
    kill -s "$1" "${workers[@]}" 2>/dev/null || true
  else
    # Nothing trains here yet, or it does so on other nodes.
    kill -s TERM "$launcher" ${nodes[@]+"${nodes[@]}"} 2>/dev/null || true
  fi
}
for signal in TERM INT USR1; do
  # shellcheck disable=SC2064 # expanded now
  trap "forward $signal" "$signal"
done
trap 'forward TERM' HUP

# megavis reads LOCAL_RANK from the environment, so the launcher need not add an argument. `env` sets
# variables that are not forwarded over ssh; without them each process would use all processors.
# In a process group of its own, or Ctrl-C would reach the processes twice, and the second ends them
# without a checkpoint.
set -m
deepspeed ${options[@]+"${options[@]}"} --no_local_rank --no_python \
  env "OMP_NUM_THREADS=$OMP_NUM_THREADS" "PYTORCH_CUDA_ALLOC_CONF=$PYTORCH_CUDA_ALLOC_CONF" \
  "TORCH_FR_BUFFER_SIZE=$TORCH_FR_BUFFER_SIZE" "TORCH_FR_DUMP_TEMP_FILE=$TORCH_FR_DUMP_TEMP_FILE" \
  "TORCH_NCCL_DUMP_ON_TIMEOUT=$TORCH_NCCL_DUMP_ON_TIMEOUT" \
  "TORCHINDUCTOR_COMPILE_THREADS=$TORCHINDUCTOR_COMPILE_THREADS" "$(command -v python)" -m megavis.cli train "$@" </dev/null &
launcher=$!
set +m
# A signal interrupts `wait` with another exit code, so `wait` is called again, even if the launcher has
# exited meanwhile.
signalled=1
while ((signalled)); do
  signalled=0 code=0
  wait "$launcher" || code=$?
done
exit "$code"
