#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes FOLDER, what a build links that must run on distributions older than this one. On Debian 12, with network; about
# 1 minute of two cores.
#   - glibc's link stubs of version GLIBC, from PyPI's ziglang. A program then takes each function's version of that glibc.
#   - libfmt, libhwy, toml++ and libgomp, static and position-independent, which the distribution's own libgomp.a is not; from
#     its source packages, so that its headers fit; and FOLDER/cmake, by which find_package() takes them.
#   - old_glibc.o: functions that are newer than GLIBC and that this distribution's libstdc++ and headers call.
# Usage: packaging/portable-libraries.sh FOLDER [GLIBC]
set -euo pipefail
(($# >= 1)) || { echo "portable-libraries.sh: error: no folder is given. Usage: portable-libraries.sh FOLDER [GLIBC]" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd) glibc=${2:-2.28}
here=$(cd "$(dirname "$0")" && pwd)
lib=$folder/lib
wanted="$glibc $(cksum <"$here/portable-libraries.sh") $(cksum <"$here/old_glibc.c")"
if [[ -e $folder/complete && $(<"$folder/complete") == "$wanted" ]]; then exit 0; fi
rm -rf "$folder"
mkdir -p "$lib" "$folder/work"
cd "$folder/work"
fail() { echo "portable-libraries.sh: error: $1 ($2). $3" >&2; exit 4; }
quietly() { "$@" >log 2>&1 || { tail -n 30 log >&2; fail "$* failed" "its output is above" "Correct that, and start again."; }; }

# ---- glibc ----
# zig compiles a program for a given glibc by making these files in its cache.
quietly python3 -m venv venv
quietly venv/bin/python -m pip install --quiet ziglang==0.17.1
echo 'int main(void) { return 0; }' >empty.c
quietly env ZIG_GLOBAL_CACHE_DIR="$PWD/zig" venv/bin/python -m ziglang cc -target "x86_64-linux-gnu.$glibc" -pthread -ldl -lm -lrt empty.c \
  -o empty
# Their objects are named like members of libc_nonshared.a: crt1.o alone starts programs.
cp zig/o/*/lib{c,m,pthread,dl,rt}.so.[0-9] zig/o/*/libc_nonshared.a zig/o/*/crt1.o "$lib"
cp zig/o/*/libld.so.2 "$lib/ld-linux-x86-64.so.2"
for name in m:6 pthread:0 dl:2 rt:1; do ln -s "lib${name%:*}.so.${name#*:}" "$lib/lib${name%:*}.so"; done
echo 'GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( ld-linux-x86-64.so.2 ) )' >"$lib/libc.so"
cp "$lib/crt1.o" "$lib/Scrt1.o"  # both are position-independent
gcc -c -O2 -fPIC -fvisibility=hidden "$here/old_glibc.c" -o "$lib/old_glibc.o"

# ---- Sources ----
. /etc/os-release
mkdir -p lists/partial
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $VERSION_CODENAME main" \
  >sources.list
apt=(apt-get -qq -o "Dir::Etc::SourceList=$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o "Dir::State::Lists=$PWD/lists" -o APT::Sandbox::User=root)
quietly "${apt[@]}" update
quietly "${apt[@]}" source --only-source fmtlib highway
gcc_major=$(gcc -dumpversion | cut -d. -f1)
quietly apt-get -qq -o APT::Sandbox::User=root download "gcc-$gcc_major-source"
quietly dpkg-deb -x "gcc-$gcc_major-source"*.deb gcc

# archive NAME FILE…: lib/libNAME.a. The code is that of the distribution's library, whose headers the build includes.
archive() {
  local name=$1 source objects=()
  for source in "${@:2}"; do
    quietly g++ -std=c++20 -O2 -fPIC -ffp-contract=off -DTOML_HEADER_ONLY=0 -I"$(dirname "$source")/../include" -I"$(dirname "$source")/.." \
      -c "$source" -o "$name-$(basename "$source").o"
    objects+=("$name-$(basename "$source").o")
  done
  ar rc "$lib/lib$name.a" "${objects[@]}"
}
echo '#define TOML_IMPLEMENTATION
#include <toml++/toml.h>' >toml.cpp
archive fmt fmtlib-*/src/{format,os}.cc
archive hwy highway-*/hwy/{aligned_allocator,per_target,print,targets}.cc
archive tomlplusplus toml.cpp

# package NAME TARGET FILE: NAME_DIR for find_package(): the distribution's package with lib/libNAME.a for its shared library.
package() {
  mkdir -p "$folder/cmake/$1"
  local known
  known=$(ls /usr/lib/*/cmake/"$1"/"$1"{C,-c}onfig.cmake 2>/dev/null) || true
  [[ -n $known ]] || fail "$1 isn't installed" "its headers are compiled in" "Run launch/install-deps.sh."
  cat >"$folder/cmake/$1/$1Config.cmake" <<END
include($known)
get_target_property(configurations $2 IMPORTED_CONFIGURATIONS)
foreach(configuration IN LISTS configurations)
  set_target_properties($2 PROPERTIES IMPORTED_LOCATION_\${configuration} $lib/lib$1.a)
endforeach()
set_target_properties($2 PROPERTIES IMPORTED_LOCATION $lib/lib$1.a)
END
}
package fmt fmt::fmt
package hwy hwy::hwy
package tomlplusplus tomlplusplus::tomlplusplus

# Notices that the licenses of what is linked or compiled in ask for.
mkdir "$folder/licenses"
for name in libfmt-dev libhwy-dev libtomlplusplus-dev nlohmann-json3-dev libcli11-dev libxxhash-dev libeigen3-dev "gcc-$gcc_major-base"; do
  cp -L "/usr/share/doc/$name/copyright" "$folder/licenses/${name%-dev}.txt"
done

# libgomp, and what its configure script reads. Objects that shared libraries link must be position-independent.
tar xf gcc/usr/src/*/gcc-*.tar.xz --wildcards '*/libgomp/*' '*/config/*' '*/include/*' '*/config*' '*/ltmain.sh' '*/missing' '*/install-sh' \
  '*/depcomp' '*/compile' '*/mkinstalldirs' '*/gcc/BASE-VER' '*/multilib.am' '*/*.m4' --exclude='*/libgomp/testsuite/libgomp.*' \
  --exclude='*/gcc/config/*' --exclude='*/gcc/testsuite*' --exclude='*/libstdc++-v3/*' --exclude='*/contrib/*'
mkdir gomp
cd gomp
quietly env CC=gcc CFLAGS='-O2 -fPIC' ../gcc-*/libgomp/configure --disable-multilib --disable-shared --enable-static --with-pic
# Without its -ftls-model=initial-exec: all thread-local data of a library that links it would then have to fit into the static TLS
# block, of which glibc leaves about 2 KiB to libraries that are opened later, as Python does. CUDA's runtime alone has 4 KiB.
quietly make -j2 XCFLAGS='-Wall -pthread' libgomp.la
cp .libs/libgomp.a "$lib"
cd "$folder"
rm -rf work
echo "$wanted" >complete
