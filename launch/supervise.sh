# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2015,SC2154  # the caller's variables; chains that say what they mean
# Runs one job for launch/ringattn-mpirun: starts mpirun or srun, sees to it that it ends, takes away what it leaves on
# this host, and finds the job's exit code. Sourced for `supervise`; `stop` is the caller's.
#
# Ranks on this host write into files of the job's folder how they end, and ranks elsewhere put it into their exit
# status (src/base/outcome.hpp has the format). So nothing is read out of what a job prints, and a job whose ranks have
# ended has a code whatever mpirun does then: it may hang, crash or have been killed.
#
# This process waits for mpirun, which has a process group of its own, and `watch` looks on beside them. `watch` reads
# a pipe that only this process writes to: when this one is killed it sees the end of the pipe, and ends the job.

# Seconds that mpirun gets to end by itself. How many it gets to start is the caller's `start_limit`.
readonly patience_failed=4  # after the first rank has left with a code that isn't 0
readonly patience_gone=10   # after all ranks of this host are gone
readonly patience_told=10   # after a signal
# What comes then. With patience_failed, and the three seconds that end_processes() takes at most, it is below ten
# seconds: ranks tell of a failure within --timeout + 5 s, and a job ends within --timeout + 15 s whatever mpirun does.
readonly patience_pipe=2    # what holds mpirun's stdout
readonly patience_agent=4   # beside that: to take away what lost daemons have left on other hosts

readonly elsewhere=64     # kElsewhere of src/base/outcome.hpp
readonly anyone="a rank"
readonly lost_daemon=205  # mpirun's own code for it
readonly late="it went on after the ranks of this host had left"  # why mpirun was ended

# Whether a process is there and not only waits for its parent to look.
running() {
  local line
  { read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  line=${line##*) }
  [[ ${line%% *} != [ZX] ]]
}

# ---- What the ranks say ---------------------------------------------------------------------------------------------

# Reads what the ranks have written. Sets
#   started   how many have begun, and expected: how many of this host there should be, 0 where it is not known
#   alive     how many of this host still run, and gone: how many don't
#   worst     the code of those that failed, or 0. All leave with one code; where a failure kept them from agreeing, 6
#             may be what the others made of it, so any other code counts before 6
#   left      how many left with code 0, told: how many a signal ended that they could still speak of
#   silent    how many have not said anything since they began, and mute: the rank of one of them, where it is known
read_outcomes() {
  local file name word number rest code rank state
  started=0 expected=0 alive=0 gone=0 worst=0 left=0 told=0 silent=0 mute=""
  for file in "$job"/ranks/*; do
    code="" rank="" state=silent
    while read -r word number rest; do
      is_number "$number" || continue
      case $word in
        rank) rank=$number ;;
        started) [[ ${file##*/} != "$here_name".* ]] || ((number <= expected)) || expected=$number ;;
        code) code=$number state=code ;;
        signal) state=signal ;;
      esac
    done 2>/dev/null <"$file" || continue
    ((++started))
    if [[ $state == silent ]]; then
      ((++silent))
      mute=$rank
    elif [[ $state == signal ]]; then
      ((++told))
    elif ((code == 0)); then
      ((++left))
    elif ((worst == 0 || worst == 6 || (code != 6 && code > worst))); then
      worst=$code
    fi
    name=${file##*/}
    if [[ $name == "$here_name".* ]]; then
      if running "${name##*.}"; then ((++alive)); else ((++gone)); fi
    fi
  done
}

# Whether mpirun has a connection to another host: one of its daemons has come. Ranks that run only there write nothing
# on this host.
has_connections() {
  [[ -n $(find "/proc/$child/fd" -lname 'socket:*' -printf '%l\n' 2>/dev/null | tr -dc '0-9\n' |
    awk 'NR == FNR { mine[$1]; next } $4 == "01" && $10 in mine' - "/proc/$child/net/tcp" "/proc/$child/net/tcp6" 2>/dev/null) ]]
}

# ---- The end of a job -----------------------------------------------------------------------------------------------

# Sets pids: the processes of this host that belong to the job, the remote shells of mpirun among them. Each has the
# name of the job's folder in its environment.
find_processes() {
  local file
  pids=()
  while IFS= read -r file; do
    file=${file#/proc/}
    pids+=("${file%%/*}")
  done < <(grep -lszxF -- "RINGATTN_OUTCOMES=$job/ranks" /proc/[0-9]*/environ || true)
}

# Ends what of the job still runs on this host: it gets a second (with an argument: none) to end by itself, two more
# after SIGTERM, then SIGKILL. A process has no environment for a moment while it becomes another program, so that none
# is left only counts once a second look has found none either.
end_processes() {
  local step first=4 looks=0
  [[ -z ${1:-} ]] || first=0
  for ((step = 0; step < first + 12; ++step)); do
    find_processes
    if ((${#pids[@]} == 0)); then
      ((++looks < 2)) || return 0
      sleep 0.1
      continue
    fi
    looks=0
    if ((step == first)); then
      kill -TERM "${pids[@]}" 2>/dev/null || true
    elif ((step >= first + 8)); then
      kill -KILL "${pids[@]}" 2>/dev/null || true
    fi
    sleep 0.25
  done
}

# Open MPI names its files after its own process id and a number of the job, which one of the files tells: notes it.
note_open_mpi_job() {
  local file text
  for file in "${TMPDIR:-/tmp}"/ompi.*."$UID"/pid."$child"/contact.txt; do
    [[ -r $file ]] && read -r text <"$file" && [[ $text =~ ^([0-9]{1,10})\. ]] || continue
    echo "$((BASH_REMATCH[1] >> 16))" >"$job/family"
  done 2>/dev/null
}

# Removes what mpirun, its daemons and the ranks leave on this host when they are killed, and the job's folder.
remove_files() {
  local base=${TMPDIR:-/tmp} family=""
  note_open_mpi_job
  { read -r family <"$job/family"; } 2>/dev/null || true
  rm -rf "$base"/ompi.*."$UID"/pid."$child"
  if is_number "$family"; then
    rm -rf "$base"/ompi.*."$UID/jf.$family"
    rm -f /dev/shm/vader_segment.*."$UID.$(printf %x "$family")"????.*
  fi
  rmdir "$base"/ompi.*."$UID" 2>/dev/null || true
  rm -rf "$job"
}

# Begins to remove the same on the other hosts that were named, where a daemon was lost or mpirun has ended without its
# daemons: by the way on which mpirun comes there, all at once. A host that can't be reached keeps them, and so does one
# where a daemon of this job still runs, which removes them itself. Sets removers: the processes that do so.
remove_files_elsewhere() {
  local family="" host script
  local -a reach=(ssh)
  removers=() removers_end=$((SECONDS + patience_agent))
  if [[ -n ${OMPI_MCA_plm_rsh_agent:-} ]]; then
    read -r -a reach <<<"$OMPI_MCA_plm_rsh_agent"  # an agent may have options
  elif [[ -n ${SLURM_JOB_ID:-} ]]; then
    reach=(srun --overlap --nodes=1 --ntasks=1 --nodelist)
  fi
  { read -r family <"$job/family"; } 2>/dev/null || true
  is_number "$family" || return 0
  script="pgrep -f \"[e]ss_base_jobid $((family << 16)) \" >/dev/null && exit
    for base in \"\${TMPDIR:-/tmp}\"/ompi.*.$UID; do rm -rf \"\$base/jf.$family\"; rmdir \"\$base\"; done
    rm -f /dev/shm/vader_segment.*.$UID.$(printf %x "$family")????.*"
  set -m
  for host in "${named_hosts[@]}"; do
    if [[ ${reach[0]} == srun ]]; then
      "${reach[@]}" "$host" sh -c "$script" </dev/null >/dev/null 2>&1 {life}>&- &
    else
      "${reach[@]}" "$host" "sh -c '$script'" </dev/null >/dev/null 2>&1 {life}>&- &
    fi
    removers+=($!)
  done
  set +m
}

# Ends them when they are done, or late.
await_removers() {
  local remover
  for remover in ${removers[@]+"${removers[@]}"}; do
    while running "$remover" && ((SECONDS < removers_end)); do sleep 0.1; done
    kill -KILL -- -"$remover" 2>/dev/null || true
    { wait "$remover" || true; } 2>/dev/null
  done
}

# Looks on until this script says that the job has ended, or is killed itself.
watch() {
  local in piece line="" word number status failed_since="" gone_since="" told_since="" child="" killed=0
  local begun=0 announced=0 since=$SECONDS
  ((start_limit > 0)) || begun=1
  trap '' INT TERM HUP
  exec {in}<"$job/life" {life}>&-
  while true; do
    status=0
    IFS= read -r -t 0.5 -u "$in" piece || status=$?
    line+=$piece  # a read whose time is over may have taken the beginning of a line
    if ((status > 0 && status <= 128)); then  # all writers have closed the pipe
      if [[ -n $child ]]; then
        kill -TERM "$child" 2>/dev/null || true  # mpirun then ends its ranks by a signal that they know
        for ((word = 0; word < 4 * patience_told; ++word)); do
          running "$child" || break
          sleep 0.25
        done
        kill -KILL -- -"$child" 2>/dev/null || true
      fi
      end_processes now
      remove_files
      return
    fi
    if ((status == 0)); then
      read -r word number <<<"$line" || true
      line=""
      case $word in
        child) child=$number since=$SECONDS ;;
        told) told_since=$SECONDS ;;
        ended) return ;;
      esac
    fi
    [[ -n $child ]] && ((!killed)) || continue
    read_outcomes
    [[ -e $job/family ]] || ((started == 0)) || note_open_mpi_job
    ((started == 0)) || begun=1
    # Only now and then: other hosts are asked for in all of /proc.
    if ((!begun && SECONDS - since >= (announced ? start_limit : (start_limit + 9) / 10))); then
      if ((!local_job)) && has_connections; then
        begun=1
      elif ((!announced)); then
        announced=1
        echo "ringattn-mpirun: no rank has begun yet. $launcher is ended $start_limit s after its start (--start-limit)." >&2
      else
        echo "$unstarted" >"$job/overdue"
        kill -KILL -- -"$child" 2>/dev/null || true
        killed=1
        continue
      fi
    fi
    ((worst == 0)) || failed_since=${failed_since:-$SECONDS}
    if ((alive == 0 && gone > 0 && gone >= expected)); then gone_since=${gone_since:-$SECONDS}; else gone_since=""; fi
    if ((SECONDS - ${failed_since:-$SECONDS} >= patience_failed || SECONDS - ${gone_since:-$SECONDS} >= patience_gone ||
         SECONDS - ${told_since:-$SECONDS} >= patience_told)); then
      echo "$late" >"$job/overdue"
      kill -KILL -- -"$child" 2>/dev/null || true
      killed=1
    fi
  done
}

# ---- What the job prints --------------------------------------------------------------------------------------------

# Passes on at once what comes through the pipe $job/out, mpirun's stdout. Where this script's own stdout doesn't take
# it, the reason stays in $job/untaken and the job goes on: its ranks can't be told.
copy_output() {
  trap '' INT TERM HUP PIPE
  [[ -e /proc/self/fd/1 ]] || exec 1</dev/null  # a closed stdout fails once there is something to print
  LC_ALL=C cat 2>"$job/cat" && return
  mv "$job/cat" "$job/untaken"
  cat >/dev/null
}

# Waits until all of it is passed on, for as long as a slow reader takes. Only a process that holds the pipe and that
# end_processes() doesn't find, or a signal to this script, bounds the wait.
await_output() {
  local end=$((SECONDS + patience_pipe))
  while running "$copier" && ((SECONDS < end)); do
    # The copier and its cat hold it, too.
    if [[ -z $signal ]] && (($(find /proc/[0-9]*/fd -lname "*/${job##*/}/out" -printf '%h\n' 2>/dev/null | sort -u |
      grep -c .) <= 2)); then
      { wait "$copier" || true; } 2>/dev/null
    else
      sleep 0.25
    fi
  done
  kill -KILL -- -"$copier" 2>/dev/null || true
}

# ---- The exit code --------------------------------------------------------------------------------------------------

# Leaves with 0, unless the job's output was not taken: `untaken` says why.
end_well() {
  [[ -z $untaken ]] || stop 3 "the output can't be written to stdout" "$untaken" "Redirect stdout to a file that can be written."
  exit 0
}

# Leaves with the job's code, from `code`, that of mpirun or srun, and from what the ranks have said.
leave() {
  if [[ -n $signal ]]; then exit $((128 + $(kill -l "$signal"))); fi
  if [[ $overdue_why == "$unstarted" ]]; then
    stop 6 "$launcher was ended" "$unstarted" "See whether the hosts answer; --start-limit gives them longer."
  fi
  # What they all say counts, also where mpirun had to be ended. Where something else killed it, ranks that it took along
  # while they started, or met, blame MPI or a peer (4, 6).
  local killed=0
  if [[ $victim == "$launcher" ]] && ((!overdue && code > 128 && code <= 192)); then killed=1; fi
  if ((killed && (worst == 4 || worst == 6))); then worst=0; fi
  if ((worst > 0 || (overdue && left == started && left >= expected))); then
    ((!overdue)) || echo "ringattn-mpirun: $launcher was ended ($overdue_why)." >&2
    ((worst > 0)) || end_well
    exit "$worst"
  fi
  if ((overdue)); then stop 6 "$launcher was ended" "$overdue_why" "See the messages above, and the logs of the hosts."; fi
  if ((code > elsewhere && code <= elsewhere + 7)); then exit $((code - elsewhere)); fi
  if ((code == 0 && silent + told == 0)); then end_well; fi
  if ((code == 1 && told > 0 && told == started && told >= expected)); then
    # mpirun answers SIGINT, SIGTERM and SIGHUP alike: it ends its ranks by SIGTERM, and leaves with 1.
    stop 143 "$launcher was told to stop" "its ranks were ended by signal 15" "Start again."
  fi
  # Others that mpirun ends because of it can still say so.
  if [[ -n $mute && $victim == "$anyone" ]] && ((silent == 1)); then victim="rank $mute"; fi
  if ((code > 128 + 5 && code <= 192 || (code > 128 && code <= 192 && started > 0))); then
    stop 6 "$victim was killed" "by signal $((code - 128)); $launcher's own message stands above" \
         "Memory and the host's log are the first places to look."
  fi
  if [[ $launcher == mpirun ]] && ((code == lost_daemon)); then
    stop 6 "a host was lost" "mpirun's own message stands above" "Check the host, and start again."
  fi
  if ((code >= 2 && code <= 7)); then exit "$code"; fi
  if ((started > 0 && (code <= 1 || code > 192))); then
    stop 6 "$victim left early or was killed" "$launcher left with code $code, and no rank says that it failed" \
         "See the messages above, memory, and the host's log."
  fi
  if ((code > 7 && code <= 128)); then
    stop 7 "a rank left with code $code" "ringattn has no such code" \
         "Please report it with the output of ringattn info."
  fi
  stop 4 "$launcher could not start the ranks" "it left with code $code; its own message stands above" \
       "--dry-run prints the command."
}

# Forwards one signal to mpirun; a second one ends it at once. (On a second signal mpirun exits and leaves its ranks
# running.)
# shellcheck disable=SC2317  # called by the traps
pass_on() {
  if [[ -z $signal ]]; then
    signal=$1
    [[ -z $child ]] || kill -"$1" "$child" 2>/dev/null || true
    echo told >&"$life"
  else
    [[ -z $child ]] || kill -KILL -- -"$child" 2>/dev/null || true
  fi
}

# supervise COMMAND…: runs it and leaves with the job's code. `settings` are variables for it, NAME=VALUE each;
# `start_limit` says how many seconds it gets until the first rank has begun, 0: any number; `named_hosts` are those on
# which it starts ranks, as far as they have been named.
supervise() {
  local watcher out
  signal="" child="" code=0 untaken="" overdue=0 overdue_why="" victim=$anyone
  unstarted="no rank had begun within $start_limit s"
  ((local_job)) || unstarted="no rank on this host had begun within $start_limit s, and no other host had answered"
  here_name=$(uname -n).$(stat -Lc %i /proc/self/ns/pid 2>/dev/null || echo 0)
  job=$(mktemp -d "${TMPDIR:-/tmp}/ringattn-mpirun.XXXXXX" 2>/dev/null) && mkdir "$job/ranks" && mkfifo "$job/life" "$job/out" ||
    stop 3 "${TMPDIR:-/tmp} takes no temporary folder" "TMPDIR names it, or it is the default" \
         "Set TMPDIR to a folder that can be written."
  exec {life}<>"$job/life"
  set -m  # a process group each, out of reach of the terminal's signals
  watch </dev/null &
  watcher=$!
  exec {out}<>"$job/out"  # so that neither side waits for the other to open it
  copy_output <"$job/out" {out}>&- {life}>&- &
  copier=$!
  trap 'pass_on INT' INT
  trap 'pass_on TERM' TERM
  trap 'pass_on HUP' HUP
  (
    trap - INT TERM HUP
    echo "child $BASHPID" >&"$life"
    exec env ${settings[@]+"${settings[@]}"} "RINGATTN_OUTCOMES=$job/ranks" "$@" </dev/null >"$job/out" {out}>&- {life}>&-
  ) &
  child=$!
  exec {out}>&-
  set +m
  [[ -z $signal ]] || kill -"$signal" "$child" 2>/dev/null || true

  while true; do
    { wait "$child" && code=0 || code=$?; } 2>/dev/null  # bash's own word on a killed child says nothing new
    kill -0 "$child" 2>/dev/null || break  # else it was a trap that ended the wait
  done
  { read -r overdue_why <"$job/overdue" && overdue=1; } 2>/dev/null || true
  # mpirun takes its folder away, unless it is killed.
  ! compgen -G "${TMPDIR:-/tmp}/ompi.*.$UID/pid.$child" >/dev/null || victim=$launcher
  removers=()
  if ((${#named_hosts[@]} > 0)) && { ((overdue || code == lost_daemon)) || [[ $victim == "$launcher" ]]; }; then
    remove_files_elsewhere
  fi
  if ((overdue)); then end_processes now; else end_processes; fi
  await_output
  if [[ -e $job/untaken ]]; then
    untaken=$(tail -n 1 "$job/untaken")
    untaken=${untaken##*: }
    untaken=${untaken:-what passes it on was ended}
  fi
  await_removers
  read_outcomes
  echo ended >&"$life"
  { wait "$watcher" || true; } 2>/dev/null
  remove_files
  leave
}
