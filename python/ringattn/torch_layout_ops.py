# SPDX-License-Identifier: Apache-2.0
"""The PyTorch operator of reshard(); continues torch_ops."""

import torch
from torch import Tensor

from . import _gradients, _job, _reshard, worlds
from ._torch_tools import check_known, fake, given, gradients_of, key_of, layout_of, operator, run, world_of


@operator("reshard")
def _reshard_op(x: Tensor, from_layout: str, to_layout: str, timeout: float, world: str | None = None) -> Tensor:
    own = _job.world_of(x, world_of(world))
    before, after = layout_of(from_layout), layout_of(to_layout)
    _reshard.check_rows(x, before, own.rank)
    return _reshard.move(x.detach().resolve_neg(), before, after, own, timeout)


@fake("reshard")
def _(x, from_layout, to_layout, timeout, world=None):
    rank = 0 if world is None else worlds.of_key(world).rank
    return x.new_empty((layout_of(to_layout).tokens(rank), *x.shape[1:]))


def recorded_reshard(x, before, after, world, timeout):
    """reshard() by the operator that autograd records."""
    return run("reshard", x, before.text, after.text, timeout, key_of(world))


def reshard(x, from_layout, to_layout, *, world=None, out=None, timeout=60.0, **unknown):
    check_known("reshard", unknown)
    if _gradients.requiring({"x": x}) is not None:
        _gradients.check_out("x", out)
    before, after = _reshard.layouts_of(from_layout, to_layout, 1 if world is None else world.size)
    return given("reshard", out, recorded_reshard(x, before, after, world, timeout))


def _save_reshard(ctx, inputs, output):
    _, from_layout, to_layout, timeout, world = inputs
    ctx.settings = to_layout, from_layout, timeout, world
    ctx.world = None if world is None else worlds.of_key(world)  # keeps it


def _reshard_gradient(ctx, dy):
    return torch.ops.ringattn.reshard(dy, *ctx.settings), None, None, None, None


gradients_of("reshard", _save_reshard, _reshard_gradient)
