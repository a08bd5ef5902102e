# SPDX-License-Identifier: Apache-2.0
"""Gradients of mla() in its expanded form, on the forward's shards. PyTorch's operators in torch_ops call them."""

import torch
from torch import Tensor

from . import _job, _mla
from ._arguments import lengths_of
from ._attention_backward import default_scale, readable  # noqa: F401, the scale of queries with their rotary part
from ._tensors import contiguous_heads
from .worlds import World


class MlaBackward(_job.Prepared):
    """A prepared backward pass. Creating one is collective."""

    op = "mla_backward"

    def __init__(self, world: World, spec, batch, form, options):
        super().__init__(world, spec, batch, options)


def _with_rows(matrix: Tensor) -> Tensor:
    """A matrix whose last axis is contiguous."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def mla_backward(dout, dlse, q, latent, k_rope, w_uk, w_uv, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, *, mask, softmax_scale,
                 softcap, q_offsets, layout, key_layout, world, threads, memory_budget,
                 timeout):  # fmt: skip
    """The gradients of mla() with these arguments. out, lse: its results. dout, dlse: their gradients; dlse may be None.
    Returns (dq, dlatent, dk_rope, dw_uk, dw_uv, dsinks); dsinks is empty without sinks. dw_uk, dw_uv and dsinks are sums
    over all ranks."""
    own = _job.world_of(q, world)
    cu = [None if at is None else lengths_of(at, name)
          for at, name in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k"))]  # fmt: skip
    offsets = None if q_offsets is None else tuple(q_offsets)
    prepared = _mla.prepared_of(MlaBackward, own, q, latent, k_rope, w_uk, w_uv, cu, offsets, "expanded", None, None, mask,
                                softmax_scale, softcap, sinks, layout, key_layout, threads=threads, memory_budget=memory_budget,
                                timeout_seconds=timeout)  # fmt: skip
    rows = {"q": contiguous_heads(q), "latent": _mla.one_head(latent), "k_rope": _mla.one_head(k_rope)}
    dq, dlatent, dk_rope = (x.new_empty(x.shape) for x in rows.values())
    dw_uk, dw_uv = (torch.empty(w.shape, dtype=torch.float32, device=w.device) for w in (w_uk, w_uv))
    dsinks = torch.empty(0 if sinks is None else len(sinks), dtype=torch.float32, device=q.device)
    arrays = rows | {"w_uk": _with_rows(w_uk), "w_uv": _with_rows(w_uv), "sinks": sinks, "out": contiguous_heads(out), "lse": lse,
                     "dout": readable(dout), "dlse": None if dlse is None else dlse.resolve_neg(), "dq": dq,
                     "dlatent": dlatent, "dk_rope": dk_rope, "dw_uk": dw_uk, "dw_uv": dw_uv,
                     "dsinks": None if sinks is None else dsinks}  # fmt: skip
    prepared._do(q, arrays, prepared.facts.workspace_bytes)
    return (dq, dlatent.view(latent.shape), dk_rope.view(k_rope.shape), dw_uk.to(w_uk.dtype), dw_uv.to(w_uv.dtype), dsinks)
