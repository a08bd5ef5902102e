# SPDX-License-Identifier: Apache-2.0
"""ringattn.h in ctypes, and the library behind it. Structs have the header's names and members."""

import ctypes
import os
import pathlib
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p

from . import _errors

ABI = 1


class DLTensor(Structure):
    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
                ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16), ("shape", c_void_p), ("strides", c_void_p),
                ("byte_offset", c_uint64)]  # fmt: skip


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


Tensor = c_void_p  # the address of a DLTensor, which the caller of a function keeps


class Sized(Structure):
    """A struct that begins with its size."""

    def __init__(self, **members):
        super().__init__(ctypes.sizeof(self), **members)


class world_options(Sized):
    _fields_ = [("size", c_uint64), ("abi", c_int64), ("device_type", c_int32), ("device_id", c_int32)]


class spec(Sized):
    _fields_ = [("size", c_uint64), ("dtype", DLDataType), ("heads", c_int32), ("kv_heads", c_int32),
                ("head_dim", c_int32), ("head_dim_v", c_int32), ("mask", c_int32), ("sinks", c_int32),
                ("window_left", c_int64), ("window_right", c_int64), ("softmax_scale", c_float), ("softcap", c_float)]  # fmt: skip


class batch(Sized):
    _fields_ = [("size", c_uint64), ("sequences", c_int64), ("q_lengths", POINTER(c_int64)),
                ("k_lengths", POINTER(c_int64)), ("q_offsets", POINTER(c_int64))]  # fmt: skip


class run(Structure):
    _fields_ = [("rank", c_int32), ("sequence", c_int32), ("begin", c_int64), ("end", c_int64)]


class options(Sized):
    _fields_ = [("size", c_uint64), ("kernel", c_char_p), ("threads", c_int32), ("layout", c_int32), ("stripe", c_int64),
                ("query_run_count", c_int64), ("query_runs", POINTER(run)), ("key_run_count", c_int64),
                ("key_runs", POINTER(run)), ("block_tokens", c_int64), ("memory_budget", c_uint64),
                ("timeout_seconds", c_double)]  # fmt: skip


class attention_facts(Sized):
    _fields_ = [("size", c_uint64), ("q_rows", c_int64), ("k_rows", c_int64), ("workspace_bytes", c_uint64),
                ("kernel", c_char_p)]  # fmt: skip


class attention_tensors(Sized):
    _fields_ = [("size", c_uint64), ("q", Tensor), ("k", Tensor), ("v", Tensor), ("sinks", Tensor), ("out", Tensor),
                ("lse", Tensor), ("workspace", Tensor), ("stream", c_void_p)]  # fmt: skip


CAUSAL, FULL, WINDOW = 0, 1, 2
STRIPED, RUNS = 0, 3
CPU, CUDA = 1, 2

Handle = c_void_p
_Status = c_int32
# What each function takes; those that return a status raise when it is not 0.
_CHECKED = {
    "world_self": [POINTER(world_options), POINTER(Handle)],
    "world_threads": [POINTER(world_options), c_int32, POINTER(Handle)],
    "world_mpi": [POINTER(world_options), c_void_p, POINTER(Handle)],
    "attention_create": [Handle, POINTER(spec), POINTER(batch), POINTER(options), POINTER(Handle)],
    "attention_get_facts": [Handle, POINTER(attention_facts)],
    "attention_rows": [Handle, c_int32, c_int64, POINTER(c_int64), POINTER(c_int64)],
    "attention_run": [Handle, POINTER(attention_tensors)],
    "attention_enqueue": [Handle, POINTER(attention_tensors)],
    "attention_wait": [Handle],
}
_PLAIN = {
    "abi": (c_int32, []),
    "version": (c_char_p, []),
    "error_text": (c_char_p, []),
    "error_problem": (c_char_p, []),
    "error_why": (c_char_p, []),
    "error_remedy": (c_char_p, []),
    "world_rank": (c_int32, [Handle]),
    "world_size": (c_int32, [Handle]),
    "world_abort": (None, [Handle, _Status, c_char_p]),
    "world_destroy": (None, [Handle]),
    "attention_destroy": (None, [Handle]),
}


class _Library:
    """The functions of libringattn_c, without their prefix."""

    def __init__(self, path: str):
        self.path = path
        loaded = ctypes.CDLL(path)
        for name, (result, arguments) in _PLAIN.items():
            function = getattr(loaded, f"ringattn_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for name, arguments in _CHECKED.items():
            function = getattr(loaded, f"ringattn_{name}")
            function.restype, function.argtypes, function.errcheck = _Status, arguments, self._check
            setattr(self, name, function)

    def _check(self, status, function, arguments):
        if status == 0:
            return
        words = [part().decode() for part in (self.error_problem, self.error_why, self.error_remedy, self.error_text)]
        raise _errors.BY_STATUS.get(status, _errors.Error)(*words)


def _load() -> _Library:
    """RINGATTN_LIBRARY where it is set, else the library beside this file, else the system's."""
    named = os.environ.get("RINGATTN_LIBRARY")
    beside = pathlib.Path(__file__).with_name("libringattn_c.so")
    path = named or (str(beside) if beside.exists() else "libringattn_c.so.1")
    try:
        library = _Library(path)
    except (OSError, AttributeError) as error:
        remedy = "Install the package again, or name the library by RINGATTN_LIBRARY."
        raise ImportError(f"{path} can't be used ({error}). {remedy}") from error
    if library.abi() < ABI:
        raise ImportError(f"{path} is too old (it serves interface {library.abi()}, this package needs {ABI}). "
                          "Install the package and the library of one version.")  # fmt: skip
    return library


lib = _load()
