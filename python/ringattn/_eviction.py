# SPDX-License-Identifier: Apache-2.0
"""Eviction of tokens from keys and values. The remaining tokens keep their positions."""

import ctypes
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from . import _job, _structs
from ._abi import lib
from ._arguments import as_number, as_text, check_settings, lengths_of, refuse_unknown
from ._compression import Compressed
from ._errors import refuse, unsupported
from ._tensors import View, as_rows, contiguous_heads, device_of, is_torch, traced, type_name


class Kept(NamedTuple):
    """Result of evict().

    Attributes:
        k, v: rows of the remaining tokens.
        k_positions: int32 [(batch,) tokens, kv_heads or 1], in host memory, their original positions.
        k_lengths: original lengths of the sequences.
        cu_seqlens: cumulative lengths of the remaining tokens of packed sequences; None for a batch."""

    k: Any
    v: Any
    k_positions: Any
    k_lengths: tuple[int, ...]
    cu_seqlens: tuple[int, ...] | None


def _host(array):
    """A copy in host memory."""
    return contiguous_heads(array.detach().cpu() if is_torch(array) else array)


def _flat(array):
    return as_rows(array) if array.ndim == 4 else array


def shape_of(k, v, q) -> tuple:
    """(dtype, heads, kv_heads, head_dim, head_dim_v)."""
    heads = k.shape[-2] if q is None else q.shape[-2]
    return type_name(k.dtype), *(int(length) for length in (heads, k.shape[-2], k.shape[-1], v.shape[-1]))


def _c_job(shape: tuple, settings: tuple, lengths, q_lengths, threads: int = 0) -> tuple:
    """(eviction, spec, batch) structs of the library. settings: (method, ratio, mask, softmax_scale, softcap)."""
    method, ratio, mask, softmax_scale, softcap = settings
    spec = _job.c_spec(*shape, _job.read_mask(mask), softmax_scale, softcap, False)
    eviction = _structs.eviction(method=as_text(method, "method"), ratio=ratio, threads=threads)
    return eviction, spec, _job.c_batch(q_lengths, lengths, None)


@functools.cache
def kept_of(shape: tuple, settings: tuple, lengths: tuple, q_lengths: tuple) -> tuple[tuple[int, ...], int]:
    """(number of remaining tokens of each sequence, number of heads with tokens of their own)."""
    kept, heads = (ctypes.c_int64 * max(len(lengths), 1))(), ctypes.c_int64()
    lib.eviction_kept(*_c_job(shape, settings, lengths, q_lengths), kept, ctypes.byref(heads))
    return tuple(kept)[: len(lengths)], heads.value


def kept_lengths(method: str, ratio: float, lengths: tuple) -> tuple[int, ...]:
    """Number of remaining tokens of each sequence, which doesn't depend on the heads."""
    return kept_of(("float32", 1, 1, 1, 1), (method, ratio, "causal", None, 0.0), lengths, lengths)[0]


def begins(k, kept) -> tuple[int, ...] | None:
    """Cumulative lengths of the remaining tokens of packed sequences."""
    return None if k.ndim == 4 else tuple(itertools.accumulate(kept, initial=0))


def _choose(k, v, q, job: tuple, kept: tuple[int, ...], heads: int):
    """int32 [remaining tokens, heads] of packed rows: their indices in their sequences."""
    places = np.empty((sum(kept), heads), "int32")
    arrays = {"q": None if q is None else _host(_flat(q)), "k": _host(_flat(k)), "v": _host(_flat(v)), "positions": places}
    views: dict[str, View] = {}
    tensors = _structs.eviction_tensors()
    _job.show(tensors, views, arrays)
    lib.evict(*job, tensors)
    return places


def _left_of(rows, index):
    """The rows at index [tokens, heads or 1] of [tokens, heads, dim]."""
    if is_torch(rows):
        import torch  # noqa: PLC0415, the rows are of its types

        index = torch.from_numpy(index).to(rows.device)
        return rows[index, torch.arange(rows.shape[1], device=rows.device)]
    return rows[index, np.arange(rows.shape[1])]


def evict_rows(k, v, q, settings, lengths, q_lengths, threads):
    """(k, v, positions) of the remaining tokens."""
    shape = shape_of(k, v, q)
    kept, heads = kept_of(shape, settings, lengths, q_lengths)
    places = _choose(k, v, q, _c_job(shape, settings, lengths, q_lengths, threads), kept, heads)
    first = np.cumsum([0, *lengths])[:-1]
    index = places.astype("int64") + np.repeat(first, kept)[:, None]
    form = (k.shape[0], kept[0]) if k.ndim == 4 else (sum(kept),)
    k, v = (_left_of(_flat(rows), index).reshape(*form, *rows.shape[-2:]) for rows in (k, v))
    places = places.reshape(*form, places.shape[1])
    if is_torch(k):
        import torch  # noqa: PLC0415, as above

        places = torch.from_numpy(places)
    return k, v, places


def sequences_of(k, q, cu_seqlens, cu_seqlens_q) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths of keys and of queries."""
    if q is None and cu_seqlens_q is not None:
        refuse("cu_seqlens_q is given without q", "it says where the sequences of queries begin", "Pass q, or leave it out.")
    if k.ndim not in (3, 4) or (q is not None and q.ndim != k.ndim):
        refuse(f"k has {k.ndim} axes" + ("" if q is None else f", q {q.ndim}"), "they are [(batch,) tokens, heads, dim]",
               "Reshape them.")  # fmt: skip
    if k.ndim == 4:
        if cu_seqlens is not None or cu_seqlens_q is not None:
            refuse("k has a batch axis", "cu_seqlens deals packed rows", "Pass [tokens, heads, dim].")
        if k.shape[0] == 0 or (q is not None and q.shape[0] != k.shape[0]):
            refuse(f"k has {k.shape[0]} sequences" + ("" if q is None else f", q {q.shape[0]}"),
                   "there is at least one, and each has keys and queries", "Check the first axis.")  # fmt: skip
        return (k.shape[1],) * k.shape[0], ((k if q is None else q).shape[1],) * k.shape[0]
    lengths = (k.shape[0],) if cu_seqlens is None else lengths_of(cu_seqlens)
    if q is None:
        return lengths, lengths
    if cu_seqlens_q is not None:
        return lengths, lengths_of(cu_seqlens_q)
    return lengths, (q.shape[0],) if cu_seqlens is None else lengths


@traced
def evict(k, v, method: str = "snapkv", *, ratio: float = 0.5, q=None, cu_seqlens=None, cu_seqlens_q=None,
          mask: _job.Mask = "causal", softmax_scale: float | None = None, softcap: float = 0.0, threads: int = 0,
          **unknown) -> Kept:  # fmt: skip
    """Evicts tokens from keys and values. Scores are computed in host memory; GPU tensors are copied. Not collective.

    Args:
        k, v: [tokens, kv_heads, head_dim or head_dim_v] or [batch, tokens, kv_heads, head_dim or head_dim_v].
        method: "streaming", "knorm", "snapkv" or "expected", with options after a colon: "snapkv:window=32,heads=all"
            (docs/eviction.md).
        ratio: share of each sequence's tokens to remove, in [0, 1); at least one token stays.
        q: the last queries of each sequence, [(batch,) queries, heads, head_dim], for "snapkv" and "expected", which also use
            mask, softmax_scale and softcap. The other methods ignore these four arguments.
        cu_seqlens: [sequences + 1] cumulative lengths of packed rows.
        cu_seqlens_q: the same of q, if its lengths differ.
        mask, softmax_scale, softcap: settings of the attention whose scores are used, as in attention().
        threads: CPU threads. 0: all processors.

    Returns:
        Kept. Pass its attributes to attention() and varlen() as k, v, k_positions, k_lengths and cu_seqlens_k. decode() takes k
        and v as a cache of the remaining keys, if the mask has no left limit.

    Raises:
        CallError: a keyword is unknown.
        UsageError: arguments contradict each other, or an element is not finite.
        UnsupportedError: k or v is already compressed.

    Formula:
        StreamingLLM (arXiv:2309.17453), the L2 norm strategy (arXiv:2406.11430), SnapKV (arXiv:2404.14469), Expected Attention
        (arXiv:2510.00636). docs/eviction.md has the settings that are used.

    Example:
        >>> k, q = np.ones((100, 2, 64), "float32"), np.ones((64, 8, 64), "float32")
        >>> kept = ringattn.evict(k, k, "snapkv", q=q, ratio=0.25)
        >>> places = {"k_positions": kept.k_positions, "k_lengths": kept.k_lengths}
        >>> out, lse = ringattn.attention(q[:1], kept.k, kept.v, q_offset=100, **places)
        >>> kept.k.shape
        (75, 2, 64)
    """
    if unknown:
        refuse_unknown("evict", unknown)
    for name, rows in (("k", k), ("v", v)):
        if isinstance(rows, Compressed):
            unsupported(f"{name} is compressed", "tokens are evicted from unquantized rows",
                        "Evict first, then compress the kept tokens.")  # fmt: skip
    _job.check_arrays("evict", {"k": k, "v": v}, q=q)
    for rows in (k, v, q):
        if rows is not None:
            device_of(rows)  # refuses other devices
    lengths, q_lengths = sequences_of(k, q, cu_seqlens, cu_seqlens_q)
    ratio = as_number(ratio, "ratio")
    settings = (method, ratio, mask, softmax_scale, softcap)
    check_settings(settings)
    k, v, places = evict_rows(k, v, q, settings, lengths, q_lengths, threads)
    return Kept(k, v, places, lengths, begins(k, kept_lengths(method, ratio, lengths)))
