# SPDX-License-Identifier: Apache-2.0
"""NumPy and PyTorch arrays as DLPack tensors. Code that depends on which of the two an array is belongs here."""

import ctypes
import functools
import math

import numpy as np

from . import _abi, _gradients, _structs
from ._errors import CallError, refuse, unsupported
from ._loaded_torch import loaded_torch
from ._ranges import ranged

# DLPack's type codes by the type names of NumPy, ml_dtypes and PyTorch.
_INT, _UINT, _FLOAT, _BFLOAT = 0, 1, 2, 4
_TYPES = {
    "float32": (_FLOAT, 32), "float16": (_FLOAT, 16), "bfloat16": (_BFLOAT, 16), "float64": (_FLOAT, 64),
    "int32": (_INT, 32), "int64": (_INT, 64), "uint8": (_UINT, 8), "int8": (_INT, 8), "float8_e4m3fn": (10, 8),
}  # fmt: skip
_by_dtype: dict = {}
_FLOAT8 = "Convert it, or store keys and values in 8 bits by ringattn.compress(k, v, \"fp8\")."


def _type_of(dtype):
    """(code, bits) of an array's dtype, cached by dtype."""
    known = _by_dtype.get(dtype)
    if known is None:
        name = str(dtype).removeprefix("torch.")
        if name not in _TYPES:
            refuse(f"an array holds {name}", "ringattn computes with float32, float16 and bfloat16",
                   _FLOAT8 if "float8" in name else "Convert it.")  # fmt: skip
        known = _by_dtype[dtype] = _TYPES[name]
    return known


def is_torch(array) -> bool:
    torch = loaded_torch()
    return torch is not None and isinstance(array, torch.Tensor)


# Arguments that calls always write.
_WRITTEN = ("out", "lse", "state", "conv_state")


def check_array(name: str, array, written: bool | None = None, differentiable: bool = False) -> None:
    """Refuses objects that are neither NumPy arrays nor PyTorch tensors, tensors that require gradients unless the call is
    `differentiable` in them, and, if the array is `written`, arrays that can't be written to. By default, `written` is true for
    names of arguments that calls always write."""
    if written is None:
        written = name in _WRITTEN
    if isinstance(array, np.ndarray):
        if isinstance(array, np.ma.MaskedArray):
            refuse(f"{name} is a masked array", "its mask would be lost", "Pass its data, or what its filled() makes.")
        if written and not array.flags.writeable:
            refuse(f"{name} is read-only", "this call writes to it", "Pass an array of your own.")
        return
    if not is_torch(array):
        refuse(f"{name} is {type(array).__name__}", "it should be a NumPy array or a PyTorch tensor",
               "Convert it, for instance with numpy.asarray().")  # fmt: skip
    if array.layout is not loaded_torch().strided:
        refuse(f"{name} is of layout {array.layout}", "it is not strided", "Make it dense.")
    # Dynamo can't trace is_neg(); the operator in the graph checks again.
    if not loaded_torch().compiler.is_compiling() and (array.is_neg() or array.is_conj()):
        kind, resolved = ("negated", "resolve_neg()") if array.is_neg() else ("conjugated", "resolve_conj()")
        refuse(f"{name} is a {kind} view", "its memory has other numbers than it has",
               "Pass a tensor of its own." if written else f"Pass its {resolved}.")  # fmt: skip
    if not differentiable and array.requires_grad and loaded_torch().is_grad_enabled():
        unsupported(f"{name} requires a gradient", _gradients.WITHOUT, _gradients.SUGGESTION)


def traced(function):
    """Under torch.compile the call becomes the operator of the same name, which graphs hold. A call with arguments that the
    function does not have in this form goes through _spellings."""
    return _wrapped(function, None, 0)


def traced_step(new_rows: str, place: int):
    """traced() for a decode step. If new rows are passed, lengths must be passed by name, because the name says whether they
    count these rows. `place`: index of lengths among the arguments."""
    return lambda function: _wrapped(function, new_rows, place)


# Types whose values equal a whole number of another type only if they are that number.
_ANY_SETTING = frozenset((int, str, bool, type(None), np.ndarray))


def _wrapped(function, new_rows: str | None, place: int):
    from ._arguments import check_whole  # noqa: PLC0415, which needs this
    from ._spellings import call_spelled, signature_of  # noqa: PLC0415, as above

    positional, required, keywords = signature_of(function)
    most, op = len(positional), function.__name__
    function = ranged(function, op)

    @functools.wraps(function)
    def call(*arguments, **named):
        if not required <= len(arguments) <= most or not keywords.issuperset(named):
            return call_spelled(call, op, positional, required, keywords, arguments, named)
        if new_rows is not None and len(arguments) > place and named.get(new_rows) is not None:
            _refuse_indexed(op, new_rows, arguments[place])
        torch = loaded_torch()
        if torch is not None and torch.compiler.is_compiling():
            first = arguments[0]
            if is_torch(first.parts[0] if hasattr(first, "parts") else first):
                from . import torch_ops  # noqa: PLC0415, needs torch

                return getattr(torch_ops, function.__name__)(*arguments, **named)
        if named and not _ANY_SETTING.issuperset(map(type, named.values())):
            check_whole(named)
        return function(*arguments, **named)

    return call


def _refuse_indexed(op: str, new_rows: str, lengths) -> None:
    if lengths is not None:
        raise CallError(f"lengths of {op} are passed by position, beside {new_rows}",
                        "lengths count the new rows of this step, and lengths_before don't",
                        "Pass lengths= or lengths_before=.")  # fmt: skip


def device_of(array, name: str = "a tensor") -> tuple[int, int]:
    """(device type, index) of DLPack. name: in the error."""
    if isinstance(array, np.ndarray) or array.device.type == "cpu":
        return _abi.CPU, 0
    if array.device.type == "cuda":
        return _abi.CUDA, array.device.index
    unsupported(
        f"{name} is on {array.device}", "ringattn computes on CPUs and NVIDIA GPUs", "Move it to one of these."
    )


def stream_of(array) -> int | None:
    """The caller's current stream on the array's device."""
    if isinstance(array, np.ndarray) or array.device.type != "cuda":
        return None
    torch = loaded_torch()
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without an object around it
    return raw(array.device.index) if raw else torch.cuda.current_stream(array.device).cuda_stream


def empty(like, shape, dtype=None):
    """An array of the same type and device as `like`, of its dtype or of a named one."""
    return maker(like, shape, dtype)()


def maker(like, shape, dtype=None):
    """A function that makes the arrays of empty()."""
    if isinstance(like, np.ndarray):
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: PLC0415, the arrays are of its types

            dtype = ml_dtypes.bfloat16
        return functools.partial(np.empty, shape, dtype or like.dtype)
    torch = loaded_torch()
    return functools.partial(
        torch.empty, shape, dtype=getattr(torch, dtype) if dtype else like.dtype, device=like.device
    )


def contiguous_heads(array):
    """The array, copied if the elements of a head are not contiguous."""
    if isinstance(array, np.ndarray):
        return array if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize else np.ascontiguousarray(array)
    return array if array.shape[-1] <= 1 or array.stride(-1) == 1 else array.contiguous()


def is_contiguous(array) -> bool:
    return array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()


def flat_rows(array):
    """[batch, tokens, heads, dim] as [batch · tokens, heads, dim], copied only if a view is impossible."""
    if hasattr(array, "flat_rows"):
        return array.flat_rows()
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def as_rows(array, axes: int = 2):
    """Merges all axes before the last `axes` ones into one axis. There may be no such axes."""
    return array.reshape(math.prod(array.shape[:-axes]), *array.shape[-axes:])


def flat_view(out):
    """flat_rows() of an array that is written to, so it must be a view. None stays None."""
    if out is None:
        return None
    flat = flat_rows(out)
    if flat.size if isinstance(flat, np.ndarray) else flat.numel():
        same = np.shares_memory(flat, out) if isinstance(out, np.ndarray) else flat.data_ptr() == out.data_ptr()
        if not same:
            refuse(f"out of shape {tuple(out.shape)} has batches that can't be rows of one axis",
                   "their strides don't follow from each other", "Pass a contiguous one.")  # fmt: skip
    return flat


def on_host(array) -> np.ndarray:
    """The array in host memory, as NumPy array; copied from other devices."""
    return array if isinstance(array, np.ndarray) else array.detach().cpu().numpy()


def address_of(array) -> int:
    """Address of the first element."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr()


def forms_of(arrays) -> tuple | None:
    """A hashable key that is equal for arrays that differ only in address. None for anything but plain arrays, tensors and
    parameters that require no gradient."""
    torch = loaded_torch()
    kinds = () if torch is None else (torch.Tensor, torch.nn.Parameter)
    _gradients.refuse_transforms(arrays)
    forms = []
    for array in arrays:
        if array is None:
            forms.append(None)
        elif type(array) in kinds:
            if (array.requires_grad and torch.is_grad_enabled()) or array.is_neg():
                return None
            try:
                forms.append((array.shape, array.stride(), array.dtype, array.device))
            except RuntimeError:  # without strides, as sparse tensors are
                return None
        elif type(array) is np.ndarray:
            forms.append((array.shape, array.strides, array.dtype, array.flags.writeable))
        else:
            return None
    return tuple(forms)


class View:
    """A DLTensor that is reused for arrays of one shape: after the first array only the address is written."""

    __slots__ = ("address", "struct", "_form", "lengths")

    def __init__(self):
        self.struct = _structs.DLTensor()
        self._form = self.lengths = None  # lengths: the shape, then the strides
        self.address: int = ctypes.addressof(self.struct)

    def show(self, array) -> None:
        """Makes this a view of the array, which the caller keeps alive."""
        if isinstance(array, np.ndarray):
            form = array.shape, array.strides, array.dtype
        else:
            form = array.shape, array.stride(), array.dtype, array.device
        if form != self._form:
            self._describe(array, form)
        self.struct.data = address_of(array)

    def _describe(self, array, form) -> None:
        shape, strides = form[:2]
        if isinstance(array, np.ndarray):
            if any(stride % array.itemsize for stride in strides):
                refuse(f"an array has strides of {strides} bytes", f"its numbers have {array.itemsize}", "Copy it.")
            strides = [stride // array.itemsize for stride in strides]
        self.lengths = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
        view = self.struct
        view.shape = ctypes.addressof(self.lengths)
        view.strides = view.shape + 8 * len(shape)
        view.ndim, view.lanes, view.byte_offset = len(shape), 1, 0
        view.code, view.bits = _type_of(array.dtype)
        view.device_type, view.device_id = device_of(array)
        self._form = form


class CompressedView:
    """A ringattn_compressed that is reused."""

    __slots__ = ("address", "_struct", "_views")

    def __init__(self):
        self._struct = _structs.compressed()
        self._views: list[View] = []
        self.address: int = ctypes.addressof(self._struct)

    def show(self, compressed) -> None:
        """Makes these views of the parts of the _compression.Compressed, which the caller keeps alive."""
        parts = compressed.parts
        if len(parts) != len(self._views):
            self._views = [View() for _ in parts]
            streams = len(compressed.streams)
            self._struct.streams[:] = [v.address for v in self._views[:streams]] + [None] * (4 - streams)
            self._struct.tables[:] = [v.address for v in self._views[streams:]] + [None] * (2 + streams - len(parts))
        for view, part in zip(self._views, parts):
            view.show(part)


def data_type(like) -> _structs.DLDataType:
    """DLPack's type of an array, or of a dtype or its name."""
    return _structs.DLDataType(*_type_of(getattr(like, "dtype", like)), 1)


def type_name(dtype) -> str:
    """The name of a type in NumPy and PyTorch, from a NumPy, PyTorch or DLPack type."""
    if isinstance(dtype, _structs.DLDataType):
        return next(name for name, known in _TYPES.items() if known == (dtype.code, dtype.bits))
    return str(dtype).removeprefix("torch.")


def kind_of(array):
    return np.ndarray if isinstance(array, np.ndarray) else loaded_torch().Tensor


def zeros(like, shape, dtype: str):
    filled = empty(like, shape, dtype)
    filled[...] = 0
    return filled


def moved(array, device):
    """A copy on another device."""
    if isinstance(array, np.ndarray):
        refuse("an array of NumPy can't be moved", "it lies in host memory", "Compress tensors of PyTorch.")
    return array.to(device)
