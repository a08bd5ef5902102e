# SPDX-License-Identifier: Apache-2.0
"""The tests of the transformers adapter with the other versions of transformers that docs/python.md names. Each version is
installed into a folder of its own, from PyPI, with the versions of other packages that it needs; without PyPI or torch the
test is skipped."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs/python.md"


def skip(why: str):
    print(f"skipped: {why}")
    sys.exit(77)


if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    skip("needs torch and transformers")

import transformers  # noqa: E402

tried = re.search(r"Tried with transformers ([\d., and]+\d)", PAGE.read_text(encoding="utf-8"))[1]
here = ".".join(transformers.__version__.split(".")[:2])
others = [version for version in re.findall(r"\d+\.\d+", tried) if version != here]
assert others, f"{PAGE.name} names no version but {here}"
for version in others:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, f"transformers=={version}.*"]
        if subprocess.run(pip, check=False).returncode:
            skip(f"PyPI gave no transformers {version}")
        environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}
        for test in "transformers_test.py", "batch_invariant_test.py", "hf_adapter_test.py":
            command = [sys.executable, str(HERE / "run_test.py"), str(HERE / test)]
            done = subprocess.run(command, env=environment, check=False)
            print(f"{test} with transformers {version}: exit code {done.returncode}")
            assert done.returncode == 0, f"{test} fails with transformers {version}"
