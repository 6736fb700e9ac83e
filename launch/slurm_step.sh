#!/usr/bin/env bash
# The job step of slurm.sh and sweep.sh: run `megavis COMMAND WORDS` on all tasks, and requeue the job
# if it is not finished. It needs no ssh: srun starts the tasks, and SLURM's variables give the address
# of the first node for their rendezvous.
#
#   CONTAINER=image.sif        run inside this Apptainer image, with the checkout mounted
#   SRUN_OPTIONS="…"           more options for srun, such as --container-image=… with pyxis
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname "$0")/environment.sh"
# Since SLURM 22.05 srun does not inherit it from sbatch, and would bind each task to one core.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

if [[ -f .venv/bin/activate ]]; then
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

# An array's last task has the job id of the whole array, so address tasks by array and index.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi

# A full disk under the job's log must not end this script.
say() {
  echo "slurm: $*" >&2 || true
}

# shellcheck disable=SC2317,SC2329 # called by the trap
save() {
  say "time is nearly up; asking the run to save and stop"
  # Without --batch or --full only the tasks get the signal, not this script. They may have exited.
  scancel --signal=USR1 "$job" || true
  signalled=1
}
trap save USR1 TERM

read -ra srun_options <<<"${SRUN_OPTIONS:-}"
inside=()
if [[ -n ${CONTAINER:-} ]]; then
  inside=(apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$CONTAINER")
fi

# If a task fails, the others exit with a code that tells why, and name the dead one; --wait kills those
# that still wait for it after a minute. This also applies if a task succeeds, so tasks that wait for
# something wait together. --kill-on-bad-exit would kill them at once, and an error in the config would
# look like a failed node.
# Every task sees all GPUs of its node and uses the one at its SLURM_LOCALID.
srun --wait=60 ${srun_options[@]+"${srun_options[@]}"} ${inside[@]+"${inside[@]}"} \
  python -m megavis.cli "$@" &
# srun runs in the background, because bash runs traps only between commands. A signal interrupts `wait`
# with another exit code, so `wait` is called again, even if the step has exited meanwhile.
step=$!
signalled=1
while ((signalled)); do
  signalled=0 code=0
  wait "$step" || code=$?
done

# A run that trains without progress exits with 2 after training.max_restarts. Jobs that fail before
# training are counted here, including those that SLURM's warning ends at startup, as with a time limit
# hardly longer than the warning, which may come a minute early.
failures=.slurm-$job.failures
if ((code != 0 && code != 75 && SECONDS < 300)); then
  echo "$code" >>"$failures" || true
else
  rm -f "$failures"
fi
# 2 is an error in the config, which a retry would repeat. All else resumes from the newest checkpoint:
# a run that was asked to stop (75), a failed node, a hang.
if ((code == 0 || code == 2)); then
  rm -f "$failures"
elif [[ -f $failures ]] && (($(wc -l <"$failures") > 3)); then
  say "failed four times within five minutes each; not queued again"
  rm -f "$failures"
else
  say "exit code $code; queueing job $job again"
  scontrol requeue "$job"
fi
exit "$code"
