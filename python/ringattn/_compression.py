# SPDX-License-Identifier: Apache-2.0
"""Compression of keys and values. attention() and decode() take compressed keys and values in place of k and v. Their
results
have the bits of attention over the tensor that decompress() returns.

    k_small, v_small = ringattn.compress(k, v, "int4")
    out, lse = ringattn.attention(q, k_small, v_small)"""

import ctypes
import functools
import math

from . import _abi, _structs
from ._abi import lib
from ._arguments import as_ints, as_number, as_text, check_axes, check_settings, refuse_unknown
from ._errors import refuse, unsupported
from ._streams import refuse_in_graph
from ._tensors import CompressedView, View, as_rows, check_array, contiguous_heads, data_type, device_of, empty, stream_of
from ._tensors import flat_view, kind_of, moved, traced, type_name, zeros
from .worlds import Prepared, self_world

METHODS = ("fp8", "int8", "int4", "lowrank", "vq", "hybrid")


class Compressed:
    """Compressed keys or values, for k or v of attention(), varlen() and decode(). compress() makes them, and Compressed.cache()
    makes an empty cache.

    Args:
        format: name of the format, as in docs/compression.md.
        shape: shape of the decompressed tensor: [tokens, heads, dim], [batch, tokens, heads, dim], or for a cache [pages,
            page_size, heads, dim].
        dtype: dtype of the decompressed tensor.
        streams: arrays with data of each token, by name, [..., heads, width].
        tables: arrays for the whole tensor, by name.
        lengths: tokens of each sequence.
        energy_kept: for a low-rank format, the share of the sum of squares that its factors keep.

    Example:
        >>> k = np.ones((256, 2, 64), "float16")
        >>> k_small, v_small = ringattn.compress(k, k, "int4")
        >>> k_small.shape, k_small.nbytes < k.nbytes / 2
        ((256, 2, 64), True)
    """

    def __init__(self, format: str, shape: tuple, dtype, streams: dict, tables: dict, lengths: tuple, energy_kept=1.0):
        self.format, self.shape, self.dtype, self.lengths, self.energy_kept = format, tuple(shape), dtype, lengths, energy_kept
        self.streams, self.tables = streams, tables

    @classmethod
    def cache(cls, format: str, shape: tuple, like, *, sequences: int | None = None, tables: dict | None = None):
        """An empty cache.

        Args:
            format: name of the format, as in docs/compression.md.
            shape: [pages, page_size, heads, dim].
            like: an array whose type, dtype and device the cache has.
            sequences: number of sequences of a step, for the tails of "int4_channel". None: the number of pages, as in a dense
                cache.
            tables: tables of another Compressed, for formats that quantize with given tables ("fp8 head", "vector")."""
        if len(shape) != 4:
            refuse(f"a cache of shape {tuple(shape)}", "it is [pages, page_size, heads, dim]", "Name all four.")
        lengths = (shape[1],) * (shape[0] if sequences is None else sequences)
        made = _zeros(format, shape, like, lengths)
        if tables is not None:
            made.tables = tables
        return made

    @property
    def ndim(self) -> int:
        """Number of axes of the decompressed tensor."""
        return len(self.shape)

    @property
    def parts(self) -> list:
        """All streams and tables."""
        return [*self.streams.values(), *self.tables.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all streams and tables."""
        return sum(part.nbytes for part in self.parts)

    def like(self):
        """An array of the same type on the same device."""
        return self.parts[0]

    def with_streams(self, streams: dict, shape: tuple) -> "Compressed":
        """A tensor of another shape with these streams and the same tables."""
        return Compressed(self.format, shape, self.dtype, streams, self.tables, self.lengths, self.energy_kept)

    def flat_rows(self) -> "Compressed":
        """[batch, tokens, heads, dim] as [batch · tokens, heads, dim]."""
        rows = self.shape[0] * self.shape[1]
        streams = {name: stream.reshape(rows, *stream.shape[2:]) for name, stream in self.streams.items()}
        return self.with_streams(streams, (rows, *self.shape[2:]))

    def to(self, device) -> "Compressed":
        """A copy on another device, for PyTorch tensors."""
        streams, tables = (
            {name: moved(part, device) for name, part in parts.items()} for parts in (self.streams, self.tables)
        )
        return Compressed(self.format, self.shape, self.dtype, streams, tables, self.lengths, self.energy_kept)

    def __repr__(self):
        return f"<ringattn.Compressed {self.format} {list(self.shape)}, {self.nbytes} bytes>"


# Arrays that may be compressed, by their names in the ops that take them.
_COMPRESSED = ("k", "v", "k_cache", "v_cache")


def refuse_compressed(op: str, name: str, array) -> None:
    if isinstance(array, Compressed) and name not in _COMPRESSED:
        unsupported(f"{name} of {op} is compressed", "of attention, varlen and decode k and v may be, and nothing else",
                    "Pass what ringattn.decompress() makes of it.")  # fmt: skip


class _Coder(Prepared):
    """A prepared compression. Worlds keep such objects."""

    def __init__(self, world, format: str, dtype, heads: int, dim: int, sequences: int, seed: int, threads: int):
        super().__init__(world, lib.compression_destroy)
        spec = _structs.compression_spec(format=as_text(format, "method"), sequences=sequences, seed=seed, dtype=dtype,
                                         heads=heads, dim=dim)  # fmt: skip
        handle = _abi.Handle()
        lib.compression_create(world.handle, spec, _structs.options(threads=threads), ctypes.byref(handle))
        self._handle = handle
        facts = _structs.compression_facts()
        lib.compression_get_facts(handle, facts)
        # (name, type, shape); the shape of a stream is that of one token.
        self.streams = [self._part(_abi.STREAM, i) for i in range(facts.streams)]
        self.tables = [self._part(_abi.TABLE, i) for i in range(facts.tables)]

    def _part(self, kind: int, index: int):
        part = _structs.part()
        lib.compression_get_part(self.handle, kind, index, part)
        return part.name.decode(), type_name(part.dtype), tuple(part.shape[: part.axes])

    def do(self, function, plain, compressed: Compressed, name: str, lengths: tuple, *more) -> None:
        refuse_in_graph(self.world(), "this call waits for the GPU", "a graph can't hold a wait", "Make it before the capture.")
        self.turn.run(lambda: self._do(function, plain, compressed, name, lengths, *more))

    def _do(self, function, plain, compressed: Compressed, name: str, lengths: tuple, *more) -> None:
        rows, parts = View(), CompressedView()
        rows.show(plain)
        parts.show(compressed)
        tensors = _structs.compression_tensors(name=name.encode(), plain=rows.address, compressed=parts.address)
        tensors.lengths = (ctypes.c_int64 * max(len(lengths), 1))(*lengths)
        tensors.stream = stream_of(plain)
        function(self.handle, tensors, *more)

    def settle(self) -> None:
        """Does nothing, because its calls are synchronous."""


def _coder(like, dtype, format: str, heads: int, dim: int, sequences: int, seed: int = 0, threads: int = 0) -> _Coder:
    world = self_world(device_of(like))
    code = data_type(dtype)
    key = ("compression", format, code.code, code.bits, heads, dim, sequences, seed, threads)
    return world.prepared(key, lambda: _Coder(world, format, code, heads, dim, sequences, seed, threads))


def _zeros(format: str, shape: tuple, like, lengths: tuple, seed: int = 0, threads: int = 0) -> Compressed:
    coder = _coder(like, like, format, shape[-2], shape[-1], len(lengths), seed, threads)
    streams = {name: zeros(like, (*shape[:-2], *token), kind) for name, kind, token in coder.streams}
    tables = {name: zeros(like, whole, kind) for name, kind, whole in coder.tables}
    return Compressed(format, shape, like.dtype, streams, tables, lengths)


def lengths_of(x, cu_seqlens) -> tuple[int, ...]:
    """Lengths of the sequences of a tensor to compress."""
    if x.ndim == 4:
        if cu_seqlens is not None:
            refuse("x has a batch axis", "cu_seqlens deals packed rows", "Pass [tokens, heads, dim].")
        return (x.shape[1],) * x.shape[0]
    if x.ndim != 3:
        refuse(f"a tensor to compress has {x.ndim} axes", "it is [(batch,) tokens, heads, dim]", "Reshape it.")
    if cu_seqlens is None:
        return (x.shape[0],)
    at = as_ints(cu_seqlens, "cu_seqlens")
    return tuple(b - a for a, b in zip(at, at[1:]))


def _rows(x):
    return as_rows(x) if x.ndim == 4 else x


def compress_one(name: str, x, format: str, lengths: tuple, seed: int, threads: int) -> Compressed:
    made = _zeros(format, x.shape, x, lengths, seed, threads)
    coder = _coder(x, x, format, x.shape[-2], x.shape[-1], len(lengths), seed, threads)
    kept = ctypes.c_double()
    flat = made.flat_rows() if x.ndim == 4 else made
    coder.do(lib.compression_compress, contiguous_heads(_rows(x)), flat, name, lengths, ctypes.byref(kept))
    made.energy_kept = kept.value
    return made


@functools.cache
def choose_formats(method, ratio: float | None, dtype: str, heads: int, k_dim: int, v_dim: int) -> tuple[str, str]:
    """The formats of keys and values that a method or a format name selects."""
    if isinstance(method, tuple):
        if len(method) != 2 or ratio is not None:
            refuse(f"method is {method!r}", "a pair names the formats of k and of v, and has no ratio", "Name two formats.")
        return method
    if not isinstance(method, str) or method.partition(":")[0] not in METHODS:
        if ratio is not None:
            refuse(f"method is {method!r}", f"with a ratio it is one of {', '.join(METHODS)}", "Choose one of these.")
        return method, method
    spec = _structs.spec(dtype=data_type(dtype), heads=heads, head_dim=k_dim, head_dim_v=v_dim)
    formats = _structs.formats()
    lib.choose_formats(as_text(method, "method"), ratio or 0.0, spec, formats)
    return formats.k.decode(), formats.v.decode()


@traced
def compress(k, v, method="int4", *, ratio: float | None = None, cu_seqlens=None, seed: int = 0, threads: int = 0,
             **unknown):  # fmt: skip
    """Compresses keys and values. GPU tensors are compressed on the GPU, to the same bytes as on the CPU. Synchronous; not
    collective.

    Args:
        k, v: [tokens, kv_heads, dim] or [batch, tokens, kv_heads, dim], float16 or bfloat16. The result of the second form can
            also be used as a dense cache.
        method: "fp8", "int8", "int4", "lowrank" ("lowrank:heads=2" for two heads at a time), "vq" or "hybrid"; or the name of a
            format, "fp8 head", "int4_channel group 32", …, or a pair (format of k, format of v).
        ratio: for a method, the minimum share of bytes to remove. None: the method's own.
        cu_seqlens: [sequences + 1] cumulative lengths of packed rows.
        seed: seed of the codebook search ("vq"). Other formats do not use it.
        threads: CPU threads. 0: all processors.

    Returns:
        (k, v) as Compressed.

    Raises:
        CallError: a keyword is unknown.
        UsageError: there is no such method or format, it does not support these dims, or an element is not finite (the error has
            its index).
        UnsupportedError: an array requires a gradient.

    Formula:
        The format defines it (docs/compression.md).

    Example:
        >>> k = np.ones((64, 2, 64), "float16")
        >>> k_small, v_small = ringattn.compress(k, k, "fp8")
        >>> out, lse = ringattn.attention(k, k_small, v_small)
        >>> out.shape
        (64, 2, 64)
    """
    if unknown:
        refuse_unknown("compress", unknown)
    for name, array in (("k", k), ("v", v)):
        check_array(name, array)
        if kind_of(array) is not kind_of(k):
            refuse(f"{name} is {type(array).__name__}", f"k is {type(k).__name__}", "Pass arrays of one kind.")
        if device_of(array) != device_of(k):
            refuse(f"{name} is on {array.device}", f"k is on {k.device}", "Pass tensors of one device.")
        check_axes(name, array, (3, 4), "[(batch,) tokens, heads, dim]")
        if type_name(array.dtype) not in ("float16", "bfloat16"):
            refuse(f"{name} is {type_name(array.dtype)}", "compressed rows become float16 or bfloat16 again", "Convert it.")
    ratio = None if ratio is None else as_number(ratio, "ratio")
    check_settings((method,))
    formats = choose_formats(method, ratio, type_name(k.dtype), k.shape[-2], k.shape[-1], v.shape[-1])
    return tuple(
        compress_one(name, x, format, lengths_of(x, cu_seqlens), seed, threads)
        for name, x, format in zip("kv", (k, v), formats)
    )


@traced
def decompress(x: Compressed, *, out=None, threads: int = 0, name: str = "x", **unknown):
    """Decompresses x. If x is a cache, all pages are decompressed, including unused tokens. Synchronous; not collective.

    Args:
        x: a Compressed.
        out: array for the result. None: a new one.
        threads: CPU threads. 0: all processors.
        name: name of the tensor in messages.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        CallError: a keyword is unknown.
        UsageError: scales, quantized values or tables are invalid (the error has their index).
        UnsupportedError: x is a cache of a format with a table for each sequence, and a sequence is not one page.

    Formula:
        The format defines it (docs/compression.md).

    Example:
        >>> k = np.ones((64, 2, 64), "float16")
        >>> bool((ringattn.decompress(ringattn.compress(k, k, "int8")[0]) == k).all())
        True
    """
    if unknown:
        refuse_unknown("decompress", unknown)
    if not isinstance(x, Compressed):
        refuse(f"{name} is {type(x).__name__}", "ringattn.compress() gives what this takes", "Pass a ringattn.Compressed.")
    for part_name, part in (*x.streams.items(), *x.tables.items()):
        check_array(f"{name}_{part_name}", part)
    like = x.like()
    heads, dim = x.shape[-2:]
    if out is None:
        out = empty(like, x.shape, type_name(x.dtype))
    check_array("out", out)
    if tuple(out.shape) != x.shape or kind_of(out) is not kind_of(like):
        refuse(f"out is {type(out).__name__} {list(out.shape)}", f"{name} is {type(like).__name__} {list(x.shape)}",
               "Pass one like it, or none.")  # fmt: skip
    rows = flat_view(out) if out.ndim == 4 else out
    lengths, tokens = x.lengths, math.prod(x.shape[:-2])
    if sum(lengths) != tokens:  # a paged cache, whose pages are of any sequence
        one, two = (_coder(like, x.dtype, x.format, heads, dim, sequences, threads=threads) for sequences in (1, 2))
        if one.tables != two.tables:
            unsupported(f"{name} has {tokens} tokens in pages", f"{x.format} has a table for each sequence, and pages name none",
                        "Decompress the pages of one sequence with its table.")  # fmt: skip
        lengths = (tokens,)
    coder = _coder(like, x.dtype, x.format, heads, dim, len(lengths), threads=threads)
    coder.do(lib.compression_decompress, rows, x.flat_rows() if x.ndim == 4 else x, name, lengths)
    return out


@functools.cache
def parts_of(format: str, dtype: str, heads: int, dim: int, sequences: int = 1):
    """(streams, tables) of a format, each as (name, type, shape), from which fake tensors are made."""
    coder = _Coder(self_world(), format, data_type(dtype), heads, dim, sequences, 0, 0)
    return coder.streams, coder.tables
