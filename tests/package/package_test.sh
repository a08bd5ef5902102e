#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# package_test.sh CMAKE BUILD COMPILER VERSION MPIEXEC: installs BUILD into a folder of its own, builds the consumer
# against it, linked statically, to the shared library, in C, and by pkg-config, and runs it: alone, in a world of threads,
# by processes that gather without MPI, and under an MPI_Comm of its own. All print the same bits. Then the installed program
# and launcher run.
set -euo pipefail
cmake=$1 build=$2 compiler=$3 version=$4 mpiexec=$5
here=$(cd "$(dirname "$0")" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

"$cmake" --install "$build" --prefix "$place/installed" >"$place/log" || { cat "$place/log"; exit 1; }
# Moved: nothing in it may name the place that it was installed to.
mv "$place/installed" "$place/moved"
installed=$place/moved

"$cmake" -S "$here/consumer" -B "$place/consumer" "-DCMAKE_PREFIX_PATH=$installed" "-DCMAKE_CXX_COMPILER=$compiler" \
         "-DVERSION=$version" "-DC_CLIENT=$here/../c/client.c" >"$place/log" 2>&1 || { cat "$place/log"; exit 1; }
"$cmake" --build "$place/consumer" --parallel 2 >"$place/log" 2>&1 || { cat "$place/log"; exit 1; }

failed=0
expect() {  # expect WANTED COMMAND…
  local said
  said=$("${@:2}" 2>&1) && [[ $said == "$1" ]] || { echo "${*:2} said: $said, not: $1"; failed=1; }
}
bits=$("$place/consumer/static" 1)
[[ $bits =~ ^[0-9a-f]{32}$ ]] || { echo "the consumer printed: $bits"; exit 1; }
expect "$bits" "$place/consumer/static" 3
expect "$bits" "$place/consumer/shared" 1
expect "$bits" "$place/consumer/shared" 2
for ranks in 1 3; do
  mkdir "$place/gather$ranks"
  expect "$bits" "$place/consumer/own_gather" "$ranks" "$place/gather$ranks"
done
if [[ -x $place/consumer/own_comm ]]; then
  expect "$bits" "$mpiexec" -np 3 --oversubscribe --bind-to none "$place/consumer/own_comm"
fi

in_c=$("$place/consumer/in_c")
[[ $in_c =~ ^[0-9a-f]{16}$ ]] || { echo "the consumer in C printed: $in_c"; failed=1; }
expect "$in_c" "$place/consumer/in_c" threads 3

# The shared library needs nothing else on the command line.
if command -v pkg-config >/dev/null; then
  pc=("--define-variable=prefix=$installed" ringattn)
  export PKG_CONFIG_PATH
  PKG_CONFIG_PATH=$(dirname "$(find "$installed" -name ringattn.pc)")
  [[ $(pkg-config --modversion ringattn) == "$version" ]] || { echo "ringattn.pc has another version"; failed=1; }
  read -ra flags < <(pkg-config --cflags --libs "${pc[@]}")
  "$compiler" -std=c++20 "$here/consumer/threads.cpp" -o "$place/by_pkg_config" "${flags[@]}" \
              "-Wl,-rpath,$(pkg-config --variable=libdir "${pc[@]}")"
  expect "$bits" "$place/by_pkg_config" 2
  pc[1]=ringattn_c
  read -ra flags < <(pkg-config --cflags --libs "${pc[@]}")
  "${CC:-cc}" "$here/../c/client.c" -o "$place/c_by_pkg_config" "${flags[@]}" -pthread \
              "-Wl,-rpath,$(pkg-config --variable=libdir "${pc[@]}")"
  expect "$in_c" "$place/c_by_pkg_config"
fi

expect "ringattn $version" bash -c "'$installed/bin/ringattn' --version | cut -d' ' -f1,2"
job=(run --synthetic 1 --seq 300 --heads 2 --kv-heads 1 --head-dim 64 --backend cpu --timeout 60)
if [[ -n $mpiexec ]]; then
  alone=$("$installed/bin/ringattn" "${job[@]}" --json - 2>/dev/null | grep -A3 '"digest"')
  ranks=$("$installed/bin/ringattn-mpirun" -np 2 --oversubscribe "${job[@]}" --json - 2>/dev/null | grep -A3 '"digest"')
  [[ -n $alone && $alone == "$ranks" ]] || { echo "digests: $alone and, by ringattn-mpirun, $ranks"; failed=1; }
fi
exit "$failed"
