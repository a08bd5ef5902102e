# SPDX-License-Identifier: Apache-2.0
"""Arguments other than arrays. Values of the wrong type are refused by name."""

import ctypes
import inspect
import math
import operator
from typing import NoReturn

from ._errors import refuse, unsupported
from ._loaded_torch import loaded_torch
from ._tensors import is_torch, type_name


# Larger values are not valid numbers of tokens, and ctypes would truncate them.
_FARTHEST = 2**62


def shown(value) -> str:
    """A value in a message, on one line."""
    try:
        return " ".join(str(value).split())[:60]
    except Exception:  # noqa: BLE001, as of an integer of more digits than Python writes
        return f"<{type(value).__name__}>"


def _near(number: int, name: str) -> int:
    if not -_FARTHEST <= number <= _FARTHEST:
        refuse(f"{name} has {shown(number)}", "numbers of tokens lie between -2^62 and 2^62", "Check it.")
    return number


def as_int(value, name: str) -> int:
    if isinstance(value, bool):
        refuse(f"{name} is {value}", "it should be a whole number", "Pass one.")
    try:
        return _near(operator.index(value), name)
    except TypeError:
        refuse(f"{name} is {shown(value)}", "it should be a whole number", "Convert it.")


_WHOLE = frozenset(("threads", "memory_budget", "max_keys", "q_offset", "in_features", "out_features", "column_unit"))


def check_whole(settings: dict) -> None:
    """Refuses 2.0 for 2 before a known call is looked up. They are equal, so a call with 2.0 would find the call with 2."""
    for name in settings.keys() & _WHOLE:
        if settings[name] is not None:
            as_int(settings[name], name)
    mask = settings.get("mask")
    if type(mask) is tuple:
        check_settings((mask,))
        for side in mask:
            as_int(side, "a side of mask")


def as_int32(value, name: str) -> int:
    """An int32 argument of a library function. ctypes would truncate larger values."""
    number = as_int(value, name)
    if not -(2**31) <= number < 2**31:
        refuse(f"{name} is {number}", "the library counts them in 32 bits", "Check it.")
    return number


_MAX_THREADS = 4096  # kMaxThreads of src/base/threads.hpp


def as_threads(value) -> int:
    """Checks a number of threads that later calls use. The library checks the numbers that are passed to it."""
    threads = as_int(value, "threads")
    if not 0 <= threads <= _MAX_THREADS:
        refuse(f"{threads} threads are not possible", f"1 to {_MAX_THREADS} are allowed, and 0 means one per processor",
               "Choose such a number for threads.")  # fmt: skip
    return threads


def as_text(value, name: str) -> bytes:
    """Text as bytes for the library."""
    if not isinstance(value, str):
        refuse(f"{name} is {shown(value)}", "it is a word", "Pass a string.")
    text = value.encode(errors="replace")
    if b"\0" in text or text.decode() != value:  # the library would stop at a NUL
        refuse(f"{name} is {value[:60]!r}", "it has a NUL, or what no UTF-8 has", "Leave that out.")
    return text


def check_settings(settings) -> None:
    """Refuses settings that can't be compared with those of other calls, such as a list."""
    for given in settings:
        try:
            hash(given)
        except TypeError:
            refuse(f"an argument is {str(given)[:60]}", "settings are numbers, names and tuples of these",
                   "Pass a tuple in place of a list.")  # fmt: skip


def as_number(value, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        refuse(f"{name} is {shown(value)}", "it should be a number", "Convert it.")
    except OverflowError:
        refuse(f"{name} is {shown(value)}", "it should be a number that fp64 has", "Check it.")


def as_ints(values, name: str = "a list of lengths") -> list[int]:
    """A list of ints from a list, an array or a tensor. For a GPU tensor this waits for the device."""
    if is_torch(values) and (values.is_sparse or values.layout is not loaded_torch().strided or values.is_meta):
        refuse(f"{name} is of layout {values.layout} on {values.device}", "its numbers can't be read",
               "Pass a list, or a dense tensor of integers.")  # fmt: skip
    try:
        return [_near(operator.index(value), name) for value in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError:
        refuse(f"{name} is {shown(values)}", "it should be a flat list of whole numbers",
               "Pass a list, or an array of integers with one axis.")  # fmt: skip


def is_true(name: str, value) -> bool:
    """Reads a bool. Text and tensors are refused, because Python would treat them as true."""
    if type(value).__name__ not in ("bool", "bool_"):  # Python's, and NumPy's
        refuse(f"{name} is {repr(value)[:60]}", "it is True or False", "Pass one of them.")
    return bool(value)


def lengths_of(cu_seqlens, name: str = "cu_seqlens") -> tuple[int, ...]:
    """Lengths of sequences from cumulative lengths."""
    at = as_ints(cu_seqlens, name)
    if not at or at[0] != 0 or any(b < a for a, b in zip(at, at[1:])):
        refuse(f"{name} is {at[:8]}", "it begins with 0 and ascends, and its last number is all tokens", "Check it.")
    return tuple(b - a for a, b in zip(at, at[1:]))


def check_axes(name: str, array, axes: tuple[int, ...], form: str) -> None:
    """Checks the number of axes. None is skipped."""
    if array is not None and array.ndim not in axes:
        refuse(f"{name} has {array.ndim} axes", f"it is {form}", "Reshape it.")


def check_leading(like: str, wanted: tuple[int, ...], arrays: dict, last: int, advice: str) -> None:
    """Compares all axes except the `last` ones. They are merged to one axis of rows, so different axes with the same
    product would pair unrelated rows. like: name of the array with the wanted axes. None is skipped."""
    for name, array in arrays.items():
        if array is not None and tuple(array.shape[: max(array.ndim - last, 0)]) != tuple(wanted):
            refuse(f"{name} is {type_name(array.dtype)} {list(array.shape)}",
                   f"{like} is [{', '.join(map(str, (*wanted, '…')))}]", advice)  # fmt: skip


def as_fp32(value, name: str) -> float:
    """A value that the library holds as fp32. A value that would become 0, which is another setting, or infinite, is
    refused."""
    number = as_number(value, name)
    nearest = ctypes.c_float(number).value
    if nearest == number or not math.isfinite(number) or (nearest != 0 and math.isfinite(nearest)):
        return nearest
    refuse(f"{name} is {number}", f"it is fp32, in which the nearest number is {nearest:g}", "Pass one that fp32 has.")


def check_dropout(dropout_p) -> None:
    if dropout_p is not None and as_number(dropout_p, "dropout_p") != 0:
        unsupported(f"dropout_p is {dropout_p}", "ringattn has no dropout", "Pass 0, as in evaluation and in most training.")


def scale_members(softmax_scale: float | None) -> dict:
    """softmax_scale as members of the library's specs. None is the default. 0 is used as given: all keys get the same
    weight."""
    if softmax_scale is None:
        return {"softmax_scale": 0.0, "scale_given": 0}
    return {"softmax_scale": as_fp32(softmax_scale, "softmax_scale"), "scale_given": 1}


def seconds_of(timeout: float) -> float:
    """Seconds for the library, in which 0 means the default."""
    seconds = as_number(timeout, "timeout")
    if seconds == 0:
        refuse("timeout is 0", "no peer could answer in that time", "Pass seconds, or leave it out for 60.")
    return seconds


def refuse_unknown(op: str, given: dict) -> NoReturn:
    """Refuses keywords that the function doesn't have."""
    import ringattn  # noqa: PLC0415, which imports this

    from . import _spellings  # noqa: PLC0415, as above

    name, value = next(iter(given.items()))
    keywords = frozenset(inspect.signature(getattr(ringattn, op)).parameters)
    _spellings.refuse_keyword(op, name, value, keywords)
