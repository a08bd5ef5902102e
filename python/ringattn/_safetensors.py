# SPDX-License-Identifier: Apache-2.0
"""Tensors of a safetensors file, or of the index of several, as NumPy's arrays over the files: what isn't used is not read."""

import json
import math
import pathlib

import numpy as np

from ._errors import FileError, unsupported

_TYPES = {"F32": "float32", "F16": "float16", "F64": "float64", "I32": "int32", "I64": "int64"}
# Of a header; the format's own limit.
_MOST_BYTES = 100_000_000


def _broken(path, why: str) -> FileError:
    return FileError(f"{path} is no safetensors file", why, "Write it by the library of that name.")


def _header(path: pathlib.Path) -> tuple[dict, int]:
    """What it says of each tensor, and where their bytes begin."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MOST_BYTES, path.stat().st_size - 8):
                raise _broken(path, f"its header would have {length} bytes")
            said = json.loads(file.read(length))
    except OSError as error:
        raise FileError(f"{path} can't be read", error.strerror or str(error), "Check the path.") from error
    except ValueError as error:
        raise _broken(path, f"its header is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise _broken(path, "its header is no object")
    said.pop("__metadata__", None)
    return said, 8 + length


def _dtype(path, name: str, kind: str):
    if kind == "BF16":
        try:
            import ml_dtypes  # noqa: PLC0415, only where there are such tensors
        except ImportError:
            unsupported(f"{name} of {path} is BF16", "NumPy lacks that type", "Install ml_dtypes, as ringattn[bf16] does.")
        return np.dtype(ml_dtypes.bfloat16)
    if kind not in _TYPES:
        raise FileError(f"{name} of {path} is {kind}", f"there are BF16, {', '.join(_TYPES)}", "Convert it.")
    return np.dtype(_TYPES[kind])


class Tensors:
    """Arrays of a file by their names."""

    def __init__(self, path: str):
        self.path = pathlib.Path(path)
        files = [self.path]
        if self.path.suffix == ".json":
            try:
                of_names = json.loads(self.path.read_text(encoding="utf-8"))["weight_map"]
                files = [self.path.parent / name for name in sorted(set(of_names.values()))]
            except OSError as error:
                raise FileError(f"{path} can't be read", error.strerror or str(error), "Check the path.") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise FileError(f"{path} is no index", "it has no weight_map of names", "Name a safetensors file.") from error
        self._places = {}
        for file in files:
            said, begin = _header(file)
            self._places |= {name: (file, begin, one) for name, one in said.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._places:
            raise FileError(f"{self.path} has no tensor {name}", f"there are {', '.join(sorted(self._places)[:8]) or 'none'}",
                            "Check the file, or the name.")  # fmt: skip
        file, begin, said = self._places[name]
        try:
            shape, (first, last) = tuple(map(int, said["shape"])), map(int, said["data_offsets"])
            kind = said["dtype"]
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(file, f"{name} lacks shape, dtype or data_offsets") from error
        dtype = _dtype(file, name, kind)
        fits = 0 <= first and min(shape, default=1) >= 0 and last - first == math.prod(shape) * dtype.itemsize
        if not fits or begin + last > file.stat().st_size:
            raise _broken(file, f"{name} is {kind} {list(shape)} in bytes {first} to {last}")
        if first == last:
            return np.empty(shape, dtype)
        return np.memmap(file, np.uint8, "r", begin + first, last - first).view(dtype).reshape(shape)
