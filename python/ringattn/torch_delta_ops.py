# SPDX-License-Identifier: Apache-2.0
"""PyTorch operators of the gated delta rule; continues torch_ops."""

import torch
from torch import Tensor

from . import _gated_delta, _ssm, layouts, worlds
from ._arguments import is_true
from ._torch_tools import check_known, fake, given, key_of, layout_of, operator, run, tensor_of, world_of


@operator("gated_delta")
def _gated_delta_op(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, qk_l2norm: bool, scale: float | None,
    initial_states: Tensor | None, cu_seqlens: Tensor | None, layout: str | None, threads: int, memory_budget: int,
    timeout: float, world: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():  # operators run below autograd
        return _gated_delta.gated_delta(
            q, k, v, log_decay, beta, qk_l2norm=qk_l2norm, scale=scale, initial_states=initial_states, return_final_states=True,
            cu_seqlens=cu_seqlens, layout=layout_of(layout), world=world_of(world), threads=threads, memory_budget=memory_budget,
            timeout=timeout,
        )  # fmt: skip


@fake("gated_delta")
def _(q, k, v, log_decay, beta, qk_l2norm, scale, initial_states, cu_seqlens, layout, threads, memory_budget, timeout,
      world=None):  # fmt: skip
    if world is not None and worlds.of_key(world).size > 1:
        own = worlds.of_key(world)
        lengths = _ssm.lengths_of_runs(q, q.ndim == 4, cu_seqlens, layout_of(layout), own)
        sequences = len((layout_of(layout) or layouts.segments(lengths, own.size)).ends(own.rank))
    elif cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
    elif q.ndim == 4:
        sequences = q.shape[0]
    else:
        sequences = 1 if layout is None else len(layouts.of_text(layout).lengths)
    return v.new_empty(v.shape), v.new_empty((sequences, v.shape[-2], q.shape[-1], v.shape[-1]), dtype=torch.float32)


def gated_delta(q, k, v, log_decay, beta, *, qk_l2norm=False, scale=None, initial_states=None, return_final_states=False,
                cu_seqlens=None, layout=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0,
                **unknown):  # fmt: skip
    check_known("gated_delta", unknown)
    _ssm.check_layout(layout, layouts.segments)
    made, states = run(
        "gated_delta", q, k, v, log_decay, beta, qk_l2norm, scale, initial_states, tensor_of(cu_seqlens),
        None if layout is None else layout.text, threads, memory_budget, timeout, key_of(world),
    )  # fmt: skip
    made = given("gated_delta", out, made)
    return (made, states) if is_true("return_final_states", return_final_states) else made


@operator("gated_delta_update", mutates=("state",))
def _gated_delta_update_op(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, qk_l2norm: bool, scale: float | None,
    state_batch_indices: Tensor | None, threads: int, timeout: float,
) -> Tensor:  # fmt: skip
    with torch.no_grad():  # as above
        return _gated_delta.gated_delta_update(
            state, q, k, v, log_decay, beta, qk_l2norm=qk_l2norm, scale=scale, state_batch_indices=state_batch_indices,
            threads=threads, timeout=timeout,
        )  # fmt: skip


@fake("gated_delta_update")
def _(state, q, k, v, *_):
    return v.new_empty(v.shape)


def gated_delta_update(state, q, k, v, log_decay, beta, *, qk_l2norm=False, scale=None, state_batch_indices=None, out=None,
                       threads=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("gated_delta_update", unknown)
    made = run("gated_delta_update", state, q, k, v, log_decay, beta, qk_l2norm, scale, state_batch_indices, threads,
               timeout)  # fmt: skip
    return given("gated_delta_update", out, made)
