#!/usr/bin/env bash
# Start megavis with DeepSpeed's launcher, which reaches the other nodes by ssh.
#
#   bash launch/deepspeed.sh CONFIG [key=value ...]                       this node, all its GPUs
#   HOSTFILE=launch/hostfile bash launch/deepspeed.sh CONFIG [...]        the nodes of the file
#   PROCESSES=2 bash launch/deepspeed.sh CONFIG [...]                     2 processes, here
#
# A hostfile names nodes and their GPUs (hostfile.example). ssh must work between them without a
# password, and the checkout and its environment must lie at the same place on all of them.
# Variables for the other nodes go into ~/.deepspeed_env, one NAME=value a line: ssh takes none
# along but those that begin with NCCL, PYTHON, UCX or MV2.
set -euo pipefail

if (($# == 0)); then
  sed -n '2,11s/^# \{0,1\}//p' "$0"
  exit 2
fi

# These are explained in torchrun.sh.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

options=()
if [[ -n ${HOSTFILE:-} ]]; then
  [[ -r $HOSTFILE ]] || { echo "deepspeed.sh: $HOSTFILE cannot be read" >&2; exit 2; }
  options+=(--hostfile "$HOSTFILE")
fi
if [[ -n ${PROCESSES:-} ]]; then
  options+=(--num_accelerators "$PROCESSES")
fi
# megavis reads LOCAL_RANK from the environment, so the launcher need not add an argument. `env`,
# because ssh takes OMP_NUM_THREADS to no node, where each process would then use all processors.
exec deepspeed ${options[@]+"${options[@]}"} --no_local_rank --no_python \
  env "OMP_NUM_THREADS=$OMP_NUM_THREADS" "$(command -v python)" -m megavis.cli train "$@"
