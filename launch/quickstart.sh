#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a checkout to a result: installs what is missing, builds, runs the main job on 4 ranks and shows that its bits
# are the same on 1, 2 and 3 ranks and right against the fp64 oracle. Usage: ./launch/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."

./launch/install-deps.sh
build=build/quickstart
mkdir -p "$build"
cmake --preset release -DRINGATTN_TESTS=OFF -B "$build" >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log" >&2; exit 4; }
echo "building in $build"
cmake --build "$build" >"$build/build.log" 2>&1 || { tail -n 50 "$build/build.log" >&2; exit 4; }

ringattn=$build/bin/ringattn
job=(--synthetic 1 --seq 16k --heads 8 --kv-heads 2 --head-dim 128 --dtype bf16 --mask causal)

# Runs ringattn's words on a number of ranks: under mpirun where MPI was found, else as threads of one process.
if command -v mpirun >/dev/null && "$ringattn" info 2>/dev/null | grep -qE '^ *mpi '; then
  world="mpirun"
  on_ranks() {
    local ranks=$1
    shift
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none \
      mpirun --oversubscribe --bind-to none -np "$ranks" "$ringattn" "$@"
  }
else
  world="threads (no MPI was found)"
  on_ranks() {
    local ranks=$1
    shift
    "$ringattn" "$@" --ranks "$ranks"
  }
fi

echo "the main job on 4 ranks, $world:"
on_ranks 4 run "${job[@]}"
echo "the same bits on 1, 2 and 3 ranks:"
on_ranks 3 verify "${job[@]}"
echo "64 rows against the fp64 oracle:"
on_ranks 4 verify "${job[@]}" --against oracle --rows 64
echo "shown: 16,384 causal tokens on 4 ranks ($world); 1, 2 and 3 ranks give the same bits;" \
     "64 sampled rows agree with fp64."
