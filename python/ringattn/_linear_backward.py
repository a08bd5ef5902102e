# SPDX-License-Identifier: Apache-2.0
"""Gradients of linear(), on the forward's shards. PyTorch's operators in torch_linear_ops call them."""

import ctypes

import torch
from torch import Tensor

from . import _job, _linear
from ._abi import lib
from ._attention_backward import readable
from ._tensors import contiguous_heads


class LinearBackward(_job.Prepared):
    """A prepared backward pass. Creating one is collective if ranks share the layer."""

    op = "linear_backward"

    def transposed(self, weight: Tensor) -> Tensor:
        """The weight transposed, with its columns in the order in which dx sums them."""
        begins, ends, count = (ctypes.c_int64 * 16)(), (ctypes.c_int64 * 16)(), ctypes.c_int64()
        self.turn.run(lambda: lib.linear_backward_order(self.handle, begins, ends, ctypes.byref(count)))
        runs = [weight[begins[i] : ends[i]] for i in range(count.value)]
        return (weight if len(runs) <= 1 else torch.cat(runs)).t().contiguous()


def linear_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool], *, activation, parallel,
                    output, in_features, out_features, column_unit, world, threads, timeout):  # fmt: skip
    """The gradients of linear() with these arguments. needed: which of (dx, dweight, dbias) to compute; the others are empty.
    dweight and dbias are fp32 sums over this call's tokens."""
    own = _linear.world_for(x, world, parallel, output)
    shape = _linear.shape_of(x, weight, None, None, activation, parallel, in_features, out_features, column_unit, own.size,
                             own.rank)  # fmt: skip
    max_tokens, make = _linear.spec_of(x, shape, activation, parallel, output, bias is not None, column_unit)
    key = (max_tokens, str(x.dtype), shape, activation, bias is not None, parallel, output, column_unit, threads, timeout)
    prepared = own.prepared(
        ("linear_backward", *key), lambda: LinearBackward(own, make(), _linear.options_of(threads, timeout))
    )
    dx = x.new_empty(x.shape if needed[0] else 0)
    dweight = weight.new_empty(weight.shape if needed[1] else 0, dtype=torch.float32)
    dbias = weight.new_empty(weight.shape[0] if needed[2] else 0, dtype=torch.float32)
    activated = activation != "none"
    arrays = {
        "x": _linear.as_rows(x), "dy": _linear.as_rows(readable(dy)),
        "weight": contiguous_heads(weight) if activated else None,
        "bias": bias.contiguous() if activated and bias is not None else None,
        "transposed": prepared.transposed(weight) if needed[0] else None, "dx": _linear.as_rows(dx) if needed[0] else None,
        "dweight": dweight if needed[1] else None, "dbias": dbias if needed[2] else None,
    }  # fmt: skip
    prepared._do(x, arrays)
    return dx, dweight, dbias
