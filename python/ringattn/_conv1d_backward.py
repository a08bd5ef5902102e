# SPDX-License-Identifier: Apache-2.0
"""Gradients of causal_conv1d(), on the forward's shards. PyTorch's operators in torch_ssm_ops call them."""

import torch
from torch import Tensor

from . import _job
from ._attention_backward import readable
from ._conv1d import prepared_of, rows_of
from ._ssm import lengths_of_runs
from ._tensors import as_rows


class CausalConv1dBackward(_job.Prepared):
    """A prepared backward pass. Creating one is collective."""

    op = "causal_conv1d_backward"


def causal_conv1d_backward(dy: Tensor, dstates: Tensor | None, x, weight, bias, initial_states, cu_seqlens, *, activation, layout,
                           world, threads, timeout):  # fmt: skip
    """The gradients of causal_conv1d() with these arguments. dy, dstates: gradients of its results; dstates may be None. Returns
    (dx, dweight, dbias, dinitial_states); the last two are empty without bias and initial states. dweight and dbias are sums
    over all ranks."""
    own = _job.world_of(x, world)
    lengths = lengths_of_runs(x, x.ndim == 3, cu_seqlens, layout, own)
    channels, width = weight.shape
    # Ranks need not agree on whether their states have gradients.
    final = dstates is not None or own.size > 1
    prepared = prepared_of(CausalConv1dBackward, own, x, channels, width, bias, activation, lengths, layout,
                           (initial_states is not None, final, False),
                           {"threads": threads, "timeout_seconds": timeout})  # fmt: skip
    facts = prepared.facts
    if final and dstates is None:
        dstates = x.new_zeros((facts.ending, width - 1, channels))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    dbias = weight.new_empty(0 if bias is None else channels)
    halos = initial_states is not None and facts.beginning > 0
    dinitial = x.new_empty(0 if initial_states is None else initial_states.shape)
    arrays = {"x": rows_of(as_rows(x, 1)), "weight": weight, "bias": bias, "initial_halos": initial_states if halos else None,
              "dy": rows_of(as_rows(readable(dy), 1)),
              "dfinal_halos": dstates.resolve_neg().contiguous() if final and facts.ending else None,
              "dx": rows_of(as_rows(dx, 1)), "dweight": dweight, "dbias": None if bias is None else dbias,
              "dinitial_halos": dinitial if halos else None}  # fmt: skip
    prepared._do(x, arrays)
    return dx, dweight, dbias, dinitial
