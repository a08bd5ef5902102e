# SPDX-License-Identifier: Apache-2.0
"""What the operators of torch_ops and torch_scan_ops are made with."""

import torch
from torch import Tensor, library

from . import layouts, worlds
from ._compression import Compressed
from ._errors import unsupported

LIBRARY = library.Library("ringattn", "DEF")


def operator(name: str, mutates: tuple[str, ...] = ()):
    """Makes the function an operator of the CPU and of GPUs. library.custom_op() would do so with kernels of Python around it,
    for gradients that there are not, which cost more than the call."""

    def register(function):
        schema = name + library.infer_schema(function, mutates_args=mutates)
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, function, device)
        return function

    return register


def fake(name: str):
    """Makes the function what the operator gives without computing."""
    return library.register_fake(f"ringattn::{name}", lib=LIBRARY)


def mask_of(mask: str, left: int, right: int):
    return (left, right) if mask == "window" else mask


def mask_arguments(mask) -> tuple[str, int, int]:
    return (mask, 0, 0) if isinstance(mask, str) else ("window", mask[0], mask[1])


def layout_of(name: str, number: int):
    return layouts.by_number[number] if number else name or None


def layout_arguments(layout) -> tuple[str, int]:
    if layout is None:
        return "", 0
    return (layout, 0) if isinstance(layout, str) else ("", layout.number)


def world_of(number: int):
    return worlds.by_number[number] if number else None


def number_of(world) -> int:
    return 0 if world is None else world.number


def new_rows(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], dim)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def given(out: Tensor | None, made: Tensor) -> Tensor:
    return made if out is None else out.copy_(made)


def tensor_of(values):
    return values if values is None or isinstance(values, Tensor) else torch.tensor(values)


def check(op: str, unknown: dict, *tensors) -> None:
    for name in unknown:
        unsupported(f"{op} has no {name}", "it was given", "Leave it out.")
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and not isinstance(tensor, Compressed) and tensor.requires_grad:
                unsupported(f"an input of {op} requires a gradient", "ringattn has no backward pass",
                            "Call it under torch.no_grad(), or pass detached tensors.")  # fmt: skip


def check_alone(op: str, world) -> None:
    if world is not None and world.size > 1:
        unsupported(f"{op} over {world.size} ranks can't be compiled", "the shapes of its results depend on the rank",
                    "Call it outside of the compiled part.")  # fmt: skip
