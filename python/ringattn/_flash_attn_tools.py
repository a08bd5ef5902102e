# SPDX-License-Identifier: Apache-2.0
"""Translation of flash_attn's arguments, which ring_flash_attn's functions also have."""

import difflib
import functools
import inspect

from ._arguments import as_int, check_dropout, is_true
from ._errors import CallError, refuse, unsupported
from ._flash_attn_docs import docstring
from ._spellings import causal_of, mask_of  # noqa: F401, for those who import from here
from ._tensors import is_torch


# Arguments of flash_attn 3, vLLM and others: their names here if the function has them, otherwise (names, why, suggestion).
_RENAMED = {
    "page_table": "block_table", "block_tables": "block_table", "seqused_k": "cache_seqlens", "seq_lens": "cache_seqlens",
    "is_causal": "causal", "causal": "is_causal", "scale": "softmax_scale", "sm_scale": "softmax_scale scale",
    "softmax_scale": "scale", "logits_soft_cap": "softcap", "k_new": "k", "v_new": "v", "q": "query", "k": "key", "v": "value",
    "return_lse": "return_softmax_lse", "return_softmax_lse": "return_attn_probs", "process_group": "group",
}  # fmt: skip
_ELSEWHERE = (
    ("learnable_sink s_aux sinks attention_sinks", "this signature has no sinks",
     "Call ringattn.attention(), varlen() or decode() with sinks."),
    ("seqused_q seqused_k", "packed sequences follow each other without padding", "Pass cu_seqlens_q and cu_seqlens_k."),
    ("q_descale k_descale v_descale", "arrays have no scales beside them",
     "Multiply by it beforehand, or call ringattn.decode() with caches of ringattn.compress()."),
    ("pack_gqa sm_margin num_splits scheduler_metadata", "no result depends on it", "Leave it out."),
    ("qv", "scores are only q times k", "Call ringattn.mla() or ringattn.mla_decode()."),
    ("score_mod mask_mod block_mask attn_mask attention_chunk", "masks are causal, full or sliding windows",
     "Pass causal and window_size, or use another library."),
    ("softcap", "this signature has none", "Call ringattn.attention() or varlen() with softcap."),
    ("out", "results are new tensors", "Call ringattn's own function with out."),
)  # fmt: skip


def _refuse_foreign(function: str, name: str, value, keywords) -> None:
    own = next((own for own in _RENAMED.get(name, "").split() if own in keywords), None)
    if own is not None:
        raise CallError(f"{function} has no {name}", f"it is called {own} there", f"Pass {own}.")
    for names, why, suggestion in _ELSEWHERE:
        if name in names.split():
            raise CallError(f"{function} has no {name}", why, suggestion)
    near = difflib.get_close_matches(name, keywords, 1, 0.75)
    suggestion = f"Did you mean {near[0]}?" if near else f"It takes {', '.join(sorted(keywords))}."
    raise CallError(f"{function} has no {name}", f"it was given as {str(value)[:60]}", suggestion)


def shim(function):
    """Decorates a function that has another library's signature. Callers may expect another version of that library, so unknown
    arguments are refused as in ringattn's own functions. The docstring is completed."""
    keywords = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments, **named):
        for name in named:
            if name not in keywords:
                _refuse_foreign(function.__name__, name, named[name], keywords)
        return function(*arguments, **named)

    call.__doc__ = docstring(function)
    return call


def check_rows(**arrays) -> None:
    """Refuses arguments without axes, by name."""
    for name, array in arrays.items():
        if not hasattr(array, "ndim"):
            refuse(f"{name} is {type(array).__name__}", "it should be a PyTorch tensor", "Pass this rank's rows.")


def _check_tensor(name: str, array) -> None:
    """Refuses anything but a tensor, because PyTorch's own functions are called on it."""
    if not is_torch(array):
        refuse(f"{name} is {type(array).__name__}", "it should be a PyTorch tensor", "Convert it.")


def unpacked(name: str, packed, axes: int):
    """The tensors packed in kv or qkv, on the axis before heads and dims."""
    _check_tensor(name, packed)
    if packed.ndim != axes or packed.shape[-3] != len(name):
        refuse(f"{name} is {list(packed.shape)}",
               f"it has {axes} axes, and {len(name)} tensors along the third axis from the end",
               "Stack them on that axis.")  # fmt: skip
    return packed.unbind(-3)


def check_stride(stride, kv_heads: int) -> None:
    """Checks heads_k_stride: the number of K/V heads that ring_flash_attn exchanges at a time."""
    stride = as_int(stride, "heads_k_stride")
    if stride < 1 or kv_heads % stride:
        refuse(f"heads_k_stride is {stride}", f"it divides the {kv_heads} heads of keys and values",
               "Pass 1: no result depends on it.")  # fmt: skip


def check(dropout_p: float, alibi_slopes) -> None:
    check_dropout(dropout_p)
    if alibi_slopes is not None:
        unsupported("alibi_slopes are given", "ringattn has no ALiBi", "Pass None.")


def result(out, lse, return_attn_probs: bool):
    """The results of flash_attn's functions; moves lse's token axis to the end."""
    return (out, lse.transpose(-1, -2).contiguous(), None) if is_true("return_attn_probs", return_attn_probs) else out


def size_of(world) -> int:
    return 1 if world is None else world.size
