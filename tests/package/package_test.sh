#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# package_test.sh CMAKE BUILD COMPILER VERSION MPIEXEC [FORM]: installs BUILD into a folder of its own, or unpacks there the
# package of FORM, deb or tgz, that cpack makes; builds the consumer against it as a project that has no MPI, linked
# statically, to the shared library, in C, and by pkg-config, and runs it: on one rank, in a world of threads, and by
# processes that gather without MPI. Where MPI is, the consumer runs under an MPI_Comm of its own, too. All print the same
# bits. Then the installed program and launcher run.
set -euo pipefail
cmake=$1 build=$2 compiler=$3 version=$4 mpiexec=$5 form=${6:-folder}
here=$(cd "$(dirname "$0")" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

logged() { "$@" >"$place/log" 2>&1 || { cat "$place/log"; exit 1; }; }
if [[ $form == folder ]]; then
  logged "$cmake" --install "$build" --prefix "$place/installed"
else
  logged "$(dirname "$cmake")/cpack" --config "$build/CPackConfig.cmake" -G "${form^^}" -B "$place/packages"
  packages=("$place"/packages/ringattn*."${form/tgz/tar.gz}")
  if [[ $form == deb ]]; then
    logged dpkg-deb -x "${packages[0]}" "$place/root"
    mv "$place/root/usr" "$place/installed"
    depends=$(dpkg-deb -f "${packages[0]}" Depends)
    [[ $depends =~ libc6 && $depends =~ libfmt ]] || { echo "the package depends on: $depends"; exit 1; }
  else
    mkdir "$place/installed"
    logged tar xf "${packages[0]}" -C "$place/installed" --strip-components=1
  fi
fi
# Moved: nothing in it may name the place that it was installed to.
mv "$place/installed" "$place/moved"
installed=$place/moved
cmp "$here/../../LICENSE" "$installed/share/doc/ringattn/LICENSE"

failed=0
wrong() { echo "$*"; failed=1; }
expect() {  # expect WANTED COMMAND…
  local said
  said=$("${@:2}" 2>&1) && [[ $said == "$1" ]] || wrong "${*:2} said: $said, not: $1"
}
refuses() {  # refuses PATTERN COMMAND…: it fails, and says that
  local said
  if said=$("${@:2}" 2>&1); then
    wrong "${*:2} did not fail"
  else
    # Lines of CMake's messages are cut anywhere.
    [[ $(tr -s '\n ' ' ' <<<"$said") =~ $1 ]] || wrong "${*:2} said: $said, not: $1"
  fi
}
configure() {  # configure PROJECT FOLDER VERSION DEFINITION…
  "$cmake" -S "$here/$1" -B "$place/$2" "-DCMAKE_PREFIX_PATH=$installed" "-DCMAKE_CXX_COMPILER=$compiler" \
           "-DVERSION=$3" "-DC_TESTS=$here/../c" "${@:4}"
}
build() {  # build PROJECT FOLDER DEFINITION… -- TARGET…
  local definitions=()
  while [[ ${3:?} != -- ]]; do
    definitions+=("$3")
    set -- "$1" "$2" "${@:4}"
  done
  { configure "$1" "$2" "$version" "${definitions[@]}" && "$cmake" --build "$place/$2" --parallel 2 --target "${@:4}"; } \
    >"$place/log" 2>&1 || { cat "$place/log"; exit 1; }
}

# ---- Without MPI ----
build consumer consumer -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON -- all
bits=$("$place/consumer/static" 1)
[[ $bits =~ ^[0-9a-f]{32}$ ]] || { echo "the consumer printed: $bits"; exit 1; }
expect "$bits" "$place/consumer/static" 3
expect "$bits" "$place/consumer/shared" 1
expect "$bits" "$place/consumer/shared" 2
for ranks in 1 3; do
  mkdir "$place/gather$ranks"
  expect "$bits" "$place/consumer/own_gather" "$ranks" "$place/gather$ranks"
done
in_c=$("$place/consumer/in_c")
[[ $in_c =~ ^[0-9a-f]{16}$ ]] || wrong "the consumer in C printed: $in_c"
expect "$in_c" "$place/consumer/in_c" threads 3

# What one MPI was linked to runs nowhere else.
library=$(find "$installed" -name libringattn.so)
for file in "$place"/consumer/{static,shared,own_gather,in_c} "$library" "${library%.so}_c.so" "$installed/bin/ringattn"; do
  needed=$(readelf -d "$file" | grep NEEDED) || wrong "readelf says nothing of $file"
  [[ ! $needed =~ libmpi ]] || wrong "$file needs MPI: $needed"
done

# ---- Only in C ----
build c_only c_only -- all
expect "$in_c" "$place/c_only/in_c"
# Before 1.0 each minor version is an interface of its own.
for other in 0.2 0.4 "${version%.*}.99"; do
  refuses "compatible with requested version \"$other\"" configure c_only "other$other" "$other"
done
refuses 'Its component static needs fmt' configure c_only c_only_static "$version" -DCOMPONENTS=static
refuses 'without a component nonsense' configure c_only c_only_nonsense "$version" -DCOMPONENTS=nonsense

# ---- With MPI ----
if [[ -n $mpiexec ]]; then
  build consumer with_mpi -- own_comm own_comm_shared own_comm_in_c
  mpirun=("$mpiexec" -np 3 --oversubscribe --bind-to none)
  expect "$bits" "${mpirun[@]}" "$place/with_mpi/own_comm"
  expect "$bits" "${mpirun[@]}" "$place/with_mpi/own_comm_shared"
  expect "$in_c" "${mpirun[@]}" "$place/with_mpi/own_comm_in_c"
fi

# ---- By pkg-config: the commands of docs/cpp.md and docs/c.md ----
if command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH
  PKG_CONFIG_PATH=$(dirname "$(find "$installed" -name ringattn.pc)"):${PKG_CONFIG_PATH:-}
  by_pkg_config() {  # by_pkg_config PROGRAM PACKAGE COMPILER ARGUMENT…: a program that finds its libraries where they are
    local flags
    [[ $(pkg-config --modversion "$2") == "$version" ]] || wrong "$2.pc has another version"
    read -ra flags < <(pkg-config --cflags --libs "$2")
    "${@:3}" -o "$place/$1" "${flags[@]}" -pthread "-Wl,-rpath,$(pkg-config --variable=libdir "$2")"
  }
  by_pkg_config by_pkg_config ringattn "$compiler" -std=c++20 "$here/consumer/threads.cpp"
  expect "$bits" "$place/by_pkg_config" 2
  by_pkg_config c_by_pkg_config ringattn_c "${CC:-cc}" "$here/../c/client.c"
  expect "$in_c" "$place/c_by_pkg_config"
  by_pkg_config static_by_pkg_config ringattn_static "$compiler" -std=c++20 "$here/consumer/threads.cpp"
  expect "$bits" "$place/static_by_pkg_config" 2
fi

# ---- The program ----
expect "ringattn $version" bash -c "'$installed/bin/ringattn' --version | cut -d' ' -f1,2"
if [[ -n $mpiexec ]]; then
  job=(run --synthetic 1 --seq 300 --heads 2 --kv-heads 1 --head-dim 64 --backend cpu --timeout 60)
  alone=$("$installed/bin/ringattn" "${job[@]}" --json - 2>/dev/null | grep -A3 '"digest"')
  ranks=$("$installed/bin/ringattn-mpirun" -np 2 --oversubscribe "${job[@]}" --json - 2>/dev/null | grep -A3 '"digest"')
  [[ -n $alone && $alone == "$ranks" ]] || wrong "digests: $alone and, by ringattn-mpirun, $ranks"
  # Where MPI can't be had, the reason is said.
  find "$installed" -name "libringattn_mpi-$version.so" -delete
  refuses "can't join the ranks that mpirun has started \(libringattn_mpi-$version.so: cannot open" \
          "$mpiexec" -np 1 "$installed/bin/ringattn" "${job[@]}"
  refuses "there is no MPI here \(libringattn_mpi-$version.so: cannot open" \
          "$mpiexec" -np 1 "$place/with_mpi/own_comm_in_c"
fi
exit "$failed"
