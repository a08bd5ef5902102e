#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds and runs the suite. What needs a GPU is skipped and says so.
# Usage: ./tests/run.sh [--torch] [--cold] [--all]
#   --torch  installs PyTorch and transformers (5 GB) for the tests that need them, which are skipped otherwise
#   --cold   asks no compiler cache, which helps nobody on a machine that builds once
#   --all    adds the suite under sanitizers, and to the dev build's its long parts: long fuzzing, every world size, every
#            moment at which a rank can stop, worlds over three hosts, the library that pip builds for the Python wheel,
#            the tests of bench/, the other versions of transformers that are tried, and the API reference
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
all=0 torch=0 cold=0
for word in "$@"; do
  case $word in
    --all) all=1 ;;
    --torch) torch=1 ;;
    --cold) cold=1 ;;
    *) echo "run.sh: error: unknown argument $word (it takes --torch, --cold and --all). Try ./tests/run.sh alone." >&2; exit 2 ;;
  esac
done

deps=(--tests)
((all)) && deps+=(--sanitizers)
./launch/install-deps.sh "${deps[@]}"

# Python packages come while the code is being built; without them tests are skipped and say so.
if [[ ! -x build/venv/bin/python ]]; then
  python3 -m venv --system-site-packages build/venv
fi
pytorch=()
((torch)) && pytorch=(--torch)
timeout 900 ./tests/support/install_packages.sh "$PWD/build/venv" "${pytorch[@]}" &
installs=$! sessions=
leave() {
  if [[ -n $installs ]]; then kill "$installs" 2>/dev/null || true; fi  # a build may have failed before
  if [[ -n $sessions ]]; then rmdir "$sessions/kept" "$sessions" 2>/dev/null || true; fi
}
trap leave EXIT
packages_are_here() {
  if [[ -n $installs ]] && ! wait "$installs"; then
    echo "run.sh: Python packages are missing; the tests that use them will be skipped"
  fi
  installs=
}
export PATH="$PWD/build/venv/bin:$PATH"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # tests run beside each other: who waits leaves its core to them

options=(-DCMAKE_CXX_FLAGS_DEV=-O2)  # without line numbers: a sixth less to compile
if ((!cold)) && command -v ccache >/dev/null; then
  options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache -DRINGATTN_COLD=OFF)
else
  options+=(-DCMAKE_CXX_COMPILER_LAUNCHER= -DCMAKE_CUDA_COMPILER_LAUNCHER= -DRINGATTN_COLD=ON)
fi

((all)) && options+=(-DRINGATTN_LONG_TESTS=ON) || options+=(-DRINGATTN_LONG_TESTS=OFF)

# Without a GPU its code is compiled and not run: one instance of each kernel, which nvcc (12.9 and later) need not
# optimise.
nvcc=$(PATH="$PATH:/usr/local/cuda/bin" command -v nvcc || true)
if [[ -n $nvcc ]] && ! nvidia-smi -L >/dev/null 2>&1 && "$nvcc" --help | grep -e --Ofast-compile >/dev/null; then
  options+=(-DCMAKE_CUDA_FLAGS=-Ofc=max -DRINGATTN_CHECK_CUDA=ON)
fi

# Open MPI 4.1 makes a folder of sessions with its first mpirun and takes it away with its last. A test that begins while
# another one's ends may find it there and yet not there, and gives up. With a folder in it it stays.
sessions=${TMPDIR:-/tmp}/ompi.$(uname -n | cut -d. -f1).$(id -u)
mkdir -p "$sessions/kept"

status=0

# suite <preset> [ctest arguments …]: one that fails doesn't keep the others from being run.
suite() {
  local preset=$1 start=$SECONDS
  shift
  if cmake --preset "$preset" "${options[@]}" >"build/$preset.log" 2>&1 || { cat "build/$preset.log"; false; }; then
    cmake --build --preset "$preset" && packages_are_here &&
      ctest --preset "$preset" --parallel "$(($(nproc) + 3))" "$@" ||  # some tests wait for time limits
      status=$?
  else
    status=1
  fi
  echo "run.sh: preset $preset: $(((SECONDS - start + 30) / 60)) min"
}

if ((all)); then
  ASAN_OPTIONS=detect_leaks=0 suite asan
  suite tsan
  export RINGATTN_TEST_LONG=1
fi
suite dev
exit "$status"
