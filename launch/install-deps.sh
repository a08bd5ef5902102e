#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what ringattn needs from the distribution (Debian 12, Ubuntu 24.04) and is missing; says what.
# Usage: launch/install-deps.sh [--tests] [--sanitizers]
set -euo pipefail

packages=(g++ cmake ninja-build git libfmt-dev libxxhash-dev libhwy-dev libcli11-dev nlohmann-json3-dev
          libtomlplusplus-dev libssl-dev libeigen3-dev libopenmpi-dev openmpi-bin python3-venv)
for flag in "$@"; do
  case $flag in
    --tests) packages+=(libgtest-dev python3-numpy) ;;
    --sanitizers) packages+=(clang libomp-dev libclang-rt-14-dev) ;;
    *)
      echo "install-deps.sh: error: unknown argument $flag (it takes --tests and --sanitizers). Leave it out." >&2
      exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null; then
  echo "install-deps.sh: no dpkg here (this script knows Debian and Ubuntu)." \
       "Install the equivalents of: ${packages[*]}" >&2
  exit 4
fi

missing=()
for package in "${packages[@]}"; do
  # Ubuntu has no libclang-rt-14-dev by that name where its clang is newer; take the one that fits the installed clang.
  if [[ $package == libclang-rt-14-dev ]] && ! apt-cache show "$package" >/dev/null 2>&1; then
    package=libclang-rt-$(apt-cache depends clang | sed -n 's/.*Depends: clang-\([0-9]*\)$/\1/p' | head -n 1)-dev
  fi
  [[ $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) == *"install ok installed"* ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

echo "installing from the distribution: ${missing[*]}"
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "install-deps.sh: packages are missing (${missing[*]}) and this user can't install them (no root, no sudo)." \
         "Ask root to run: apt-get install ${missing[*]}" >&2
    exit 4
  fi
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
