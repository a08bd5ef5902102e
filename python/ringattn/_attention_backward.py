# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention() and varlen(), on the forward's shards. PyTorch's operators in torch_ops call them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _abi, _attention, _job
from ._arguments import lengths_of
from ._tensors import contiguous_heads, flat_rows
from .worlds import World


class AttentionBackward(_job.Prepared):
    """A prepared backward pass. Creating one is collective."""

    op = "attention_backward"

    def __init__(self, world: World, spec, q_lengths: Sequence[int], k_lengths: Sequence[int], q_offsets: Sequence[int] | None,
                 options, positions=None):  # fmt: skip
        batch = _job.c_batch(q_lengths, k_lengths, q_offsets, positions)
        super().__init__(world, spec, batch, _abi.GRADIENTS_AS_INPUTS, options)

    def run(self, q: Tensor, arrays: dict) -> None:
        """arrays: the members of the tensors struct by name."""
        self._do(q, arrays, self.facts.workspace_bytes)


def default_scale(q: Tensor) -> float:
    """The softmax_scale of calls that pass None."""
    return 1.0 / math.sqrt(q.shape[-1])


def readable(gradient: Tensor) -> Tensor:
    """A gradient of rows in a form that the library can read. Autograd may pass expanded or negated views."""
    gradient = gradient.resolve_neg()
    repeated = any(stride == 0 and length > 1 for stride, length in zip(gradient.stride(), gradient.shape))
    return gradient.contiguous() if repeated else contiguous_heads(gradient)


def _gradients(world: World, dout, dlse, q, k, v, sinks, out, lse, q_lengths, k_lengths, q_offsets, settings, layouts, limits):
    """(dq, dk, dv, dsinks); dsinks is empty without sinks. Rows are [tokens, heads, dim]."""
    prepared = _attention.prepared_of(AttentionBackward, world, q, k, v, q_lengths, k_lengths, q_offsets, None, *settings, sinks,
                                      *layouts, **limits)  # fmt: skip
    dq, dk, dv = (torch.empty_like(rows, memory_format=torch.contiguous_format) for rows in (q, k, v))
    dsinks = torch.empty(0 if sinks is None else len(sinks), dtype=torch.float32, device=q.device)
    rows = {"q": q, "k": k, "v": v, "out": out}
    arrays = {name: contiguous_heads(array) for name, array in rows.items()}
    arrays |= {"dout": readable(dout), "lse": lse, "dlse": None if dlse is None else dlse.resolve_neg(), "sinks": sinks}
    arrays |= {"dq": dq, "dk": dk, "dv": dv, "dsinks": None if sinks is None else dsinks}
    prepared.run(q, arrays)
    return dq, dk, dv, dsinks


def attention_backward(dout, dlse, q, k, v, sinks, out, lse, *, mask, softmax_scale, softcap, q_offset, layout, key_layout,
                       lengths, world, threads, memory_budget, timeout):  # fmt: skip
    """The gradients of attention() with these arguments. out, lse: its results. dout, dlse: their gradients; dlse may be
    None."""
    own = _job.world_of(q, world)
    batch = q.shape[0] if q.ndim == 4 else 1
    q_tokens, k_tokens = lengths or _attention.lengths_of_shards(q, k, layout, key_layout, own)
    offsets = None if q_offset is None else (q_offset,) * batch
    limits = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    shapes = q.shape, k.shape, v.shape
    if q.ndim == 4:
        dout, q, k, v, out = map(flat_rows, (dout, q, k, v, out))
        dlse, lse = (None if values is None else values.flatten(0, 1) for values in (dlse, lse))
    *rows, dsinks = _gradients(own, dout, dlse, q, k, v, sinks, out, lse, (q_tokens,) * batch, (k_tokens,) * batch, offsets,
                               (mask, softmax_scale, softcap), (layout, key_layout), limits)  # fmt: skip
    dq, dk, dv = (gradient.view(shape) for gradient, shape in zip(rows, shapes))
    return dq, dk, dv, dsinks


def varlen_backward(dout, dlse, q, k, v, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, *, mask, softmax_scale, softcap, q_offsets,
                    layout, key_layout, world, threads, memory_budget, timeout):  # fmt: skip
    """The gradients of varlen() with these arguments, as attention_backward()."""
    q_lengths = lengths_of(cu_seqlens_q, "cu_seqlens_q")
    k_lengths = q_lengths if cu_seqlens_k is None else lengths_of(cu_seqlens_k, "cu_seqlens_k")
    offsets = None if q_offsets is None else tuple(q_offsets)
    limits = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    return _gradients(_job.world_of(q, world), dout, dlse, q, k, v, sinks, out, lse, q_lengths, k_lengths, offsets,
                      (mask, softmax_scale, softcap), (layout, key_layout), limits)  # fmt: skip
