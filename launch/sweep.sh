#!/usr/bin/env bash
# A grid as a SLURM array: one combination per task, one GPU each.
#
#   n=$(megavis sweep CONFIG --grid KEY=… --grid KEY=… --count)
#   sbatch --array 0-$((n - 1)) launch/sweep.sh CONFIG --grid KEY=… --grid KEY=… [key=value ...]
#   megavis sweep CONFIG --grid KEY=… --grid KEY=… --plot
#
# Give partition, account and time to sbatch, or add them here. For more GPUs per run set both
# --ntasks-per-node and --gpus-per-node. `--array 0-24%5` runs five at a time.
#SBATCH --job-name=megavis-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
# %x is the job's name, %A the id of the array, %a the index of the task.
#SBATCH --output=%x-%A-%a.log
#SBATCH --open-mode=append
# A task that is preempted, loses its node or reaches its time limit is requeued and resumes from its
# checkpoint.
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail

if (($# == 0)) || [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi

# sbatch runs a copy of this file from its spool folder; the checkout is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -f launch/slurm_step.sh ]]; then
  echo "slurm: $PWD is no checkout of megavis; call sbatch in one" >&2
  exit 2
fi
# exec, since this process receives the signal.
exec bash launch/slurm_step.sh sweep "$@" --index "$SLURM_ARRAY_TASK_ID"
