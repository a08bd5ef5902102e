#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Jobs over three hosts (tests/support/three_hosts.sh), started by launch/ringattn-mpirun, and as ranks that meet at
# RINGATTN_STORE: their bits, a link that is cut in the middle, and an mpirun daemon that is killed. Skipped, with a word
# on why, where namespaces can't be made, and unless RINGATTN_TEST_LONG is 1.
#
# Usage: three_hosts_test.sh PATH-OF-RINGATTN
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
hosts=$PWD/tests/support/three_hosts.sh
launcher=$PWD/launch/ringattn-mpirun
RINGATTN_PROGRAM=$(readlink -f "${1:?the path of ringattn}")
export RINGATTN_PROGRAM

if [[ ${RINGATTN_TEST_LONG:-0} != 1 ]]; then
  echo "skipped: RINGATTN_TEST_LONG isn't 1"
  exit 77
fi
unset RINGATTN_TEST_LONG
why=$("$hosts" possible) || { echo "skipped: $why"; exit 77; }

state=$(mktemp -d /tmp/ringattn-hosts.XXXXXX)
trap '"$hosts" down "$state"; rm -rf "$state"' EXIT
"$hosts" up "$state"

readonly timeout=5     # of the jobs
readonly promised=15   # seconds in which the launcher ends after that
readonly busy=10       # what a machine that does other things may add to waits that nothing is promised of

failures=0
expect() {  # expect WHAT COMMAND…
  local what=$1
  shift
  if "$@"; then echo "ok: $what"; else echo "FAILED: $what"; failures=$((failures + 1)); fi
}
within() {  # within SECONDS COMMAND…: whether it comes true
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.2
  done
}
launch() {
  timeout -k 1 180 "$hosts" on "$state" 1 "$launcher" --hostfile "$state/hosts" run --backend cpu "$@"
}
digest() { tail -n 1 "$1" | awk '{print $NF}'; }
# shellcheck disable=SC2317  # called by `within`
no_process() { [[ -z $("$hosts" pids "$state" "$1") ]]; }
# shellcheck disable=SC2317
no_file() { [[ -z $(ls -A "$state/host$1/tmp") && -z $(compgen -G "/dev/shm/vader_segment.host$1.*") ]]; }
daemon_of() {
  local pid
  for pid in $("$hosts" pids "$state" "$1"); do
    [[ $(cat "/proc/$pid/comm" 2>/dev/null) != orted ]] || echo "$pid"
  done
}

# Starts a job that lasts longer than anything here, and comes back when its ranks have planned it.
begin_job() {
  : >"$state/out"
  launch --synthetic 7 --seq 256k --timeout "$timeout" --progress off >"$state/out" 2>&1 &
  job=$!
  within 90 grep -q '^# layout' "$state/out" || { cat "$state/out"; return 1; }
}
# end_job WHAT: waits for the launcher, and expects code 6 in the promised time.
end_job() {
  local since=$SECONDS code=0
  wait "$job" || code=$?
  echo "$1: code $code after $((SECONDS - since)) s"
  cat "$state/out"
  expect "$1: code 6" test "$code" = 6
  expect "$1: in time" test $((SECONDS - since)) -le $((timeout + promised))
}

echo "--- bits"
"$RINGATTN_PROGRAM" run --synthetic 7 --backend cpu --seq 4k --quiet >"$state/one"
launch --synthetic 7 --seq 4k --quiet >"$state/six"
expect "six ranks on three hosts have the digest of one" test "$(digest "$state/one")" = "$(digest "$state/six")"
for n in 1 2 3; do
  expect "host $n has no process left" within "$busy" no_process "$n"
  expect "host $n has no file left" within "$busy" no_file "$n"
done

echo "--- a code from ranks"
code=0
launch --input "not enough slots.safetensors" || code=$?
expect "a file that isn't there is code 3" test "$code" = 3

echo "--- a link that is cut"
begin_job
"$hosts" cut "$state" 2
end_job "cut link"
# mpirun's own message always holds host 2's address; only the ranks' messages say which rank they blame.
expect "a rank blames one of host 2" grep -q '^ringattn: error:.*rank [23] on host2' "$state/out"
expect "once" test "$(grep -c '^ringattn: error:' "$state/out")" = 1
expect "no rank blames others alone" test -z "$(grep '^ringattn: error:' "$state/out" | grep -v 'rank [23] on host2')"
for n in 1 3; do
  expect "host $n has no process left" within "$busy" no_process "$n"
  expect "host $n has no file left" within "$busy" no_file "$n"
done
"$hosts" join "$state" 2
expect "host 2 has no process left soon after its link is back" within 130 no_process 2  # TCP asks again within 120 s
expect "host 2 has no file left" within "$busy" no_file 2

echo "--- a daemon that is killed"
begin_job
kill -KILL "$(daemon_of 2)"
end_job "killed daemon"
for n in 1 2 3; do
  expect "host $n has no process left" within $((timeout + promised)) no_process "$n"
  expect "host $n has no file left" within "$busy" no_file "$n"
done

echo "--- no rank on the launcher's host"
: >"$state/out"
timeout -k 30 60 "$hosts" on "$state" 1 "$launcher" --host 10.77.0.2:2,10.77.0.3:2 --start-limit 3 run --backend cpu \
  --synthetic 7 --seq 256k --progress off >"$state/out" 2>&1 &
job=$!
within 30 grep -q '^# layout' "$state/out" || cat "$state/out"
sleep 5
expect "its job outlives the limit on starting" kill -0 "$job"
kill -TERM "$job"
code=0
wait "$job" || code=$?
expect "a signal ends it: code $code" test "$code" = 143
for n in 1 2 3; do
  expect "host $n has no process left" within $((timeout + promised)) no_process "$n"
  expect "host $n has no file left" within "$busy" no_file "$n"
done

# Six ranks without MPI: two on each host, each with an output and a code of its own.
launch_at_store() {  # launch_at_store ADDRESS WORDS…
  local rank
  ranks=()
  for rank in 0 1 2 3 4 5; do
    timeout -k 1 180 "$hosts" on "$state" $((rank / 2 + 1)) env "RINGATTN_STORE=$1:29555" RANK="$rank" WORLD_SIZE=6 \
      "$RINGATTN_PROGRAM" run --backend cpu "${@:2}" >"$state/out$rank" 2>&1 &
    ranks+=($!)
  done
}
wait_for_ranks() {  # their codes are in $codes then
  local pid code
  codes=
  for pid in "${ranks[@]}"; do
    code=0
    wait "$pid" || code=$?
    codes+="$code "
  done
}

echo "--- without MPI"
launch_at_store 10.77.0.1 --synthetic 7 --seq 4k --quiet
wait_for_ranks
expect "all ranks that meet at a store end with code 0: $codes" test "$codes" = "0 0 0 0 0 0 "
expect "their digest is that of one" test "$(digest "$state/one")" = "$(digest "$state/out0")"
launch_at_store 10.77.0.1 --synthetic 7 --seq 256k --timeout "$timeout" --progress off
within 90 grep -q '^# layout' "$state/out0" || cat "$state"/out?
since=$SECONDS
"$hosts" cut "$state" 2
wait_for_ranks
expect "a cut link ends all ranks with code 6: $codes" test "$codes" = "6 6 6 6 6 6 "
expect "in time" test $((SECONDS - since)) -le $((timeout + 10 + busy))
grep -h error: "$state"/out? || true
expect "a rank of host 2 is blamed" grep -q 'error:.* rank [23] on host2' "$state"/out[0145]
expect "once" test "$(cat "$state"/out[0145] | grep -c error:)" = 1
"$hosts" join "$state" 2

exit $((failures > 0))
