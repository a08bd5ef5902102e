#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install_packages.sh ENVIRONMENT [--torch]: installs what tests of the Python package use into a virtual environment; with
# --torch, PyTorch and transformers too.
set -euo pipefail
export VIRTUAL_ENV=$1
python=$1/bin/python

# Pinned: another Matplotlib draws other bytes than the committed pictures, and a new PyTorch may change what a test looks into.
packages=(numpy safetensors ml_dtypes pytest matplotlib==3.11.2)
torch_packages=(torch==2.15.0 transformers==5.24.0 compressed-tensors==0.20.1)

has() { "$python" -c 'import importlib.util, sys; sys.exit(None in map(importlib.util.find_spec, sys.argv[1:]))' "$@"; }
# PyTorch is 5 GB: uv takes 33 s of CPU time for it, pip 84 s. Nothing is compiled to bytecode here: tests keep the bytecode of
# what they import in the build directory.
pip_install() { "$python" -m pip install --quiet --no-compile "$@"; }
install() {
  [[ -x $VIRTUAL_ENV/bin/uv ]] || pip_install uv || true
  "$VIRTUAL_ENV/bin/uv" pip install --quiet "$@" || pip_install "$@"
}

missing=()
has numpy safetensors ml_dtypes pytest matplotlib || install "${packages[@]}" || missing+=("${packages[@]}")
if [[ ${2:-} == --torch ]] && ! has torch transformers compressed_tensors; then
  install "${torch_packages[@]}" || {
    missing+=("${torch_packages[@]}")
    "$python" -m pip uninstall --quiet --yes torch transformers || true  # tests would fail with a part of them
  }
fi
if ((${#missing[@]})); then
  echo "PyPI gave no ${missing[*]}" >&2
  exit 1
fi
