# SPDX-License-Identifier: Apache-2.0
"""Decode: a few new query tokens at the end of each of many sequences, over a KV cache.

    out, lse = ringattn.decode(q, k_cache, v_cache, lengths_before=lengths, update_lengths=True, block_table=table, k_new=k,
                               v_new=v)

A row has the bits that it has in attention() over the whole sequence, with any batch, pages and number of ranks."""

import ctypes
from typing import NamedTuple

import numpy as np

from . import _abi, _job, _structs
from ._abi import lib
from ._arguments import as_int, check_axes, is_true, refuse_unknown
from ._compression import Compressed
from ._errors import refuse
from ._rope import RopeSettings, spec_of
from ._tensors import address_of, contiguous_heads, empty, flat_view, traced_step, type_name
from .worlds import World


class DecodePartition(NamedTuple):
    """A rank's part of a decode step, as decode_partition() returns it. Its cache holds the KV splits first, first + stride, … of
    each sequence, one after the other.

    Attributes:
        kv_split_keys: keys of a KV split.
        first: this rank's first KV split.
        stride: KV splits from one to the next.
        owned: the sequences of the step whose results this rank gets.

    Example:
        >>> part = ringattn.DecodePartition(kv_split_keys=4, first=1, stride=2, owned=range(0, 1))
        >>> part.tokens(14).tolist()
        [4, 5, 6, 7, 12, 13]
    """

    kv_split_keys: int
    first: int
    stride: int
    owned: range

    def tokens(self, length: int) -> np.ndarray:
        """The tokens of a sequence of `length` keys that this rank's cache holds: int64, ascending."""
        groups = np.arange(self.first, -(-length // self.kv_split_keys), self.stride, dtype=np.int64)
        places = (groups[:, None] * self.kv_split_keys + np.arange(self.kv_split_keys)).reshape(-1)
        return places[places < length]

    def cache_tokens(self, length: int) -> int:
        """Number of tokens of a sequence of `length` keys that this rank's cache holds."""
        groups = range(self.first, -(-length // self.kv_split_keys), self.stride)
        return sum(min(self.kv_split_keys, length - group * self.kv_split_keys) for group in groups)


class _Steps(_job.Prepared):
    def owned(self, sequences: int) -> range:
        """The sequences of a step of `sequences` sequences whose results this rank gets."""
        first, count = ctypes.c_int64(), ctypes.c_int64()
        getattr(lib, f"{self.op}_owned")(self.handle, sequences, ctypes.byref(first), ctypes.byref(count))
        return range(first.value, first.value + count.value)

    def partition(self, sequences: int) -> DecodePartition:
        """This rank's part of a step of `sequences` sequences."""
        return DecodePartition(self.facts.kv_split_keys, self.facts.partition_first, self.facts.partition_stride,
                               self.owned(sequences))  # fmt: skip


class Decode(_Steps):
    """A prepared decode for many steps (layers, tokens). decode() keeps such objects. Creating one is collective."""

    op = "decode"


class _RotatingDecode(Decode):
    create = "create_with_rope"


class MlaDecode(_Steps):
    """A prepared decode over a latent cache. mla_decode() keeps such objects. Creating one is collective."""

    op = "mla_decode"


def steps_of(q, rows_axes: int):
    """Returns (sequences, rows per sequence)."""
    if q.ndim not in (rows_axes - 1, rows_axes):
        refuse(f"q has {q.ndim} axes", "it has [sequences, (rows,) heads, dim]", "Reshape it.")
    return q.shape[0], q.shape[1] if q.ndim == rows_axes else 1


def flat(name: str, rows, q, *numbers: int):
    """New tokens [sequences, (rows,) heads, dim], or [sequences, (rows,) dim] of one head, as [rows, heads, dim]. An
    axis of one row may be present or not, independent of q."""
    if rows is None:
        return None
    if tuple(rows.shape[-len(numbers) :]) != numbers:
        refuse(f"{name} is {list(rows.shape)}", f"each of its rows is {list(numbers)}", "Pass rows as the cache has them.")
    leading, wanted = (axes[:1] + tuple(n for n in axes[1:] if n != 1)
                       for axes in (tuple(rows.shape[: -len(numbers)]), tuple(q.shape[:-2])))  # fmt: skip
    if leading != wanted:
        refuse(f"{name} is {type_name(rows.dtype)} {list(rows.shape)}",
               f"q is [{', '.join(map(str, (*q.shape[:-2], '…')))}], and each of its rows has a new one",
               "Pass [sequences, (rows,) …], as q.")  # fmt: skip
    return contiguous_heads(rows).reshape(-1, *(1,) * (2 - len(numbers)), *numbers)


def limits_of(world: World, sequences: int, rows: int, cache, block_table, max_keys: int | None):
    """Limits of a prepared object. With one rank, sequences are rounded up to a power of two. Keys are the capacity of the
    cache."""
    page_size = cache.shape[1]
    reach = page_size if block_table is None else page_size * block_table.shape[1]
    if world.size == 1:
        sequences = 1 << max(sequences - 1, 0).bit_length()
    keys = reach * world.size if max_keys is None else as_int(max_keys, "max_keys")
    return (sequences, rows, keys, 0 if block_table is None else page_size)


def c_limits(limits: tuple):
    sequences, rows, keys, page_size = limits
    return _structs.decode_limits(sequences=sequences, rows=rows, keys=keys, page_size=page_size)


def _memory(array) -> np.ndarray:
    """An array with the same address and strides, for overlap checks. Its data is not accessed."""
    size = array.itemsize if isinstance(array, np.ndarray) else array.element_size()
    strides = array.strides if isinstance(array, np.ndarray) else tuple(size * n for n in array.stride())
    holder = type("_Holder", (), {"__array_interface__": {
        "version": 3, "shape": tuple(array.shape), "strides": strides, "typestr": f"|V{size}",
        "data": (address_of(array), True)}})  # fmt: skip
    return np.asarray(holder())


def _check_apart(arrays: dict, written: tuple[str, ...]) -> None:
    """Refuses an array that a step writes if it shares memory with another one, or with itself. Arrays without memory, as on the
    meta device, are refused later, by their device."""
    memory = {{"k": "k_cache", "v": "v_cache"}.get(name, name): _memory(array) for name, array in arrays.items()
              if array is not None and not isinstance(array, Compressed) and 0 not in array.shape
              and address_of(array)}  # fmt: skip
    for name in written:
        own = memory.get(name)
        if own is None:
            continue
        if any(stride == 0 and length > 1 for stride, length in zip(own.strides, own.shape)):
            refuse(f"{name} has a stride of 0", "this step writes to it", "Give each row memory of its own.")
        for other, array in memory.items():
            try:
                overlap = other != name and np.shares_memory(own, array, max_work=100_000)
            except (RuntimeError, OverflowError):  # strides that no layout of a cache has
                overlap = False
            if overlap:
                refuse(f"{name} overlaps {other}", f"this step writes to {name}", "Give each memory of its own.")


def finish_step(step: _Steps, q, sequences: int, rows: int, arrays: dict, dim_v: int, out, update: bool, keep: tuple):
    """Runs a step and returns (out, lse) in q's form: [own sequences, (rows,) heads, …]. keep: (world, call, given) of
    _job.keep_call()."""
    own = len(step.owned(sequences))
    form = (own, rows, q.shape[-2]) if q.ndim == 4 else (own, q.shape[-2])
    if out is not None and tuple(out.shape) != (*form, dim_v):
        refuse(f"out is {list(out.shape)}", f"this step's is {[*form, dim_v]}", "Pass one of that shape, or none.")
    out = empty(q, (*form, dim_v)) if out is None else out
    lse = empty(q, (own * rows, q.shape[-2]), "float32")
    arrays |= {"out": flat_view(out) if out.ndim == 4 else out, "lse": lse}
    caches = ("k_cache", "v_cache", "cache")
    new_rows = arrays.get("k_new") if "k_new" in arrays else arrays.get("latent")
    _check_apart(arrays, written_by_step(caches, new_rows, update))
    members = {"rows": rows, "update_lengths": int(update)}
    step._do(q, arrays, **members)
    lse = lse.reshape(form)
    world, call, given = keep
    _job.keep_call(world, call, step, arrays, given, out, lse, **members)
    return out, lse


def written_by_step(caches: tuple[str, ...], new_rows, update: bool) -> tuple[str, ...]:
    """Names of the arrays that a step writes, besides its results."""
    return (caches if new_rows is not None else ()) + (("lengths_before",) if update else ())


def check_which_lengths(op: str, lengths, lengths_before, update: bool) -> None:
    meanings = "lengths count the new rows of this step, and lengths_before don't"
    if lengths is not None and lengths_before is not None:
        refuse(f"lengths and lengths_before of {op} are given", meanings, "Pass exactly one of them.")
    if lengths is None and lengths_before is None:
        refuse(f"{op} has neither lengths nor lengths_before", meanings, "Pass exactly one of them.")
    if update and lengths_before is None:
        refuse(f"update_lengths of {op} is given without lengths_before", meanings,
               "Pass lengths_before, to which the number of new rows is added in place.")  # fmt: skip


def check_tables(lengths, lengths_before, block_table) -> None:
    check_axes("block_table", block_table, (2,), "[sequences, table_pages]")
    for name, array in (("lengths", lengths), ("lengths_before", lengths_before), ("block_table", block_table)):
        if array is not None and str(array.dtype).removeprefix("torch.") != "int32":
            refuse(f"{name} holds {array.dtype}", "it should hold int32", "Convert it once, and keep it.")


@traced_step("k_new", 3)
def decode(q, k_cache, v_cache, lengths=None, *, lengths_before=None, update_lengths: bool = False, block_table=None,
           k_new=None, v_new=None, mask: _job.Mask = "causal", softmax_scale: float | None = None, softcap: float = 0.0,
           sinks=None, rope: RopeSettings | None = None, max_keys: int | None = None, world: World | None = None, out=None,
           threads: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """One decode step over a KV cache: up to 16 new query tokens at the end of each of many sequences. Collective with several
    ranks. A row has the bits that it has in attention() over the whole sequence.

    Args:
        q: [sequences, heads, head_dim], or [sequences, rows, heads, head_dim] with 1 to 16 rows, the new query tokens of a
            sequence.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim or head_dim_v]; page_size is 16, 32, 64, 128 or 256. Pass other
            axis orders as views (permute). Either may be a ringattn.Compressed: Compressed.cache() creates a paged one,
            compress() of a batch a dense one.
        lengths: int32 [sequences], keys of each sequence with the tokens of this step: row i has position length - rows + i.
            Pass exactly one of lengths and lengths_before, and lengths by name together with k_new.
        lengths_before: the same without the tokens of this step, as cache_seqlens of flash_attn_with_kvcache(): row i has
            position length + i.
        update_lengths: True adds the number of rows to lengths_before in place. Otherwise both are only read.
        block_table: int32 [sequences, table_pages], page index of tokens [i · page_size, (i + 1) · page_size) of a sequence.
            Without it the cache is dense: page s is sequence s, with any page_size.
        k_new, v_new: [sequences, (rows,) kv_heads, head_dim or head_dim_v], appended to the cache first. None: the cache
            already has these tokens.
        rope: ringattn.RopeSettings(head_dim, theta=…) rotates q and k_new, each row by its position, with the same bits as rope()
            before decode(). Keys that are already in the cache must be rotated. On a GPU the launch that appends also rotates.
        max_keys: maximum keys of a sequence over all ranks. None: the capacity of the cache.
        mask, softmax_scale, softcap, sinks, world, out, threads, timeout: as in attention().

    Returns:
        (out, lse). out: q's shape with head_dim_v, of q's dtype. lse: float32 [sequences, (rows,) heads]. With several ranks both
        have only this rank's sequences, and its cache holds some of the keys of every sequence: see decode_partition().

    Raises:
        UsageError: lengths or pages are out of range, or arrays that the step writes overlap others; or as attention().
        CallError, UnsupportedError, PeerError: as attention().

    Formula:
        That of attention(). docs/how-it-works.md says how ranks share the keys of a sequence.

    Example:
        >>> cache = np.zeros((2, 64, 2, 32), "float32")          # dense: 2 sequences of up to 64 keys
        >>> q, new = np.ones((2, 8, 32), "float32"), np.ones((2, 2, 32), "float32")
        >>> lengths = np.array([5, 40], "int32")
        >>> out, lse = ringattn.decode(q, cache, cache.copy(), lengths_before=lengths, update_lengths=True, k_new=new, v_new=new)
        >>> out.shape, lengths.tolist()
        ((2, 8, 32), [6, 41])
    """
    if unknown:
        refuse_unknown("decode", unknown)
    is_true("update_lengths", update_lengths)
    given = {"q": q, "k": k_cache, "v": v_cache, "block_table": block_table, "lengths": lengths,
             "lengths_before": lengths_before, "sinks": sinks, "k_new": k_new, "v_new": v_new}  # fmt: skip
    settings = ("decode", update_lengths, mask, softmax_scale, softcap, rope, max_keys, threads, timeout)
    call, results = _job.known_call(world, settings, given, out)
    if results is not None:
        return results
    check_which_lengths("decode", lengths, lengths_before, update_lengths)
    _job.check_arrays("decode", {"q": q, "k_cache": k_cache, "v_cache": v_cache},
                      written_by_step(("k_cache", "v_cache"), k_new, update_lengths), lengths=lengths,
                      lengths_before=lengths_before, block_table=block_table, k_new=k_new, v_new=v_new, sinks=sinks,
                      out=out)  # fmt: skip
    _job.check_dtypes(q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, out=out)
    check_tables(lengths, lengths_before, block_table)
    step, sequences, rows = prepared_decode(_job.world_of(q, world), q, k_cache, v_cache, block_table, mask, softmax_scale,
                                            softcap, sinks, rope, max_keys, threads, timeout)  # fmt: skip
    kv_heads, head_dim, head_dim_v = k_cache.shape[2], q.shape[-1], v_cache.shape[3]
    flat_q = contiguous_heads(q).reshape(sequences * rows, *q.shape[-2:])
    arrays = _job.shown(flat_q, k_cache, v_cache)
    arrays |= {"block_table": block_table, "lengths": lengths, "lengths_before": lengths_before, "sinks": sinks,
               "k_new": flat("k_new", k_new, q, kv_heads, head_dim),
               "v_new": flat("v_new", v_new, q, kv_heads, head_dim_v)}  # fmt: skip
    return finish_step(step, q, sequences, rows, arrays, head_dim_v, out, update_lengths, (world, call, given))


def _check_rope(rope, head_dim: int) -> None:
    if not isinstance(rope, RopeSettings):
        refuse(f"rope is {type(rope).__name__}", "it says how q and k_new are rotated",
               "Pass ringattn.RopeSettings(head_dim, theta=…).")  # fmt: skip
    if rope.head_dim != head_dim:
        refuse(f"rope is for heads of {rope.head_dim}", f"q has heads of {head_dim}", "Pass RopeSettings of that head_dim.")


def prepared_decode(own: World, q, k_cache, v_cache, block_table, mask, softmax_scale, softcap, sinks, rope, max_keys, threads,
                    timeout, unchecked: bool = False):  # fmt: skip
    """Returns (Decode, sequences, rows per sequence). unchecked: the caller knows that lengths in GPU memory are in range, so no
    step checks them."""
    if rope is not None:
        _check_rope(rope, q.shape[-1])
    _job.read_mask(mask)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_axes(name, cache, (4,), "[pages, page_size, kv_heads, head_dim]")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        refuse(f"k_cache is {list(k_cache.shape)} and v_cache {list(v_cache.shape)}",
               "a token's key and value have the same index in both",
               "Give both the same pages and heads.")  # fmt: skip
    sequences, rows = steps_of(q, 4)
    _job.check_head_dim(q, v_cache)
    if block_table is not None and block_table.shape[0] != sequences:
        refuse(f"block_table is {list(block_table.shape)}", f"it has a row for each of {sequences} sequences",
               "Check it.")
    if block_table is None and k_cache.shape[0] < sequences:
        refuse(f"k_cache is {list(k_cache.shape)} and there are {sequences} sequences",
               "without a block_table page s of a cache is sequence s",
               "Pass the block_table of a cache of pages, or a dense cache with all sequences.")  # fmt: skip
    heads, kv_heads, head_dim, head_dim_v = q.shape[-2], k_cache.shape[2], q.shape[-1], v_cache.shape[3]
    formats = _job.format_of(k_cache), _job.format_of(v_cache)
    limits = limits_of(own, sequences, rows, k_cache, block_table, max_keys)
    key = ("decode", formats, q.dtype, heads, kv_heads, head_dim, head_dim_v, mask, softmax_scale, softcap,
           sinks is not None, rope, limits, threads, timeout, unchecked)  # fmt: skip

    def make():
        spec = _job.c_spec(q, heads, kv_heads, head_dim, head_dim_v, _job.read_mask(mask), softmax_scale, softcap,
                           sinks is not None, formats)  # fmt: skip
        options = _job.run_options(threads=threads, timeout_seconds=timeout, unchecked_tables=int(unchecked))
        if rope is None:
            return Decode(own, spec, c_limits(limits), options)
        return _RotatingDecode(own, spec, spec_of(q, head_dim, rope.settings), c_limits(limits), options)

    return own.prepared(key, make), sequences, rows


def decode_partition(q, k_cache, v_cache, *, block_table=None, mask: _job.Mask = "causal", softmax_scale: float | None = None,
                 softcap: float = 0.0, sinks=None, rope: RopeSettings | None = None, max_keys: int | None = None,
                 world: World | None = None, threads: int = 0, timeout: float = 60.0, **unknown) -> DecodePartition:  # fmt: skip
    """This rank's part of a step that decode() runs with these arguments: which keys its cache holds, and which sequences'
    results it gets. Prepares the object that decode() uses. Collective with several ranks.

    Args:
        q, k_cache, v_cache, block_table: as in decode(). Only shapes and types are read, so caches may be filled afterwards.
        mask, softmax_scale, softcap, sinks, rope, max_keys, world, threads, timeout: as in the decode steps.

    Returns:
        A DecodePartition.

    Raises:
        CallError, UsageError, UnsupportedError, PeerError: as decode().

    Example:
        >>> cache = np.zeros((2, 64, 2, 32), "float32")
        >>> part = ringattn.decode_partition(np.ones((2, 8, 32), "float32"), cache, cache)
        >>> part.owned, part.cache_tokens(50)
        (range(0, 2), 50)
    """
    if unknown:
        refuse_unknown("decode_partition", unknown)
    _job.check_arrays("decode_partition", {"q": q, "k_cache": k_cache, "v_cache": v_cache}, block_table=block_table, sinks=sinks)
    check_axes("block_table", block_table, (2,), "[sequences, table_pages]")
    step, sequences, _ = prepared_decode(_job.world_of(q, world), q, k_cache, v_cache, block_table, mask, softmax_scale, softcap,
                                         sinks, rope, max_keys, threads, timeout)  # fmt: skip
    return step.partition(sequences)
