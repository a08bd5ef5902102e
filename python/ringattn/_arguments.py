# SPDX-License-Identifier: Apache-2.0
"""Arguments that are no arrays: what is nothing of the kind is refused by name, whatever Python would have said of it."""

import difflib
import inspect
import operator
from typing import NoReturn

from ._errors import refuse, unsupported


# Beyond it the library has no numbers of tokens, and ctypes would cut off some digits.
_FARTHEST = 2**62


def _near(number: int, name: str) -> int:
    if not -_FARTHEST <= number <= _FARTHEST:
        refuse(f"{name} has {number}", "numbers of tokens lie between -2^62 and 2^62", "Check it.")
    return number


def as_int(value, name: str) -> int:
    try:
        return _near(operator.index(value), name)
    except TypeError:
        refuse(f"{name} is {str(value)[:60]}", "it should be a whole number", "Convert it.")


def as_text(value, name: str) -> bytes:
    """As the library has it."""
    if not isinstance(value, str):
        refuse(f"{name} is {str(value)[:60]}", "it is a word", "Pass a string.")
    text = value.encode(errors="replace")
    if b"\0" in text or text.decode() != value:  # the library would read what stands in front of a NUL
        refuse(f"{name} is {value[:60]!r}", "it has a NUL, or what no UTF-8 has", "Leave that out.")
    return text


def check_settings(settings) -> None:
    """Refuses what can't be compared with the settings of other calls, such as a list."""
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
        refuse(f"{name} is {str(value)[:60]}", "it should be a number", "Convert it.")


def as_ints(values, name: str = "a list of lengths") -> list[int]:
    """A list of Python's integers from a list, an array or a tensor; of a GPU's tensor this waits for the device."""
    try:
        return [_near(operator.index(value), name) for value in (values.tolist() if hasattr(values, "tolist") else values)]
    except TypeError:
        refuse(f"{name} is {str(values)[:60]}", "it should hold whole numbers, one behind the other",
               "Pass a list, or an array of integers with one axis.")  # fmt: skip


def lengths_of(cu_seqlens) -> tuple[int, ...]:
    """Lengths of sequences from where they begin."""
    at = as_ints(cu_seqlens, "cu_seqlens")
    if not at or at[0] != 0 or any(b < a for a, b in zip(at, at[1:])):
        refuse(
            f"cu_seqlens is {at[:8]}", "it begins with 0 and ascends, and its last number is all tokens", "Check it."
        )
    return tuple(b - a for a, b in zip(at, at[1:]))


def check_axes(name: str, array, axes: tuple[int, ...], form: str) -> None:
    """None is left out."""
    if array is not None and array.ndim not in axes:
        refuse(f"{name} has {array.ndim} axes", f"it is {form}", "Reshape it.")


def scale_of(softmax_scale: float | None) -> float:
    """As the library has it, for which 0 is what None is here."""
    if softmax_scale == 0:
        refuse("softmax_scale is 0", "all keys would count alike", "Leave it out for 1 / sqrt(head_dim), or pass another.")
    return softmax_scale or 0.0


def seconds_of(timeout: float) -> float:
    """As the library has it, for which 0 is the usual time."""
    seconds = as_number(timeout, "timeout")
    if seconds == 0:
        refuse("timeout is 0", "no peer could answer in that time", "Pass seconds, or leave it out for 60.")
    return seconds


# Names that other libraries have for what ringattn computes, and what it is called here; and names of what it doesn't compute.
_OURS = {
    "window": "mask=(left, right)", "window_size": "mask=(left, right)", "sliding_window": "mask=(left, right)",
    "left_window": "mask=(left, right)", "scale": "softmax_scale", "sm_scale": "softmax_scale", "scaling": "softmax_scale",
    "logits_soft_cap": "softcap", "logit_softcapping": "softcap", "s_aux": "sinks", "attention_sinks": "sinks",
    "cache_seqlens": "lengths", "seqlens": "lengths", "page_table": "block_table",
    "cu_seqlens_kv": "cu_seqlens_k", "initial_state": "initial_states", "return_last_state": "return_final_states",
    "seq_idx": "cu_seqlens",
}  # fmt: skip
# What changes no result.
_NOT_NEEDED = {"deterministic": "every call is", "chunk_size": "chunks are 64 tokens, always"}
_MASKING = ("attn_mask", "attention_mask", "block_mask", "key_padding_mask", "score_mod", "attn_bias", "bias", "alibi_slopes")


def refuse_unknown(op: str, given: dict) -> NoReturn:
    """Arguments that other libraries' functions have, and this one does not. To leave out what changes a result is no advice:
    what it is called here is said, or that it isn't computed. op: the function's name."""
    import ringattn  # noqa: PLC0415, which imports this

    name, value = next(iter(given.items()))
    known = inspect.signature(getattr(ringattn, op)).parameters
    why, remedy = f"it was given as {str(value)[:60]}", f"See help(ringattn.{op}) for what it takes."
    ours = _OURS.get(name)
    if name in ("is_causal", "causal") and "mask" in known:
        remedy = f'Did you mean mask="{"causal" if value else "full"}"?'
    elif ours is not None and ours.partition("=")[0] in known:
        remedy = f"Did you mean {ours}?"
    elif name in _NOT_NEEDED:
        why, remedy = _NOT_NEEDED[name], "Leave it out: no result depends on it."
    elif name == "block_mask":
        why = "ringattn's functions mask by position alone"
        remedy = ("For lists of key blocks use the program, `ringattn run --block-mask`: docs/lists.md says how they are "
                  "made.")  # fmt: skip
    elif name in _MASKING:
        why, remedy = "ringattn masks by position alone", "Say by mask and cu_seqlens what is seen, or use another library."
    elif name in ("dropout", "dropout_p"):
        why, remedy = "ringattn has no dropout", "Leave it out where it is 0, as in evaluation."
    else:
        near = difflib.get_close_matches(name, known, 1, 0.75)
        if near:
            remedy = f"Did you mean {near[0]}?"
    unsupported(f"{op} has no {name}", why, remedy)
