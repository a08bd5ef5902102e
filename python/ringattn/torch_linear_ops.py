# SPDX-License-Identifier: Apache-2.0
"""torch.ops.ringattn.linear: the operator of linear() and of ringattn.nn.Linear.

A world is passed as World.key, as in torch_ops."""

import torch
from torch import Tensor

from . import _gradients, _linear, _linear_backward, worlds
from ._torch_tools import check_known, fake, given, gradients_of, key_of, operator, run, world_of


@operator("linear")
def _linear_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, zeros: Tensor | None, activation: str, parallel: str,
    output: str, in_features: int | None, out_features: int | None, column_unit: int, threads: int, timeout: float,
    world: str | None = None,
) -> Tensor:  # fmt: skip
    with torch.no_grad():  # below autograd
        return _linear.compute(
            x, weight, bias, scales, zeros, activation=activation, parallel=parallel, output=output, in_features=in_features,
            out_features=out_features, column_unit=column_unit, world=world_of(world), out=None, threads=threads,
            timeout=timeout,
        )  # fmt: skip


@fake("linear")
def _(x, weight, bias, scales, zeros, activation, parallel, output, in_features, out_features, column_unit, threads, timeout,
      world=None):  # fmt: skip
    own = None if world is None else worlds.of_key(world)
    ranks, rank = (1, 0) if own is None else (own.size, own.rank)
    columns = weight.shape[0] // 2 if activation in _linear.GATED else weight.shape[0]
    leading, tokens = x.shape[:-1], 1
    for length in leading:
        tokens = tokens * length
    whole = columns if out_features is None else out_features
    return x.new_empty(_linear.output_shape(leading, tokens, whole, columns, parallel, output, ranks, rank))


@operator("linear_backward")
def _linear_backward_op(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needed: list[bool], activation: str, parallel: str, output: str,
    in_features: int | None, out_features: int | None, column_unit: int, threads: int, timeout: float, world: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight and bias, the last two in fp32; gradients that are not needed are empty."""
    return _linear_backward.linear_backward(
        dy, x, weight, bias, needed, activation=activation, parallel=parallel, output=output, in_features=in_features,
        out_features=out_features, column_unit=column_unit, world=world_of(world), threads=threads, timeout=timeout,
    )  # fmt: skip


@fake("linear_backward")
def _(dy, x, weight, bias, needed, *_):
    of_weights = (weight.new_empty(shape if wanted else (0,), dtype=torch.float32)
                  for shape, wanted in ((weight.shape, needed[1]), (weight.shape[:1], needed[2])))  # fmt: skip
    return x.new_empty(x.shape if needed[0] else (0,)), *of_weights


def _save_linear(ctx, inputs, output):
    x, weight, bias, scales, zeros, *settings = inputs
    given_arrays = {"x": x, "weight": weight, "bias": bias}
    names = [name for name, array in given_arrays.items() if array is not None and array.requires_grad]
    if names:
        _gradients.check_linear(names[0], _linear.is_quantized(weight), None)
    ctx.settings = tuple(settings)
    ctx.dtypes = tuple(None if array is None else _gradients.dtype_of(array) for array in given_arrays.values())
    ctx.save_for_backward(x, weight, bias)
    ctx.world = None if settings[-1] is None else worlds.of_key(settings[-1])  # keeps it


def _linear_gradients(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    needed = [bool(ctx.needs_input_grad[place]) for place in range(3)]
    made = torch.ops.ringattn.linear_backward(dy, x, weight, bias, needed, *ctx.settings)
    of_inputs = [None] * len(ctx.needs_input_grad)
    of_inputs[:3] = (gradient.to(dtype) if wanted else None for gradient, wanted, dtype in zip(made, needed, ctx.dtypes))
    return tuple(of_inputs)


gradients_of("linear", _save_linear, _linear_gradients)


def called(x, weight, bias, scales, zeros, settings: dict) -> Tensor:
    """Calls the operator with the arguments of dispatch()."""
    world = settings["world"]
    return run("linear", x, weight, bias, scales, zeros, settings["activation"], settings["parallel"], settings["output"],
               settings["in_features"], settings["out_features"], settings["column_unit"], settings["threads"],
               settings["timeout"], key_of(world))  # fmt: skip


def linear(x, weight, bias=None, *, scales=None, zeros=None, activation="none", parallel="none", output="shard",
           in_features=None, out_features=None, column_unit=0, world=None, out=None, threads=0, timeout=60.0,
           **unknown):  # fmt: skip
    check_known("linear", unknown)
    x, weight, bias = _linear.autocast(x, weight, bias)
    y = called(x, weight, bias, scales, zeros, {
        "activation": activation, "parallel": parallel, "output": output, "in_features": in_features,
        "out_features": out_features, "column_unit": column_unit, "world": world, "threads": threads,
        "timeout": timeout})  # fmt: skip
    return given("linear", out, y)
