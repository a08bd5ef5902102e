# SPDX-License-Identifier: Apache-2.0
"""Tensors of a safetensors file, or of the index of several files, as NumPy arrays over the mapped files, so that unused
tensors are not read. Files are accepted and refused by the same rules as in the program (src/io/safetensors_header.cpp and
safetensors_index.cpp)."""

import json
import mmap
import os
import re
import stat
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np

from ._errors import FileError, unsupported

# Bits of the format's element types.
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
         "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
         "F32": 32,
         "C64": 64, "F64": 64, "I64": 64, "U64": 64}  # fmt: skip
_NUMPY = {"F32": "float32", "F16": "float16", "I32": "int32", "I64": "int64"}
# PyTorch's names of the types that it shares with the format, other than float8.
TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I64": "int64", "I32": "int32",
                "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip
_HEADER_BYTES = 100_000_000  # as in the reference library
_TENSORS, _METADATA, _AXES, _NAME_BYTES, _STRING_BYTES = 2**16, 2**14, 64, 4096, 2**24
_INDEX_MEMBERS, _INDEX_FILES = 3 * 2**18, 4096
_TOKENS = re.compile(rb'\\.|["\[\]{}:]', re.DOTALL)
_CONTROL = re.compile("[\x00-\x1f\x7f]")

_Refuse = Callable[[str], NoReturn]


def quoted(name: str) -> str:
    """A name from a file, quoted for a message of one line."""
    shown = "".join(c if " " <= c <= "~" and c != "`" else f"\\u{ord(c):04x}" for c in name[:80])
    return f"`{shown}{'…' if len(name) > 80 else ''}`"


def _file(path: str) -> _Refuse:
    def refuse(why: str) -> NoReturn:
        raise FileError(f"{path} is not a valid safetensors file", why,
                        "Check that it was copied whole, or write it again with the safetensors library.")  # fmt: skip

    return refuse


def _index(path: str) -> _Refuse:
    def refuse(why: str) -> NoReturn:
        raise FileError(f"{path} is not a valid safetensors index", why,
                        "Give the model's *.index.json, or one of its files.")

    return refuse


def _open(path: str) -> int:
    """A descriptor of a regular file. Opening a pipe or a device must not wait for its other side."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise FileError(f"can't open {path}", getattr(error, "strerror", None) or str(error),
                        "Check the path and its permissions.") from error  # fmt: skip
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FileError(f"can't read {path}", "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file",
                        "Give a safetensors file.")  # fmt: skip
    return descriptor


def _map(path: str) -> mmap.mmap | bytes:
    """The bytes of a file."""
    descriptor = _open(path)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if os.fstat(descriptor).st_size else b""
    except (OSError, ValueError) as error:
        raise FileError(f"can't read {path}", getattr(error, "strerror", None) or str(error),
                        "Check the disk, or copy the file to another.") from error
    finally:
        os.close(descriptor)


def _scan(text: bytes, depth: int, most: int, refuse: _Refuse) -> None:
    """Checks the limits of nesting and size, before a parser allocates memory for the contents."""
    level = count = 0
    begin = None  # of the string that a token lies in
    for token in _TOKENS.finditer(text):
        what = token[0]
        if begin is not None:
            if token.start() - begin > _STRING_BYTES:
                refuse(f"its JSON holds a string of more than {_STRING_BYTES} bytes")
            begin = None if what == b'"' else begin
        elif what == b'"':
            begin, count = token.start(), count + 1
        elif what in (b"[", b"{"):
            level, count = level + 1, count + (what == b"[")
            if level > depth:
                refuse(f"its JSON is nested deeper than {depth} levels")
        elif what in (b"]", b"}"):
            level -= 1
        else:
            count += 1
        if count > most:
            refuse(f"its JSON has more than {most} members, lists and strings")


def _parse(text: bytes, depth: int, most: int, refuse: _Refuse) -> dict:
    """A JSON object in UTF-8. Integers consist only of digits, as in the format. All other numbers are floats."""
    _scan(text, depth, most, refuse)

    def once(pairs: list) -> dict:
        said: dict = {}
        for name, value in pairs:
            if name in said:
                refuse(f"it names {quoted(name)} twice")
            for word in (name, value):
                if isinstance(word, str):
                    word.encode()  # raises for a lone \ud800
            said[name] = value
        return said

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    def whole(digits: str) -> int | float:
        return float(digits) if digits[0] == "-" or len(digits) > 19 else int(digits)

    try:
        said = json.loads(text.decode(), object_pairs_hook=once, parse_constant=constant, parse_int=whole)
    except ValueError as error:
        refuse(f"it isn't JSON in UTF-8: {error}")
    if not isinstance(said, dict):
        refuse("its JSON is not an object")
    return said


class _Tensor(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    begin: int  # bytes of the data
    end: int


def _numbers(said, refuse: _Refuse, what: str) -> tuple[int, ...]:
    if not isinstance(said, list) or any(type(number) is not int or number >= 2**63 for number in said):
        refuse(f"{what} is not a list of whole numbers below 2^63")
    return tuple(said)


def _tensor(name: str, said, data_bytes: int, refuse: _Refuse) -> _Tensor:
    subject = f"tensor {quoted(name)}"
    if len(name.encode()) > _NAME_BYTES:
        refuse(f"a tensor's name has more than {_NAME_BYTES} bytes")
    if _CONTROL.search(name):
        refuse(f"{subject} has a control character in its name")
    if name.startswith("/") or ".." in name.split("/"):
        refuse(f"{subject} has a name like a path that leaves its folder")
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        refuse(f"{subject} is not an object of exactly dtype, shape and data_offsets")
    kind, shape = said["dtype"], _numbers(said["shape"], refuse, f"the shape of {subject}")
    offsets = _numbers(said["data_offsets"], refuse, f"the data_offsets of {subject}")
    if not isinstance(kind, str) or kind not in _BITS:
        refuse(f"{subject} has the unknown dtype {quoted(str(kind))}")
    if len(shape) > _AXES:
        refuse(f"{subject} has more than {_AXES} dimensions")
    if len(offsets) != 2:
        refuse(f"{subject} has {len(offsets)} data_offsets instead of 2")
    subject += f" of {kind} {list(shape)}"
    bits = _BITS[kind]
    for dim in shape:
        bits *= dim or 1
        if bits >= 2**63:
            refuse(f"{subject} is larger than 2^63 bits")
    bits = 0 if 0 in shape else bits
    begin, end = offsets
    if bits % 8:
        refuse(f"{subject} doesn't fill whole bytes")
    if begin > end:
        refuse(f"{subject} ends at byte {end}, before it begins at {begin}")
    if end > data_bytes:
        refuse(f"{subject} ends at byte {end} of {data_bytes} bytes of data")
    if 8 * (end - begin) != bits:
        refuse(f"{subject} needs {bits // 8} bytes and has {end - begin}")
    return _Tensor(kind, shape, begin, end)


def _check_tiling(tensors: dict[str, _Tensor], data_bytes: int, refuse: _Refuse) -> None:
    """Each byte belongs to one tensor."""
    covered = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin != covered:
            where = "inside another tensor that ends at" if tensor.begin < covered else "after a gap that starts at"
            refuse(f"tensor {quoted(name)} begins at byte {tensor.begin}, {where} {covered}")
        covered = tensor.end
    if covered != data_bytes:
        refuse(f"its tensors end at byte {covered} of {data_bytes} bytes of data")


class _Shard:
    """A file and its tensor headers, by name."""

    def __init__(self, path: str):
        self.path, self.bytes = path, _map(path)
        refuse, size = _file(path), len(self.bytes)
        if size < 8:
            refuse(f"it has {size} bytes, fewer than its length field" if size else "it is empty")
        length = int.from_bytes(self.bytes[:8], "little")
        if length > min(size - 8, _HEADER_BYTES):
            most = f", more than {_HEADER_BYTES}" if length > _HEADER_BYTES else f", and has {size} in all"
            refuse(f"it claims a header of {length} bytes{most}")
        self.begin = 8 + length
        said = _parse(self.bytes[8 : self.begin], 4, 11 * _TENSORS + 3 * _METADATA + 2, refuse)
        metadata = said.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # as the reference library, which takes null
        self.metadata = metadata
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            refuse("its __metadata__ is not an object of strings")
        if len(metadata) > _METADATA or any(len(key.encode()) > _NAME_BYTES for key in metadata):
            refuse(f"its __metadata__ has more than {_METADATA} entries, or a key of more than {_NAME_BYTES} bytes")
        if len(said) > _TENSORS:
            refuse(f"it has more than {_TENSORS} tensors")
        self.tensors = {name: _tensor(name, one, size - self.begin, refuse) for name, one in said.items()}
        _check_tiling(self.tensors, size - self.begin, refuse)

    def array(self, name: str, tensor: _Tensor, dtype: np.dtype) -> np.ndarray:
        try:
            flat = np.frombuffer(self.bytes, np.uint8, tensor.end - tensor.begin, self.begin + tensor.begin)
            return flat.view(dtype).reshape(tensor.shape) if flat.size else np.empty(tensor.shape, dtype)
        except ValueError as error:  # NumPy has fewer axes than the format
            unsupported(f"{quoted(name)} of {self.path} has {len(tensor.shape)} axes", f"NumPy says: {error}",
                        "Reshape it.")


def _files_of(path: str) -> dict[str, str]:
    """The file of each tensor, from an index."""
    refuse, text = _index(path), _map(path)
    if len(text) > _HEADER_BYTES:
        refuse(f"it has {len(text)} bytes, more than {_HEADER_BYTES}")
    said = _parse(bytes(text), 16, _INDEX_MEMBERS, refuse).get("weight_map")
    if not isinstance(said, dict):
        refuse("it has no weight_map, an object of names")
    for name, file in said.items():
        if not isinstance(file, str):
            refuse(f"the file of tensor {quoted(name)} is not a name")
        if _CONTROL.search(file) or {"", ".", ".."} & set(file.split("/")):
            refuse(f"tensor {quoted(name)} is in {quoted(file)}, which is not a file inside the index's folder")
    files = {file: os.path.join(os.path.dirname(path), file) for file in said.values()}
    if len(files) > _INDEX_FILES:
        refuse(f"its tensors lie in more than {_INDEX_FILES} files")
    return {name: files[file] for name, file in said.items()}


class Tensors:
    """Arrays of a file by name. A malformed file raises FileError, whichever tensor is read. The files of an index are opened
    when one of their tensors is read; files that are not needed may be missing."""

    def __init__(self, path: str):
        self.path = path
        self._shards: dict[str, _Shard] = {}
        self.metadata: dict[str, str] = {}  # of a single file
        if path.endswith(".index.json"):
            self._files = _files_of(self.path)
        else:
            self._files = dict.fromkeys(self._shard(self.path).tensors, self.path)
            self.metadata = self._shard(self.path).metadata

    def _shard(self, path: str) -> _Shard:
        if path not in self._shards:
            self._shards[path] = _Shard(path)
        return self._shards[path]

    def names(self) -> list[str]:
        return sorted(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def kind(self, name: str) -> str:
        """The element type in the format's words, such as "BF16"."""
        return self._find(name)[1].kind

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._find(name)[1].shape)

    def tensor(self, name: str):
        """A copy as a torch tensor, of any type that PyTorch shares with the format."""
        import torch  # noqa: PLC0415, only where torch is used

        shard, tensor = self._find(name)
        dtype = getattr(torch, TORCH_DTYPES[tensor.kind])
        raw = shard.bytes[shard.begin + tensor.begin : shard.begin + tensor.end]
        flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(tensor.shape)

    def _find(self, name: str) -> tuple[_Shard, _Tensor]:
        """The file that has a tensor, and the tensor in it."""
        if name not in self._files:
            names = sorted(self._files)
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            holds = f"it holds {', '.join(map(quoted, names[:8]))}{more}" if names else "it holds no tensors"
            raise FileError(f"{self.path} has no tensor {quoted(name)}", holds, "Check the file, or the name.")
        shard = self._shard(self._files[name])
        tensor = shard.tensors.get(name)
        if tensor is None:
            raise FileError(f"{shard.path} has no tensor {quoted(name)}", f"{self.path} says it does",
                            "Check that the model was copied whole.")  # fmt: skip
        return shard, tensor

    def read(self, name: str, kinds: tuple[str, ...]) -> np.ndarray:
        """A tensor that is one of these types, of BF16, F16, F32, I32 and I64."""
        shard, tensor = self._find(name)
        if tensor.kind not in kinds:
            raise FileError(f"{quoted(name)} of {shard.path} has dtype {tensor.kind}",
                            f"it must be {' or '.join(kinds)}",
                            "Convert it.")  # fmt: skip
        return shard.array(name, tensor, _dtype(shard.path, name, tensor.kind))


def _dtype(path: str, name: str, kind: str) -> np.dtype:
    if kind in _NUMPY:
        return np.dtype(_NUMPY[kind])
    try:
        import ml_dtypes  # noqa: PLC0415, only where there are such tensors
    except ImportError:
        unsupported(f"{quoted(name)} of {path} is BF16", "NumPy lacks that type",
                    "Install ml_dtypes, as ringattn[bf16] does.")
    return np.dtype(ml_dtypes.bfloat16)
