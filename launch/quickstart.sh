#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a checkout to a result: installs what is missing, builds, runs the main job on this machine's GPUs (without any: on
# 4 CPU ranks) and shows that its bits are the same in smaller worlds and right against the fp64 oracle.
# Usage: ./launch/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
if (($# > 0)); then
  if [[ $1 == --help || $1 == -h ]]; then
    echo "Usage: ./launch/quickstart.sh, without arguments; it takes some minutes."
    exit 0
  fi
  echo "quickstart.sh: error: unknown argument $1 (it takes none). Try ./launch/quickstart.sh alone." >&2
  exit 2
fi

./launch/install-deps.sh
build=build/quickstart
mkdir -p "$build"
cmake --preset release -DRINGATTN_TESTS=OFF -B "$build" >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log" >&2; exit 4; }
echo "building in $build"
cmake --build "$build" >"$build/build.log" 2>&1 || { tail -n 50 "$build/build.log" >&2; exit 4; }

ringattn=$build/bin/ringattn
gpus=$("$ringattn" info --json - 2>/dev/null | grep -c '"compute_capability"' || true)
if ((gpus > 0)); then
  job=(--synthetic 1 --seq 128k --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --mask causal)
  ranks=$((gpus > 1 ? gpus : 3)) # ranks of one process share a GPU
else
  job=(--synthetic 1 --seq 16k --heads 8 --kv-heads 2 --head-dim 128 --dtype bf16 --mask causal)
  ranks=4
fi

# Runs ringattn's words on a number of ranks: under mpirun where MPI was found (and, with GPUs, there is more than one),
# else as threads of one process.
if command -v mpirun >/dev/null && ((gpus != 1)) && "$ringattn" info 2>/dev/null | grep -qE '^ *mpi '; then
  world="mpirun"
  on_ranks() {
    local ranks=$1
    shift
    RINGATTN_PROGRAM=$ringattn launch/ringattn-mpirun -np "$ranks" "$@"
  }
else
  world="threads of one process"
  on_ranks() {
    local ranks=$1
    shift
    "$ringattn" "$@" --ranks "$ranks"
  }
fi

echo "the main job on $ranks ranks, $world:"
on_ranks "$ranks" run "${job[@]}"
echo "the same bits in smaller worlds and other shapes:"
on_ranks $((ranks < 3 ? ranks : 3)) verify "${job[@]}"
echo "64 rows against the fp64 oracle:"
on_ranks "$ranks" verify "${job[@]}" --against oracle --rows 64
echo "shown: the causal job of the lines above on $ranks ranks ($world); smaller worlds give the same bits;" \
     "64 sampled rows agree with fp64."
