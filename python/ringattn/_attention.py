# SPDX-License-Identifier: Apache-2.0
"""Exact attention on one rank or over a ring of ranks.

    out, lse = ringattn.attention(q, k, v)                                     # one causal sequence, one rank
    out, lse = ringattn.attention(q, k, v, world=world, layout="zigzag")       # this rank's rows of it
    out, lse = ringattn.varlen(q, k, v, cu_seqlens)                            # a packed batch

A row of out and lse has the same bits with any world, layout and batch.
"""

import warnings
from collections.abc import Sequence

from . import _gradients, _job
from ._compression import Compressed
from ._arguments import as_int, as_ints, check_axes, check_leading, lengths_of, refuse_unknown
from ._errors import refuse
from ._tensors import contiguous_heads, empty, flat_rows, flat_view, traced
from .layouts import Layout
from .worlds import World


class Attention(_job.Prepared):
    """A prepared job for many runs (layers, steps) with the same lengths. attention() and varlen() keep such objects. Creating
    one is collective.

    Attributes:
        q_rows: tokens of this rank's q, out and lse.
        k_rows: tokens of this rank's k and v.
        workspace_bytes: bytes that a run on a GPU needs besides its arrays.
        machine: device model and instruction set. Bits are equal if this, the kernel and the library are the same."""

    op = "attention"

    def __init__(self, world: World, spec, q_lengths: Sequence[int], k_lengths: Sequence[int] | None = None,
                 q_offsets: Sequence[int] | None = None, options=None, positions=None):  # fmt: skip
        super().__init__(world, spec, _job.c_batch(q_lengths, k_lengths, q_offsets, positions), options)
        self.q_rows: int = self.facts.q_rows
        self.k_rows: int = self.facts.k_rows
        self.workspace_bytes: int = self.facts.workspace_bytes
        self.machine: str = self.facts.machine.decode()

    def run(self, q, k, v, out, lse=None, sinks=None) -> None:
        """Computes out [q_rows, heads, head_dim_v] and lse [q_rows, heads] from q [q_rows, heads, head_dim] and k, v
        [k_rows, kv_heads, head_dim or head_dim_v]. On a GPU the work is enqueued on the caller's current stream. On a
        CPU it is done on return."""
        _job.check_arrays("Attention.run", {"q": q, "k": k, "v": v, "out": out}, lse=lse, sinks=sinks)
        self._do(q, _job.shown(q, k, v) | {"sinks": sinks, "out": out, "lse": lse}, self.workspace_bytes)


def prepared_of(kind, world, q, k, v, q_lengths, k_lengths, q_offsets, positions, mask, softmax_scale, softcap, sinks, layout,
                key_layout, **members):  # fmt: skip
    """The world's prepared object for a call: an Attention or an AttentionBackward, as `kind` says."""
    heads, kv_heads, head_dim, head_dim_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    formats = _job.format_of(k), _job.format_of(v)
    key = (kind.op, formats, q.dtype, heads, kv_heads, head_dim, head_dim_v, mask, softmax_scale, softcap,
           sinks is not None, q_lengths, k_lengths, q_offsets, positions, layout, key_layout, *members.values())  # fmt: skip

    def make():
        spec = _job.c_spec(q, heads, kv_heads, head_dim, head_dim_v, _job.read_mask(mask), softmax_scale, softcap,
                           sinks is not None, formats)  # fmt: skip
        options = _job.c_options(world, q_lengths, k_lengths, layout, key_layout, **members)
        return kind(world, spec, q_lengths, k_lengths, q_offsets, options, positions)

    return world.prepared(key, make)


def _pair(lengths) -> tuple[int, int]:
    numbers = tuple(as_ints(lengths, "lengths"))
    if len(numbers) != 2:
        refuse(f"lengths is {numbers}", "it has the queries and the keys of a sequence", "Pass both.")
    return numbers


def _tokens(layout, rows: int, world: World) -> int:
    """Tokens of a sequence over all ranks: the Layout's length, or without a Layout this rank's tokens times the ranks."""
    if isinstance(layout, Layout) and layout.lengths:
        return layout.lengths[0]
    return rows * world.size


def lengths_of_shards(q, k, layout, key_layout, world: World) -> tuple[int, int]:
    """(queries, keys) of a sequence over all ranks."""
    of_keys = layout if key_layout is None else key_layout
    return _tokens(layout, q.shape[-3], world), _tokens(of_keys, k.shape[-3], world)


_order = {"attention": "[(batch,) tokens, heads, head_dim]", "varlen": "[tokens, heads, head_dim]"}


def _warn_of_unseen(op: str, world: World, mask, offsets, k_positions, q_lengths, k_lengths) -> None:
    """Warns of queries that see no key, once per world and lengths. They are legal, but usually mean that the tensors have
    another axis order."""
    if mask != "causal" or offsets is not None or k_positions is not None:
        return
    for queries, keys in zip(q_lengths, k_lengths):
        job = op, q_lengths, k_lengths
        if queries > keys and job not in world.warned:
            world.warned.add(job)
            warnings.warn(f"ringattn.{op}: {queries - keys} of {queries} queries of a sequence see no key ({keys} keys, a causal "
                          f"mask aligned to the last one; q, k and v were taken for {_order[op]}). Pass order=\"bhtd\" for "
                          "SDPA's layout, q_offset for another alignment, or mask=\"full\".", stacklevel=4)  # fmt: skip
            return


def _check_tokens(name: str, rows, lengths, begins: str) -> None:
    """Checks cu_seqlens on one rank, which has all tokens."""
    if sum(lengths) != rows.shape[0]:
        refuse(f"{begins} ends at {sum(lengths)}, and {name} has {rows.shape[0]} tokens", "its last number is all tokens",
               f"Check {begins} against {name}.")  # fmt: skip


def _run(prepared: Attention, q, k, v, sinks, out):
    """Returns out, lse, and the arrays passed to the library."""
    q, k, v = (rows if isinstance(rows, Compressed) else contiguous_heads(rows) for rows in (q, k, v))
    if out is None:
        out = empty(q, (q.shape[0], q.shape[1], v.shape[2]))
    lse = empty(q, (q.shape[0], q.shape[1]), "float32")
    prepared._do(q, _job.shown(q, k, v) | {"sinks": sinks, "out": out, "lse": lse}, prepared.workspace_bytes)
    return out, lse, {"q": q, "k": k, "v": v, "sinks": sinks, "out": out, "lse": lse}


def _recording(wanting: str, job: tuple, limits: dict, out):
    """Returns the operators that autograd records. Prepares the backward pass first, so that a job without gradients is refused
    before its forward pass runs. wanting: the name of a tensor that requires a gradient. job: arguments of prepared_of()."""
    from . import torch_ops  # noqa: PLC0415, needs torch
    from ._attention_backward import AttentionBackward, default_scale  # noqa: PLC0415, which needs this

    *shards, positions, mask, softmax_scale, softcap, sinks, layout, key_layout = job
    _, q, k, v, *_ = shards
    _gradients.check(wanting, isinstance(k, Compressed) or isinstance(v, Compressed), positions, out)
    scale = default_scale(q) if softmax_scale is None else softmax_scale
    prepared_of(AttentionBackward, *shards, None, mask, scale, softcap, sinks, layout, key_layout, **limits)
    return torch_ops


@traced
def attention(q, k, v, *, mask: _job.Mask = "causal", softmax_scale: float | None = None, softcap: float = 0.0,
              sinks=None, q_offset: int | None = None, layout: str | Layout | None = None,
              key_layout: str | Layout | None = None, lengths: tuple[int, int] | None = None,
              k_positions=None, k_lengths: int | Sequence[int] | None = None, world: World | None = None, out=None,
              threads: int = 0, memory_budget: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Attention over sequences of equal length, causal unless mask says otherwise. Collective with several ranks.

    Arrays are NumPy arrays or PyTorch tensors of one dtype, float32, float16 or bfloat16, with any strides; an array whose last
    axis is not contiguous is copied; sinks must be contiguous. Keywords of other libraries with the same meaning are accepted
    (causal=, window_size=, scale=, return_lse=, enable_gqa=, order="bhtd" for SDPA's axes): docs/porting.md.

    Args:
        q: [tokens, heads, head_dim] or [batch, tokens, heads, head_dim]. head_dim is a multiple of 8.
        k, v: [(batch,) keys, kv_heads, head_dim or head_dim_v]; kv_heads divides heads. Either may be a ringattn.Compressed.
        mask: "causal", "full" or (left, right): the query at position p sees keys p - left to p + right; -1 is no limit.
        softmax_scale: factor of the scores. None: 1 / sqrt(head_dim).
        softcap: score = softcap * tanh(score / softcap). 0: off.
        sinks: float32 [heads], logits that are added to the softmax denominator.
        q_offset: query i has key position i + q_offset. None: queries end where keys end.
        layout: with several ranks, a name or a Layout (ringattn.layouts) that says which tokens this rank's rows are.
        key_layout: layout of k and v, if it differs.
        lengths: (queries, keys) of a sequence over all ranks. None: the Layout's lengths, or this rank's times the number of
            ranks.
        k_positions: int32 [(batch,) keys, kv_heads or 1] over all ranks, original positions of keys after ringattn.evict().
        k_lengths: original sequence lengths, before eviction. Queries end there if q_offset is None.
        world: the ranks. None: only this rank.
        out: array for the result. None: a new one.
        threads: CPU threads. 0: this rank's share of the processors.
        memory_budget: bytes that the rank may allocate. 0: no limit.
        timeout: seconds to wait for a peer without heartbeats.

    Returns:
        (out, lse). out: [(batch,) tokens, heads, head_dim_v] of q's dtype. lse: float32 [(batch,) tokens, heads], natural
        logarithm of the softmax denominator, -inf if a query sees no key (in flash_attn and in files heads come before tokens).
        PyTorch tensors have gradients of q, k, v and sinks, through both out and lse. The gradient of sinks is already the sum
        over all ranks.

    Raises:
        CallError: a keyword is unknown.
        UsageError: shapes, dtypes or options contradict each other, or those of other ranks.
        UnsupportedError: no kernel computes the job, or it has no gradient.
        OutOfMemory: memory_budget is too small.
        PeerError: another rank failed, or sent no heartbeat for `timeout` seconds.

    Formula:
        Softmax attention (arXiv:1706.03762), with fixed KV splits that are merged in order (docs/how-it-works.md)::

            score_j = softmax_scale * dot(q, k_j)        over the keys j that the query sees
            lse = log(sum_j exp(score_j) + exp(sink))    without exp(sink) if there are no sinks
            out = sum_j exp(score_j - lse) * v_j

    Example:
        >>> q = np.ones((100, 8, 64), "float32")
        >>> k = v = np.ones((100, 2, 64), "float32")
        >>> out, lse = ringattn.attention(q, k, v, mask=(31, 0))
        >>> out.shape, lse.shape
        ((100, 8, 64), (100, 8))
    """
    if unknown:
        refuse_unknown("attention", unknown)
    lengths = None if lengths is None else _pair(lengths)
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    settings = ("attention", mask, softmax_scale, softcap, q_offset, layout, key_layout, lengths, threads, memory_budget,
                timeout)  # fmt: skip
    call = None
    if k_positions is None and k_lengths is None:
        call, results = _job.known_call(world, settings, given, out)
        if results is not None:
            return results
    _job.read_mask(mask)
    _job.check_arrays("attention", {"q": q, "k": k, "v": v}, sinks=sinks, out=out)
    _job.check_dtypes(q=q, k=k, v=v, out=out)
    batched = q.ndim == 4
    if q.ndim not in (3, 4) or k.ndim != q.ndim or v.ndim != q.ndim:
        refuse(
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} axes",
            "they have [(batch,) tokens, heads, head_dim]",
            "Reshape them.",
        )
    check_leading("q", q.shape[: q.ndim - 3], {"k": k}, 3, "Give q, k and v one batch.")
    check_leading("k", k.shape[: k.ndim - 2], {"v": v}, 2, "Pass a value for each key.")
    check_leading("q", q.shape[: q.ndim - 2], {"out": out}, 2, "Pass an out of q's shape, or none.")
    _job.check_head_dim(q, v)
    own = _job.world_of(q, world)
    batch = q.shape[0] if batched else 1
    q_lengths, key_lengths = ((length,) * batch for length in lengths or lengths_of_shards(q, k, layout, key_layout, own))
    _warn_of_unseen("attention", own, mask, q_offset, k_positions, q_lengths, key_lengths)
    q_offsets = None if q_offset is None else (as_int(q_offset, "q_offset"),) * batch
    positions = _job.read_positions(k, k_positions, k_lengths, sum(key_lengths), batch, q_offset is not None)
    job = (own, q, k, v, q_lengths, key_lengths, q_offsets, positions, mask, softmax_scale, softcap, sinks, layout, key_layout)
    limits = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    wanting = _gradients.requiring(given)
    if wanting is not None:
        ops = _recording(wanting, job, limits, out)
        return ops.attention(q, k, v, mask=mask, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, q_offset=q_offset,
                             layout=layout, key_layout=key_layout, lengths=lengths, world=world, threads=threads,
                             memory_budget=memory_budget, timeout=timeout)  # fmt: skip
    prepared = prepared_of(Attention, *job, **limits)
    if batched:
        q, k, v, out = flat_rows(q), flat_rows(k), flat_rows(v), flat_view(out)
    made, lse, shown = _run(prepared, q, k, v, sinks, out)
    if batched:
        form = given["q"].shape[:3]
        made, lse = made.reshape(*form, v.shape[2]), lse.reshape(form)
    _job.keep_call(world, call, prepared, shown, given, made, lse, prepared.workspace_bytes)
    return made, lse


@traced
def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, mask: _job.Mask = "causal", softmax_scale: float | None = None,
           softcap: float = 0.0, sinks=None, q_offsets=None, layout: str | Layout | None = None,
           key_layout: str | Layout | None = None, k_positions=None, k_lengths: Sequence[int] | None = None,
           world: World | None = None, out=None, threads: int = 0, memory_budget: int = 0, timeout: float = 60.0,
           **unknown):  # fmt: skip
    """Attention over a packed batch of sequences of any lengths, causal unless mask says otherwise. Collective with several
    ranks.

    Args:
        q: [tokens, heads, head_dim], this rank's tokens of all sequences, packed.
        k, v: [keys, kv_heads, head_dim or head_dim_v], as q.
        cu_seqlens_q: [sequences + 1] cumulative lengths of the queries over all ranks. Reading them from a GPU waits for it, so
            keep them on the host.
        cu_seqlens_k: the same of the keys. None: keys have the lengths of queries.
        q_offsets: [sequences], key position of the first query of each sequence. None: queries end where keys end.
        k_lengths: [sequences], original lengths, before eviction. Queries end there if q_offsets is None.
        mask, softmax_scale, softcap, sinks, layout, key_layout, k_positions, world, out, threads, memory_budget, timeout: as in
            attention(), without the batch axis.

    Returns:
        (out, lse): [tokens, heads, head_dim_v] of q's dtype and float32 [tokens, heads], with the gradients of attention().

    Raises:
        UsageError: cu_seqlens don't ascend from 0 to the number of tokens; or as attention().
        CallError, UnsupportedError, OutOfMemory, PeerError: as attention().

    Formula:
        That of attention() for each sequence.

    Example:
        >>> q = np.ones((100, 8, 64), "float32")
        >>> out, lse = ringattn.varlen(q, q, q, [0, 30, 100])
        >>> out.shape
        (100, 8, 64)
    """
    if unknown:
        refuse_unknown("varlen", unknown)
    q_lengths = lengths_of(cu_seqlens_q, "cu_seqlens_q")
    key_lengths = q_lengths if cu_seqlens_k is None else lengths_of(cu_seqlens_k, "cu_seqlens_k")
    offsets = None if q_offsets is None else tuple(as_ints(q_offsets, "q_offsets"))
    given = {"q": q, "k": k, "v": v, "sinks": sinks}
    settings = ("varlen", q_lengths, key_lengths, offsets, mask, softmax_scale, softcap, layout, key_layout, threads,
                memory_budget, timeout)  # fmt: skip
    call = None
    if k_positions is None and k_lengths is None:
        call, results = _job.known_call(world, settings, given, out)
        if results is not None:
            return results
    _job.read_mask(mask)
    _job.check_arrays("varlen", {"q": q, "k": k, "v": v}, sinks=sinks, out=out)
    _job.check_dtypes(q=q, k=k, v=v, out=out)
    for name, rows in (("q", q), ("k", k), ("v", v)):
        check_axes(name, rows, (3,), "[tokens, heads, head_dim], all sequences packed")
    _job.check_head_dim(q, v)
    own = _job.world_of(q, world)
    if own.size == 1:
        _check_tokens("q", q, q_lengths, "cu_seqlens_q")
        _check_tokens("k", k, key_lengths, "cu_seqlens_q" if cu_seqlens_k is None else "cu_seqlens_k")
    _warn_of_unseen("varlen", own, mask, offsets, k_positions, q_lengths, key_lengths)
    positions = _job.read_positions(k, k_positions, k_lengths, sum(key_lengths), len(q_lengths), offsets is not None)
    job = (own, q, k, v, q_lengths, key_lengths, offsets, positions, mask, softmax_scale, softcap, sinks, layout, key_layout)
    limits = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    wanting = _gradients.requiring(given)
    if wanting is not None:
        ops = _recording(wanting, job, limits, out)
        return ops.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, mask=mask, softmax_scale=softmax_scale, softcap=softcap,
                          sinks=sinks, q_offsets=offsets, layout=layout, key_layout=key_layout, world=world, threads=threads,
                          memory_budget=memory_budget, timeout=timeout)  # fmt: skip
    prepared = prepared_of(Attention, *job, **limits)
    made, lse, shown = _run(prepared, q, k, v, sinks, out)
    _job.keep_call(world, call, prepared, shown, given, made, lse, prepared.workspace_bytes)
    return made, lse
