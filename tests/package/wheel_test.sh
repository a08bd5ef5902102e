#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel_test.sh LIBRARY: builds the Python package's wheel, installs it where nothing else of the project is, and runs
# tests of the package on it. The long suite (RINGATTN_TEST_LONG=1) builds the library anew, without CUDA, as pip does;
# otherwise the wheel has only the package, over LIBRARY, and fewer tests run: all of them ran on the same files.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
library=$1
whole=${RINGATTN_TEST_LONG:-0}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
! command -v ccache >/dev/null || export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_C_COMPILER_LAUNCHER=ccache

python3 -m venv --without-pip "$place/venv"  # installing pip there takes as long as all that follows
python=$place/venv/bin/python
pip() { python3 -m pip --python "$python" "$@"; }
if ! pip install --quiet --no-compile scikit-build-core numpy pytest; then
  echo "skipped: PyPI gives no scikit-build-core"
  exit 77
fi
options=(--config-settings=wheel.cmake=false --no-build-isolation)
((!whole)) || options=(--config-settings=cmake.define.RINGATTN_CUDA=OFF "--config-settings=build-dir=$place/build")
pip wheel --quiet --no-deps --wheel-dir "$place" "${options[@]}" "$root/python"
wheels=("$place"/ringattn-*-py3-none-*.whl)
[[ ${#wheels[@]} == 1 && -e ${wheels[0]} ]] || { echo "pip wheel made: $(ls "$place")"; exit 1; }
rm -rf "$place/build"
pip install --quiet --no-deps "${wheels[0]}"

cd "$place"  # where no checkout lies on Python's path
unset RINGATTN_LIBRARY PYTHONPATH
if ((whole)); then
  library=$("$python" -c 'import pathlib, ringattn; print(*pathlib.Path(ringattn.__file__).parent.rglob("libringattn_c.so*"))')
  [[ -e $library ]] || { echo "the installed package has no library of its own: $library"; exit 1; }
  if ldd "$library" | grep -E 'libmpi|libpython|not found'; then
    echo "$library must not need these"
    exit 1
  fi
else
  export RINGATTN_LIBRARY=$library
fi
"$python" -c 'import ringattn, sys; assert ringattn.__file__.startswith(sys.prefix), ringattn.__file__'
"$python" -m pytest --help | grep ringattn-record >/dev/null || { echo "pytest doesn't find the plugin"; exit 1; }
names=(layouts_test testing_test)
((!whole)) || names+=(attention_test goldens_test ops_test safety_test safetensors_test verify_test)
for name in "${names[@]}"; do
  "$python" "$root/tests/python/run_test.py" "$root/tests/python/$name.py"
done
