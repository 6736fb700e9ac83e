#!/usr/bin/env bash
# Start megavis under SLURM: one task per GPU. megavis reads rank, size and node list from SLURM_*.
#
#   sbatch --nodes 4 launch/slurm.sh CONFIG [key=value ...]
#
# Run it in the checkout. Give partition, account and time to sbatch, or add them here. For another
# number of GPUs per node set both --ntasks-per-node and --gpus-per-node. To run in a container:
# CONTAINER=image.sif sbatch … (see slurm_step.sh).
#SBATCH --job-name=megavis
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
# %x is the job's name, %j its id. A requeued job appends to the same file.
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# A job that is preempted or loses a node is requeued and resumes from its newest checkpoint.
#SBATCH --requeue
# Five minutes before the time limit this script gets USR1: the run saves, stops and is requeued.
#SBATCH --signal=B:USR1@300
set -euo pipefail

if (($# == 0)); then
  sed -n '2,8s/^# \{0,1\}//p' "$0"
  exit 2
fi

# sbatch runs a copy of this file from its spool folder; the checkout is where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -f launch/slurm_step.sh ]]; then
  echo "slurm: $PWD is no checkout of megavis; call sbatch in one" >&2
  exit 2
fi
# exec, since this process receives the signal.
exec bash launch/slurm_step.sh train "$@"
