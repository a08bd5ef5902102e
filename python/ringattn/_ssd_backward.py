# SPDX-License-Identifier: Apache-2.0
"""Gradients of ssd(), on the forward's rows. PyTorch's operators in torch_ssm_ops call them."""

import math

import torch
from torch import Tensor

from . import _abi, _job, _ssm
from ._attention_backward import readable
from ._tensors import as_rows, contiguous_heads


class SsdBackward(_ssm.Ssm):
    """A prepared backward pass. Creating one is collective."""

    op = "ssd_backward"
    settings = (_abi.GRADIENTS_AS_INPUTS,)


def ssd_backward(dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, *, dt_softplus, dt_limit, layout, world,
                 threads, memory_budget, timeout) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of ssd() with respect to x, dt, A, B, C, D, z, dt_bias and initial_states; empty for arguments that are None.
    dy, dstates: the gradients of its results; dstates may be None. On a GPU this waits, because the gradients of A, D and dt_bias
    are summed on the host."""
    own = _job.world_of(x, world)
    lengths = _ssm.lengths_of_runs(x, x.ndim == 4, cu_seqlens, layout, own)
    heads, head_dim = x.shape[-2:]
    flags = _ssm.flags_of(D, z, dt_bias, dt_softplus)
    # Ranks need not agree on whether their states have gradients.
    final = dstates is not None or own.size > 1
    flags |= {"initial": int(initial_states is not None), "final": int(final)}
    members = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    prepared = _ssm.prepared_of(SsdBackward, own, x, heads, head_dim, B.shape[-1], B.shape[-2], A.ndim == 2, lengths, layout,
                                flags, _ssm.limits_of(dt_limit), members)  # fmt: skip

    def rows(array):
        return None if array is None else as_rows(contiguous_heads(array))

    def new(array, tail):
        return None if array is None else array.new_empty((math.prod(x.shape[:-2]), *tail))

    def sums(array):
        return None if array is None else torch.empty(heads, dtype=torch.float32)

    facts, groups = prepared.facts, B.shape[-2:]
    if final and dstates is None:
        dstates = torch.zeros((facts.ending, heads, head_dim, B.shape[-1]), dtype=torch.float32, device=x.device)
    initial = initial_states if facts.beginning else None
    dinitial = None if initial is None else torch.empty_like(initial, memory_format=torch.contiguous_format)
    made = {"dx": new(x, (heads, head_dim)), "ddt": new(dt, (heads, 1)), "da": sums(A), "db": new(B, groups),
            "dc": new(C, groups), "dd": sums(D), "dz": new(z, (heads, head_dim)), "ddt_bias": sums(dt_bias),
            "dinitial_states": dinitial}  # fmt: skip
    arrays = {"x": rows(x), "dt": as_rows(dt, 1)[..., None], "b": rows(B), "c": rows(C), "z": rows(z), "a": A, "d": D,
              "dt_bias": dt_bias, "initial_states": initial, "dy": rows(readable(dy)),
              "dfinal_states": dstates.resolve_neg().contiguous() if final and facts.ending else None}  # fmt: skip
    prepared._do(x, arrays | made, synchronous=True)
    inputs = x, dt, A, B, C, D, z, dt_bias, initial_states
    return tuple(_like(given, gradient, x) for given, gradient in zip(inputs, made.values()))


def _like(given: Tensor | None, gradient: Tensor | None, x: Tensor) -> Tensor:
    if given is None:
        return torch.empty(0, device=x.device)
    # This rank may have no initial states.
    return torch.empty_like(given) if gradient is None else gradient.to(x.device).view(given.shape)
