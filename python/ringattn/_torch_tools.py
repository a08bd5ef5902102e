# SPDX-License-Identifier: Apache-2.0
"""Tools to define the operators of torch_ops and torch_ssm_ops."""

import torch
from torch import Tensor, library

from . import _gradients, _job, layouts, worlds
from ._arguments import refuse_unknown
from ._compression import refuse_compressed
from ._errors import refuse, unsupported
from ._tensors import check_array, type_name

LIBRARY = library.Library("ringattn", "DEF")

# (index, name, has a gradient) of the tensor arguments of each operator, single or in lists.
_tensors: dict[str, tuple[tuple[int, str, bool], ...]] = {}


def operator(name: str, mutates: tuple[str, ...] = ()):
    """Registers the function as an operator for CPU and GPUs. Operators of _gradients.INPUTS get their gradient formula from
    gradients_of(). Other operators refuse tensors that require gradients while autograd records, so a traced graph can't lose
    gradients silently. This Python kernel takes a few microseconds per call, and none under torch.inference_mode();
    library.custom_op() would add more."""

    def register(function):
        schema = name + library.infer_schema(function, mutates_args=mutates)
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, function, device)
        defined = getattr(torch.ops.ringattn, name).default
        _tensors[name] = tuple(
            (place, argument.name, argument.name in _gradients.INPUTS.get(name, ()))
            for place, argument in enumerate(defined._schema.arguments)
            if "Tensor" in str(argument.type)
        )
        if name in _gradients.INPUTS:
            return function

        def autograd(keys, *arguments):
            refuse_gradients(name, arguments)
            return defined.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
        return function

    return register


def constant_result(function):
    """torch.compiler.assume_constant_result() without its import of torch._dynamo, which takes seconds."""
    function._dynamo_marked_constant = True
    return function


@constant_result
def _tensors_of(op: str) -> tuple[tuple[int, str, bool], ...]:
    return _tensors[op]


def refuse_gradients(op: str, arguments) -> None:
    """arguments: the operator's positional arguments; the last ones may be missing."""
    if not torch.is_grad_enabled():
        return
    for place, name, differentiable in _tensors_of(op):
        given = arguments[place] if place < len(arguments) and not differentiable else None
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            refuse_gradient(op, name, tensor)


def refuse_gradient(op: str, name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        if op.endswith("_backward"):
            _gradients.refuse_double_backward(name, op)
        unsupported(f"{name} of {op} requires a gradient", _gradients.WITHOUT, _gradients.SUGGESTION)


def gradients_of(name: str, setup_context, backward) -> None:
    """Registers the gradient formula of an operator."""
    library.register_autograd(f"ringattn::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def run(op: str, *arguments):
    """Calls the operator. Required gradients are also refused before the operator: there torch.compile falls back to eager mode
    and the caller gets ringattn's error, while torch.compile would wrap an operator's error in one of its own."""
    for place, name, _ in _tensors_of(op):
        refuse_compressed(op, name, arguments[place] if place < len(arguments) else None)
    refuse_gradients(op, arguments)
    return getattr(torch.ops.ringattn, op)(*arguments)


def fake(name: str):
    """Registers the function as the fake implementation of an operator."""
    return library.register_fake(f"ringattn::{name}", lib=LIBRARY)


def constant(length: int) -> int:
    """A size that is a constant of the graph even with dynamic shapes: heads and dims, from which formats are made."""
    if type(length) is int and not torch.compiler.is_compiling():
        return length
    from torch.fx.experimental import symbolic_shapes  # noqa: PLC0415, imports SymPy

    return symbolic_shapes.guard_scalar(length)


def mask_of(mask: str, left: int, right: int):
    return (left, right) if mask == "window" else mask


def mask_arguments(mask) -> tuple[str, int, int]:
    kind, left, right = _job.read_mask(mask)
    return (mask, 0, 0) if isinstance(mask, str) else ("window", left, right)


def layout_of(layout: str | None):
    """Inverse of Layout.text: a layout's name, or the Layout of a text."""
    return layouts.of_text(layout) if layout is not None and layout.startswith("lengths") else layout


def layout_argument(layout) -> str | None:
    if layout is None:
        return None
    if isinstance(layout, layouts.Layout):
        return layout.text
    layouts.check_name(layout)
    return layout


def world_of(key: str | None):
    return None if key is None else worlds.of_key(key)


def key_of(world) -> str | None:
    return None if world is None else world.key


def new_rows(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], dim)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def given(op: str, out: Tensor | None, made: Tensor) -> Tensor:
    """An operator's result, copied to out if the caller passes one. out must match, because copy_() would round and broadcast."""
    if out is None:
        return made
    check_array("out", out)
    refuse_gradient(op, "out", out)
    if out.shape != made.shape or out.dtype != made.dtype or out.device != made.device:
        is_like, wanted = (f"{type_name(x.dtype)} {list(x.shape)} on {x.device}" for x in (out, made))
        refuse(f"out is {is_like}", f"{op} makes {wanted}", "Pass one like it, or none.")
    return out.copy_(made)


def tensor_of(values):
    return values if values is None or isinstance(values, Tensor) else torch.tensor(values)


def check_known(op: str, unknown: dict) -> None:
    if unknown:
        refuse_unknown(op, unknown)


def check_alone(op: str, world) -> None:
    if world is not None and world.size > 1:
        unsupported(f"{op} over {world.size} ranks can't be compiled", "the shapes of its results depend on the rank",
                    "Call it outside of the compiled part.")  # fmt: skip
