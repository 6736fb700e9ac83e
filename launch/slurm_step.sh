#!/usr/bin/env bash
# What slurm.sh and sweep.sh do inside a job: run `megavis COMMAND WORDS` on all tasks, and queue the
# job again where there is more to do. Needs no ssh: srun starts the tasks, which meet at the first
# node by the variables that SLURM sets.
#
#   CONTAINER=image.sif        run inside this Apptainer image; the checkout is visible in it
#   SRUN_OPTIONS="…"           more words for srun, as --container-image=… where there is pyxis
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"
# From SLURM 22.05 on srun does not take it over from sbatch, and would bind each task to one core.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

if [[ -f .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

# The number of an array's last task is that of the whole array, which would be meant by it.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

# shellcheck disable=SC2317,SC2329 # called by the trap
save() {
  echo "slurm: time is nearly up; asking the run to save and stop" >&2
  # To the tasks alone: without --batch or --full a signal does not come here again. They may have
  # ended already.
  scancel --signal=USR1 "$job" || true
  signalled=1
}
trap save USR1 TERM

read -ra srun_options <<<"${SRUN_OPTIONS:-}"
inside=()
if [[ -n ${CONTAINER:-} ]]; then
  inside=(apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$CONTAINER")
fi

# Where a task fails, the others end by themselves, report why by their exit codes, and name the one that is
# dead; --wait ends those that still wait for it after a minute. --kill-on-bad-exit would end them at
# once, and a mistake in the config would look like a node that failed.
# Every task sees all GPUs of its node and takes the one of its SLURM_LOCALID.
srun --wait=60 ${srun_options[@]+"${srun_options[@]}"} ${inside[@]+"${inside[@]}"} \
  python -m megavis.cli "$@" &
# In the background, because bash runs a trap only between commands. A signal ends `wait` early, with a
# code of its own: it is asked again, also where the step has ended meanwhile.
step=$!
signalled=1
while ((signalled)); do
  signalled=0 code=0
  wait "$step" || code=$?
done

# A run that trains but comes no further is given up after training.max_restarts, with 2. One that
# never gets so far is counted here: also where SLURM's warning ends it while it starts, as under a
# time limit that is hardly longer than the warning, which may come a minute early.
failures=.slurm-$job.failures
if ((code != 0 && code != 75 && SECONDS < 300)); then
  echo "$code" >>"$failures"
else
  rm -f "$failures"
fi
# 2 is a mistake in the config, which another turn would make again. All else resumes from the newest
# checkpoint: a run that was asked to stop (75), a node that failed, a hang.
if ((code == 0 || code == 2)); then
  rm -f "$failures"
elif [[ -f $failures ]] && (($(wc -l <"$failures") > 3)); then
  echo "slurm: failed four times within five minutes each; not queued again" >&2
  rm -f "$failures"
else
  echo "slurm: exit code $code; queueing job $job again" >&2
  scontrol requeue "$job"
fi
exit "$code"
