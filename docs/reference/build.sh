#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the API reference and the guides: build/reference/index.html. Warnings are errors.
# It needs the library (build/*/lib/libringattn_c.so, or RINGATTN_LIBRARY), NumPy and PyTorch, for which it uses the environment
# of tests/run.sh, build/venv, or makes it.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=build/venv/bin/python
[[ -x $python ]] || python3 -m venv build/venv
"$python" -m pip install --quiet --disable-pip-version-check -r docs/reference/requirements.txt
"$python" -c 'import numpy, torch' 2>/dev/null || "$python" -m pip install --quiet numpy torch

if [[ -z ${RINGATTN_LIBRARY:-} ]]; then
  libraries=(build/*/lib/libringattn_c.so)
  if [[ ! -e ${libraries[0]} ]]; then
    echo "build.sh: error: there is no libringattn_c.so in build/ (docstrings are read from the imported package). Build it:" \
      "cmake --preset release && cmake --build --preset release --target ringattn_c." >&2
    exit 1
  fi
  RINGATTN_LIBRARY=${libraries[0]}
fi
RINGATTN_LIBRARY=$(realpath "$RINGATTN_LIBRARY")  # Sphinx changes the folder
export RINGATTN_LIBRARY
rm -rf build/reference
"$python" -m sphinx -c docs/reference -W --keep-going -n -q -d build/reference/.doctrees docs build/reference "$@"
cp docs/reference/redirect.html build/reference/index.html
echo "build/reference/index.html"
