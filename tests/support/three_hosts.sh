#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Three hosts on this machine, for tests of what happens between hosts: network namespaces with names, addresses and
# temporary folders of their own, and a fourth namespace as the switch between them. They are invisible from outside.
#
#   three_hosts.sh possible          whether this user and system can make them; says why not
#   three_hosts.sh up FOLDER         makes them; FOLDER must exist, and gets folders host1 to host3 with their files
#   three_hosts.sh on FOLDER N COMMAND…   runs a command on host N, with mpirun set up to reach all three (2 slots each)
#   three_hosts.sh cut FOLDER N      takes host N off the switch; `join` puts it back
#   three_hosts.sh pids FOLDER N     the processes on host N
#   three_hosts.sh down FOLDER       kills their processes, and removes everything
set -euo pipefail
export LC_ALL=C

possible() {
  local tool
  for tool in ip unshare setsid mount mpirun; do
    command -v "$tool" >/dev/null || { echo "$tool isn't installed"; return 1; }
  done
  [[ $EUID == 0 ]] || { echo "making network namespaces takes root"; return 1; }
  unshare --net --uts --mount ip link add probe0 type veth peer name probe1 2>/dev/null ||
    { echo "this system makes no network namespaces"; return 1; }
}

# Names of namespaces are global on the machine, so they contain a number derived from the folder.
space() { echo "ringattn-$(stat -c %i "$folder")-$1"; }

up() {
  local n
  ip netns add "$(space switch)"
  ip -n "$(space switch)" link add bridge type bridge
  ip -n "$(space switch)" link set bridge up
  for n in 1 2 3; do
    mkdir -p "$folder/host$n/tmp"
    ip netns add "$(space "$n")"
    ip -n "$(space switch)" link add "port$n" type veth peer name eth0 netns "$(space "$n")"
    ip -n "$(space switch)" link set "port$n" master bridge up
    ip -n "$(space "$n")" addr add "10.77.0.$n/24" dev eth0
    ip -n "$(space "$n")" link set eth0 up
    ip -n "$(space "$n")" link set lo up
    echo "10.77.0.$n slots=2" >>"$folder/hosts"
  done
}

down() {
  local n pids
  for n in 1 2 3; do
    pids=$(ip netns pids "$(space "$n")" 2>/dev/null) || continue
    # shellcheck disable=SC2086  # a list of numbers
    [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
    rm -f /dev/shm/vader_segment."host$n".*
    ip netns del "$(space "$n")"
  done
  ip netns del "$(space switch)" 2>/dev/null || true
}

# Gives host N its own name and temporary folder, and hides the folders of the other hosts. The agent comes from host 1,
# where host N's folder is hidden.
enter() {
  local n=$1 other script="hostname host$1; "
  shift
  script+="! mountpoint -q '$folder/host$n' || umount '$folder/host$n'; "
  for other in 1 2 3; do
    [[ $other == "$n" ]] || script+="mount -t tmpfs none '$folder/host$other'; "
  done
  exec ip netns exec "$(space "$n")" unshare --uts --mount \
    env TMPDIR="$folder/host$n/tmp" bash -c "$script"'exec "$@"' enter "$@"
}

on() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_plm_rsh_agent="$self agent $folder" OMPI_MCA_orte_default_hostfile=$folder/hosts
  export OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=10.77.0.0/24 OMPI_MCA_oob_tcp_if_include=10.77.0.0/24
  enter "$@"
}

# Replaces ssh between real hosts: agent [OPTIONS] ADDRESS COMMAND…. The command has neither the environment nor the
# session nor the pipes of the caller, and outlives it.
agent() {
  while [[ $1 == -* ]]; do shift; done
  local address=$1
  shift
  env -i PATH="$PATH" HOME="${HOME:-/}" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    setsid "$self" entered "$folder" "${address##*.}" bash -c "$*" </dev/null 2>&1 | cat
}

self=$(readlink -f "${BASH_SOURCE[0]}")
what=${1:-}
[[ $what != possible ]] || { possible; exit; }
folder=$(readlink -f "${2:?a folder}")
shift 2
case $what in
  up | down | on | agent) "$what" "$@" ;;
  entered) enter "$@" ;;
  cut) ip -n "$(space switch)" link set "port$1" down ;;
  join) ip -n "$(space switch)" link set "port$1" up ;;
  pids) ip netns pids "$(space "$1")" ;;
  *) echo "three_hosts.sh: error: unknown command $what (its head lists them). Read it." >&2; exit 2 ;;
esac
