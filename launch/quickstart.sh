#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a checkout to a result: installs what is missing, builds, runs the main job on this machine's GPUs (without any: on
# 4 CPU ranks) and shows that its bits are the same in smaller worlds and right against the fp64 oracle.
# Usage: ./launch/quickstart.sh [--cuda]
#   --cuda   builds the GPU code also on a machine without a GPU, for all supported GPUs
set -euo pipefail
cd "$(dirname "$0")/.."
cuda=0
for word in "$@"; do
  case $word in
    --cuda) cuda=1 ;;
    -h | --help) sed -n '3,6s/^# \{0,1\}//p' launch/quickstart.sh; exit 0 ;;
    *) echo "quickstart.sh: error: unknown argument $word (it takes --cuda). Try ./launch/quickstart.sh alone." >&2; exit 2 ;;
  esac
done

# The architectures of this machine's GPUs; empty: there is none.
architectures() {
  local capability
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } | sort -u | while read -r capability; do
    case $capability in
      9.0) echo 90a-real ;;
      [0-9]*.[0-9]) echo "${capability/./}" ;;
    esac
  done | paste -sd ';'
}

# The numbers of a build as ninja prints them, "[3/40 5.1]", with the time that is left at this rate. A line every tenth.
progress() {
  awk '/^\[[0-9]+\/[0-9]+ [0-9.]+\]/ {
    split(substr($0, 2), part, /[\/ \]]/)
    tenth = int(10 * part[1] / part[2])
    if (tenth == last) next
    last = tenth
    printf "  %d of %d files, about %.0f s left\n", part[1], part[2], part[3] * (part[2] - part[1]) / part[1]
    fflush()
  }'
}

./launch/install-deps.sh
build=build/quickstart
mkdir -p "$build"
options=(-DRINGATTN_TESTS=OFF)
gpu_code=$(architectures)
if [[ -n $gpu_code ]]; then
  options+=("-DCMAKE_CUDA_ARCHITECTURES=$gpu_code")
elif ((!cuda)); then
  options+=(-DRINGATTN_CUDA=OFF)
fi
# On few processors, a first build is faster in fewer and larger steps, which read headers less often.
if (($(nproc) < 8)); then options+=(-DRINGATTN_COLD=ON); fi
cmake --preset release "${options[@]}" -B "$build" >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log" >&2; exit 4; }
echo "building in $build${gpu_code:+ for $gpu_code}"
NINJA_STATUS='[%f/%t %e] ' cmake --build "$build" 2>&1 | tee "$build/build.log" | progress ||
  { tail -n 50 "$build/build.log" >&2; exit 4; }

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
if command -v mpirun >/dev/null && ((gpus != 1)) && "$ringattn" info 2>/dev/null | grep -E '^ *mpi ' >/dev/null; then
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
