#!/usr/bin/env bash
# Start megavis under SLURM: one task a GPU. megavis reads rank, size and node list from SLURM_*.
#
#   sbatch --nodes 4 launch/slurm.sh CONFIG [key=value ...]
#
# Partition, account and time are the cluster's: give them to sbatch, or add them here. A node with
# another number of GPUs: --ntasks-per-node and --gpus-per-node, both.
#SBATCH --job-name=megavis
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
# %x is the job's name, %j its number. A requeued job writes on into the same file.
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# A job that is preempted, or loses a node, is queued again and goes on from its newest checkpoint.
#SBATCH --requeue
# Five minutes before the time limit the script below gets USR1: the run saves, stops and is queued
# again.
#SBATCH --signal=B:USR1@300
set -euo pipefail

if (($# == 0)); then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit 2
fi

# What these are for stands in torchrun.sh.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# sbatch runs a copy of this file from its spool folder: the checkout is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ -f .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

# shellcheck disable=SC2317,SC2329 # called by the trap
save() {
  echo "slurm.sh: time is nearly up; asking the run to save and stop" >&2
  # To the tasks alone: without --batch or --full a signal does not come here again.
  scancel --signal=USR1 "$SLURM_JOB_ID"
}
trap save USR1 TERM

# --kill-on-bad-exit: when one task fails, the others would wait for it in a collective.
# Every task sees all GPUs of its node and takes the one of its SLURM_LOCALID.
srun --kill-on-bad-exit=1 python -m megavis.cli train "$@" &
# In the background, because bash runs a trap only between commands; `wait` returns early when the
# signal comes, and waits again.
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do
  code=0
  wait "$step" || code=$?
done
# 2 is a mistake in the config, which another turn would make again. All else goes on from the newest
# checkpoint: a run that was asked to stop (75), a node that failed, a hang. A run that comes no
# further is given up after training.max_restarts, with 2.
if ((code != 0 && code != 2)); then
  echo "slurm.sh: exit code $code; queueing job $SLURM_JOB_ID again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
