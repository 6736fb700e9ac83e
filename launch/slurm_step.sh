#!/usr/bin/env bash
# The job step of slurm.sh and sweep.sh: run `megavis COMMAND WORDS` on all tasks, and requeue the job
# if it is not finished. It needs no ssh: srun starts the tasks, and SLURM's variables give the address
# of the first node for their rendezvous.
#
#   CONTAINER=image.sif        run inside this Apptainer image, with the checkout mounted
#   APPTAINER_BIND=/data,/runs other folders that Apptainer mounts, as for data and runs outside it
#   SRUN_OPTIONS="…"           more options for srun, such as --container-image=… with pyxis
set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then
  echo "slurm: this script runs in a job of SLURM; start it with sbatch" >&2
  exit 2
fi

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

# Run a command until it succeeds, with these pauses between.
with_pauses() {
  local pauses=$1 pause
  shift
  for pause in $pauses; do
    "$@" && return
    sleep "$pause"
  done
  "$@"
}

# The nodes that megavis names when replicas disagree (exit code 71), one a line.
export MEGAVIS_FAULTY_NODES=$PWD/.slurm-$job.faulty
rm -f "$MEGAVIS_FAULTY_NODES" || true
# The file that megavis makes once the run counts its own restarts.
export MEGAVIS_COUNTED=$PWD/.slurm-$job.counted
rm -f "$MEGAVIS_COUNTED" || true

# Whether enough nodes are left without as many as the first argument says. Where a partition or a
# reservation has no spare ones, the job would wait for ever.
enough_without() {
  local nodes=0 part
  if [[ -n ${SLURM_JOB_RESERVATION:-} ]]; then
    nodes=$(scontrol show reservation "$SLURM_JOB_RESERVATION" | sed -n 's/.*NodeCnt=\([0-9]*\).*/\1/p')
  else
    for part in $(sinfo --noheader --partition "${SLURM_JOB_PARTITION:-}" --responding \
      --states idle,alloc,mix,comp --format %D); do
      nodes=$((nodes + part))
    done
  fi
  ((${nodes:-0} >= ${SLURM_JOB_NUM_NODES:-1} + $1))
}

# Keep a job that was just queued again from the nodes that megavis has named: they would fail it
# again. SLURM changes only jobs that wait, and a requeued one waits for at least two minutes.
exclude_faulty_nodes() {
  local names excluded
  names=$(sort -u "$MEGAVIS_FAULTY_NODES" 2>/dev/null | paste -sd, -) || true
  rm -f "$MEGAVIS_FAULTY_NODES" || true
  if [[ -z $names ]]; then
    say "no node is known to be faulty; job $job may start on the same ones"
    return
  fi
  if ! enough_without "$(tr ',' '\n' <<<"$names" | wc -l)"; then
    say "there are no nodes in place of $names; job $job may start there again: check them"
    return
  fi
  excluded=$(scontrol show job "$job" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1/p') || true
  [[ -z $excluded || $excluded == "(null)" ]] || names=$excluded,$names
  if with_pauses "1 2 5" scontrol update "JobId=$job" "ExcNodeList=$names"; then
    say "job $job will not start on $names again: check them"
  else
    say "SLURM does not exclude $names; job $job may start there again: check them"
  fi
}

step='' limit='' end=''
# shellcheck disable=SC2317,SC2329 # called by the traps
save() {
  say "$1; asking the run to save and stop"
  # Without --batch or --full only the tasks get the signal, not this script. They may have exited. If
  # the controller does not answer, srun forwards the signal.
  scancel --signal=USR1 "$job" || kill -USR1 "$step" || true
  signalled=1
}

# A save may take longer than the time that is left. SLURM does not queue a job again that it ends at
# its limit, so do it before; the run then resumes from the checkpoint before that save.
# shellcheck disable=SC2317,SC2329 # called by the trap
watch_limit() {
  local ends left
  ends=$(SLURM_TIME_FORMAT=standard squeue --noheader --job "$job" --format %e) || return 0
  # Empty, N/A or NONE without a limit.
  [[ $ends == *[0-9]* && -z $limit ]] || return 0
  end=$(date --date "$ends" +%s) || return 0
  left=$((end - $(date +%s)))
  ((left > 40)) || return 0
  (
    sleep $((left - 30))
    say "still saving 30 s before the time limit; queueing job $job again"
    with_pauses "2 5" scontrol requeue "$job"
  ) &
  limit=$!
}
trap 'save "time is nearly up"; watch_limit' USR1
trap 'save "SLURM ends the job"' TERM

read -ra srun_options <<<"${SRUN_OPTIONS:-}"
inside=()
if [[ -n ${CONTAINER:-} ]]; then
  inside=(apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$CONTAINER")
fi

# If a task fails, the others exit with a code that tells why, and name the dead one; --wait kills those
# that still wait for it after a minute. This also applies if a task succeeds, so tasks that wait for
# something wait together. --kill-on-bad-exit would kill them at once, and an error in the config would
# look like a failed node, so a site's default is overridden. --export=ALL: after `sbatch --export=NONE`
# srun would start tasks without the environment that is set above.
# Every task sees all GPUs of its node and uses the one at its SLURM_LOCALID. `env` exits with 127 if
# there is no Python, where srun itself would exit with 2.
srun --wait=60 --kill-on-bad-exit=0 --export=ALL ${srun_options[@]+"${srun_options[@]}"} \
  ${inside[@]+"${inside[@]}"} env python -m megavis.cli "$@" &
# srun runs in the background, because bash runs traps only between commands. A signal interrupts `wait`
# with another exit code, so `wait` is called again, even if the step has exited meanwhile.
step=$!
signalled=1
while ((signalled)); do
  signalled=0 code=0
  wait "$step" || code=$?
done
if [[ -n $limit ]]; then
  kill "$limit" 2>/dev/null || true
fi

counted=''
if [[ -e $MEGAVIS_COUNTED ]]; then
  counted=1
  rm -f "$MEGAVIS_COUNTED" || true
fi

# `scancel` ends the tasks as a preemption does, with time to save; but such a job is to stay ended. It
# is not running any more, unlike one that is preempted, and its time was not up.
failures=.slurm-$job.failures
leave_if_cancelled() {
  local state
  state=$(with_pauses "2 5" squeue --noheader --job "$job" --format %T 2>/dev/null || true)
  if [[ -n $state && $state != RUNNING ]] && ((${end:-0} == 0 || $(date +%s) < end - 35)); then
    say "exit code $code; job $job is $state and not queued again"
    rm -f "$failures" || true
    exit "$code"
  fi
}
leave_if_cancelled

# A run that restarts without a new checkpoint exits with 72 after training.max_restarts. Jobs that fail
# before it is opened are counted here; without its file, as on a full disk, those that fail within
# twenty minutes, since processes wait ten for each other. So are jobs that SLURM's warning ends at
# startup, as with a time limit hardly longer than the warning, which may come a minute early.
count=0
if ((code == 0 || code == 75)) || { ((code != 2)) && { [[ -n $counted ]] || ((SECONDS >= 1200)); }; }; then
  rm -f "$failures" || true
else
  echo "$code" >>"$failures" || true
  # A full disk leaves the file empty or absent; then SLURM's own count, which has all restarts, is all
  # there is.
  count=$((${SLURM_RESTART_COUNT:-0} + 1))
  if [[ -s $failures ]]; then
    count=$(wc -l <"$failures")
  fi
fi
# 72 says that the run must not go on. 2 is an error in the config, which a retry would repeat, unless
# the job has started before: then a disk may be away. All else resumes from the newest checkpoint: a
# run that was asked to stop (75), a failed node, a hang.
if ((code == 0 || code == 72 || (code == 2 && ${SLURM_RESTART_COUNT:-0} == 0))); then
  rm -f "$failures" || true
elif ((count > 3)) && [[ ! -s $failures ]]; then
  say "failed, and its failures cannot be counted in $PWD/$failures; not queued again"
elif ((count > 3)); then
  say "failed four times in a row; not queued again"
  rm -f "$failures" || true
else
  if ((code == 2)); then
    minutes=$((5 * 2 ** (count - 1)))
    say "exit code 2 after a restart; trying again in $minutes minutes"
    # In the background, so that a signal ends it: the time limit, or a preemption.
    sleep $((60 * minutes)) &
    wait $! || true
    leave_if_cancelled
  fi
  say "exit code $code; queueing job $job again"
  if ((code == 71)); then
    # SLURM ends this script and its commands once the job is queued again. Half a minute later it kills
    # them; until then the job can be changed.
    trap '' TERM
  fi
  # For up to five minutes: SLURM's controller may be busy or restarting.
  with_pauses "1 5 15 30 60 90 100" scontrol requeue "$job"
  if ((code == 71)); then
    exclude_faulty_nodes
  fi
fi
exit "$code"
