# SPDX-License-Identifier: Apache-2.0
"""The functions of libringattn_c. Functions that return a status raise an Error unless it is RINGATTN_OK."""

import collections
import ctypes
import functools
import importlib.util
import os
import pathlib
import threading
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p

from . import _errors, _structs

ABI = 6

CAUSAL, FULL, WINDOW = 0, 1, 2
STRIPED, RUNS = 0, 3
STREAM, TABLE = 0, 1
GRADIENTS_AS_INPUTS = 0
FORMS = {None: 0, "expanded": 1, "absorbed": 2}
CPU, CUDA = 1, 2

Handle = c_void_p
_Status = c_int32
_longs, _ints, _handle = _structs.longs, _structs.integers, POINTER(Handle)
Poll = ctypes.CFUNCTYPE(c_int32, c_void_p)


def _struct(name: str):
    return POINTER(getattr(_structs, name))


_options = _struct("options")
# Argument types of the functions that return a status.
_CHECKED = {
    "world_self": [_struct("world_options"), _handle],
    "world_threads": [_struct("world_options"), c_int32, _handle],
    "world_callbacks": [_struct("world_options"), c_int32, c_int32, _struct("callbacks"), c_double, _handle],
    "world_store": [_struct("world_options"), c_char_p, c_int32, c_int32, c_char_p, c_double, _handle],
    "world_mpi": [_struct("world_options"), c_void_p, _handle],
    "attention_create": [Handle, _struct("spec"), _struct("batch"), _options, _handle],
    "attention_rows": [Handle, c_int32, c_int64, _longs, _longs],
    "attention_backward_create": [Handle, _struct("spec"), _struct("batch"), c_int32, _options, _handle],
    "attention_backward_create_from": [Handle, c_int32, _handle],
    "attention_backward_rows": [Handle, c_int32, c_int64, _longs, _longs],
    "decode_create": [Handle, _struct("spec"), _struct("decode_limits"), _options, _handle],
    "decode_create_with_rope": [Handle, _struct("spec"), _struct("rope_spec"), _struct("decode_limits"), _options, _handle],
    "decode_owned": [Handle, c_int64, _longs, _longs],
    "mla_create": [Handle, _struct("mla_spec"), _struct("batch"), c_int32, _options, _handle],
    "mla_rows": [Handle, c_int32, c_int64, _longs, _longs],
    "mla_backward_create": [Handle, _struct("mla_spec"), _struct("batch"), _options, _handle],
    "mla_backward_create_from": [Handle, _handle],
    "mla_backward_rows": [Handle, c_int32, c_int64, _longs, _longs],
    "mla_decode_create": [Handle, _struct("mla_spec"), _struct("decode_limits"), _options, _handle],
    "mla_decode_owned": [Handle, c_int64, _longs, _longs],
    "batched_gemm_create": [Handle, _struct("batched_gemm_spec"), _options, _handle],
    "linear_create": [Handle, _struct("linear_spec"), _options, _handle],
    "linear_tokens": [Handle, c_int64, _longs, _longs],
    "linear_backward_create": [Handle, _struct("linear_spec"), _options, _handle],
    "linear_backward_order": [Handle, _longs, _longs, _longs],
    "gradient_reduction_create": [Handle, c_int64, c_char_p, _options, _handle],
    "gradient_reduction_reset": [Handle],
    "gradient_reduction_add": [Handle, c_void_p, c_void_p],
    "linear_load": [Handle, _struct("linear_weights")],
    "rope_create": [Handle, _struct("rope_spec"), _options, _handle],
    "rope_frequencies": [Handle, c_int64, POINTER(c_double), POINTER(c_double)],
    "linear_attention_create": [Handle, _struct("linear_attention_spec"), _struct("ssm_batch"), _options, _handle],
    "linear_attention_rows": [Handle, c_int64, _longs, _longs],
    "linear_attention_sequences": [Handle, _ints, _ints],
    "ssm_create": [Handle, _struct("ssm_spec"), _struct("ssm_batch"), _options, _handle],
    "ssm_rows": [Handle, c_int64, _longs, _longs],
    "ssm_sequences": [Handle, _ints, _ints],
    "gated_delta_create": [Handle, _struct("gated_delta_spec"), _struct("ssm_batch"), _options, _handle],
    "reshard_create": [Handle, _struct("reshard_spec"), _options, _handle],
    "ssd_backward_create": [Handle, _struct("ssm_spec"), _struct("ssm_batch"), c_int32, _options, _handle],
    "ssd_backward_rows": [Handle, c_int64, _longs, _longs],
    "causal_conv1d_create": [Handle, _struct("causal_conv1d_spec"), _struct("ssm_batch"), _options, _handle],
    "causal_conv1d_backward_create": [Handle, _struct("causal_conv1d_spec"), _struct("ssm_batch"), _options, _handle],
    "set_simd_target": [c_char_p],
    "eviction_kept": [_struct("eviction"), _struct("spec"), _struct("batch"), _longs, _longs],
    "evict": [_struct("eviction"), _struct("spec"), _struct("batch"), _struct("eviction_tensors")],
    "compression_create": [Handle, _struct("compression_spec"), _options, _handle],
    "compression_get_facts": [Handle, _struct("compression_facts")],
    "compression_get_part": [Handle, c_int32, c_int32, _struct("part")],
    "compression_compress": [Handle, _struct("compression_tensors"), POINTER(c_double)],
    "compression_decompress": [Handle, _struct("compression_tensors")],
    "layer_open": [c_char_p, c_char_p, c_char_p, _handle],
    "layer_get_facts": [Handle, _struct("layer_facts")],
    "layer_read": [Handle, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p],
    "choose_formats": [c_char_p, c_double, _struct("spec"), _struct("formats")],
}
# Result and argument types of the other functions.
_PLAIN = {
    "abi": (c_int32, []),
    "version": (c_char_p, []),
    "error_text": (c_char_p, []),
    "error_problem": (c_char_p, []),
    "error_why": (c_char_p, []),
    "error_suggestion": (c_char_p, []),
    "tensor_names": (c_char_p, []),
    "environment": (c_char_p, []),
    "simd_target": (c_char_p, []),
    "set_interrupt": (None, [Poll, c_void_p]),
    "world_rank": (c_int32, [Handle]),
    "world_size": (c_int32, [Handle]),
    "world_abort": (None, [Handle, _Status, c_char_p]),
    "world_destroy": (None, [Handle]),
    "gathered_add": (None, [c_void_p, c_char_p, c_uint64]),
    "decode_cache_tokens": (c_int64, [Handle, c_int64]),
    "mla_decode_cache_tokens": (c_int64, [Handle, c_int64]),
    "compression_destroy": (None, [Handle]),
    "layer_destroy": (None, [Handle]),
}
# Ops with a facts struct of their own name, and ops that use another op's.
FACTS = {"attention": "attention", "attention_backward": "attention", "decode": "decode", "mla": "mla", "mla_backward": "mla",
         "mla_decode": "decode", "batched_gemm": "batched_gemm", "linear": "linear", "linear_backward": "linear",
         "gradient_reduction": "gradient_reduction",
         "rope": "rope", "ssm": "ssm", "ssd_backward": "ssm", "causal_conv1d": "ssm",
         "causal_conv1d_backward": "ssm", "gated_delta": "ssm", "linear_attention": "ssm",
         "reshard": "reshard"}  # fmt: skip
for _op, _facts in FACTS.items():
    _CHECKED[f"{_op}_get_facts"] = [Handle, _struct(f"{_facts}_facts")]
    _CHECKED[f"{_op}_run"] = _CHECKED[f"{_op}_enqueue"] = [Handle, _struct(f"{_op}_tensors")]
    _CHECKED[f"{_op}_wait"] = [Handle]
    _PLAIN[f"{_op}_destroy"] = (None, [Handle])


class _Library:
    """The functions of libringattn_c, without their prefix."""

    def __init__(self, path: str, loaded: ctypes.CDLL):
        self.path = path
        for name, (result, arguments) in _PLAIN.items():
            function = getattr(loaded, f"ringattn_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        for name, arguments in _CHECKED.items():
            function = getattr(loaded, f"ringattn_{name}")
            function.restype, function.argtypes, function.errcheck = _Status, arguments, self._check
            setattr(self, name, function)

    def _check(self, status, function, arguments):
        if status == 0 and not interrupts.raised:
            return
        interrupts.raise_own()
        if status == 0:
            return
        parts = (self.error_problem, self.error_why, self.error_suggestion, self.error_text)
        op = function.__name__.removeprefix("ringattn_").rpartition("_")[0]
        raise _errors.BY_STATUS.get(status, _errors.Error)(*(_errors.in_python(part().decode(), op) for part in parts))


# Polls that may be in progress at once: a handler that runs during a poll may call the library, which polls again.
_MAX_POLLS = 32


class _Interrupts:
    """Lets Python's signals, such as Ctrl-C, end a call in progress. The library polls about every 0.1 seconds, and Python then
    runs its signal handlers. An exception of a handler ends the call and is raised to the caller.

    raised: what the handlers raised during each call in progress, by nesting depth (handlers may make calls themselves)."""

    def __init__(self):
        self.raised: dict[int, list[BaseException]] = {}
        self._idle: collections.deque = collections.deque()
        self._poll = None

    def watch(self) -> None:
        """Watches calls of the main thread, the only thread on which Python runs signal handlers."""
        if self._poll is None and threading.current_thread() is threading.main_thread():
            self._idle.extend(self._asked() for _ in range(_MAX_POLLS))
            for asked in self._idle:
                asked.send(None)
                asked.send(asked)
            polls = map(next, iter(self._idle.popleft, None))
            self._poll = Poll(functools.partial(next, polls))  # context is NULL, which is None
            lib.set_interrupt(self._poll, None)

    def _depth(self) -> int:
        return _MAX_POLLS - len(self._idle)

    def _asked(self):
        """Python runs handlers when a function begins, before the function can enter a `try`. A suspended generator is already in
        one. A generator can't be resumed twice at once, so each poll takes an idle one, and everything up to there is C."""
        own = yield
        answer, ended = 0, False
        while not ended:
            try:
                yield answer
                answer = 0
                self._idle.append(own)
            except BaseException as error:  # noqa: BLE001, raised again by the call that it ends
                if own not in self._idle:  # else it was raised right after the append()
                    self._idle.append(own)
                # What a handler raises has the handler's frame; without one this generator is being closed.
                ended = isinstance(error, GeneratorExit) and error.__traceback__.tb_next is None
                if not ended:
                    self.raised.setdefault(self._depth(), []).append(error)
                    answer = 1

    def raise_own(self) -> None:
        """Raises what handlers raised during the call that has just returned to the main thread. Of several exceptions it raises
        the last one, with the earlier ones as its context."""
        if threading.current_thread() is not threading.main_thread():
            return
        errors = self.raised.pop(self._depth(), None)
        if errors is None:
            return
        for before, error in zip(errors, errors[1:]):
            last, seen = error, {id(before)}
            while last.__context__ is not None and id(last) not in seen:
                seen.add(id(last))
                last = last.__context__
            if id(last) not in seen:
                last.__context__ = before
        raise errors[-1]


def _nccl() -> ctypes.CDLL | None:
    """The NCCL library of PyTorch's packages, if it is installed."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        return None
    for folder in package.submodule_search_locations if package else ():
        library = pathlib.Path(folder, "lib", "libnccl.so.2")
        if library.exists():
            return ctypes.CDLL(str(library))
    return None


def _open(path: str) -> ctypes.CDLL:
    """Loads the library, and before it PyTorch's NCCL, which the library then uses. A process has only one library of that
    name, and torch can't be imported after an NCCL that is older than its own."""
    _nccl()
    return ctypes.CDLL(path)


def _load() -> _Library:
    """Loads RINGATTN_LIBRARY if it is set, else the library beside this file, else the system's."""
    suggestion = "Install the package again, or name the library by RINGATTN_LIBRARY."
    named = os.environ.get("RINGATTN_LIBRARY")
    beside = pathlib.Path(__file__).with_name("libringattn_c.so")
    path = named or (str(beside) if beside.exists() else "libringattn_c.so.1")
    try:
        loaded = _open(path)
        serves = loaded.ringattn_abi()  # before all others, of which an older library lacks some
        if serves < ABI:
            raise ImportError(f"{path} is too old (it serves interface {serves}, this package needs {ABI}). "
                              "Install the package and the library of one version.")  # fmt: skip
        return _Library(path, loaded)
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} can't be used ({error}). {suggestion}") from error


lib = _load()
interrupts = _Interrupts()
interrupts.watch()
