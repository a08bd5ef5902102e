# SPDX-License-Identifier: Apache-2.0
"""The section "Python" of `ringattn collect-env`, which runs this file, and of `python -m ringattn collect-env`."""

import importlib.metadata
import importlib.util
import pathlib
import platform
import runpy
import sys

_PACKAGES = ("ringattn", "numpy", "torch", "transformers", "safetensors", "triton", "flash_attn", "flash_attn_3", "mamba_ssm",
             "vllm", "ml_dtypes", "mpi4py")  # fmt: skip


def _python() -> str:
    kind = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's"
    return f"{platform.python_implementation()} {platform.python_version()}, {kind}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none (not installed)"


def _torch_build() -> str:
    """What torch was built with. torch is not imported, because that takes seconds, and may fail in the case that is reported."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "none (not installed)"
    about = runpy.run_path(str(pathlib.Path(found.origin).with_name("version.py")))
    return f"git {str(about.get('git_version'))[:12]}, CUDA {about.get('cuda') or 'none'}, ROCm {about.get('hip') or 'none'}"


def lines() -> list[str]:
    """The lines, each with a name and a value. The value of a missing item says why it is missing."""
    items = [("Python", _python), ("torch build", _torch_build)]
    items[1:1] = [(package, lambda package=package: _version(package)) for package in _PACKAGES]
    found = []
    for name, value in items:
        try:
            text = value()
        except Exception as error:  # of any kind: the other items matter too
            text = f"unknown ({type(error).__name__}: {error})"
        text = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
        found.append(f"{name:<17} {text}")
    return found


if __name__ == "__main__":
    print("\n".join(lines()))
