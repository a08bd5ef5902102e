# SPDX-License-Identifier: Apache-2.0
"""PyTorch operators of SSM layers, their conv1d, and their updates; continues torch_ops."""

import torch
from torch import Tensor

from . import _conv1d, _conv1d_backward, _gradients, _linear_attention, _ssd_backward, _ssm, layouts, worlds
from ._arguments import is_true
from ._torch_tools import (
    check_alone,
    check_known,
    constant,
    fake,
    given,
    gradients_of,
    key_of,
    layout_of,
    operator,
    run,
    tensor_of,
    world_of,
)


def _layout_text(layout) -> str | None:
    _ssm.check_layout(layout)
    return None if layout is None else layout.text


def _sequences(rows, batched: bool, cu_seqlens, layout: str | None) -> int:
    """Number of sequences, as lengths_of_runs() of _ssm computes it."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1
    if batched:
        return rows.shape[0]
    return 1 if layout is None else len(layouts.of_text(layout).lengths)


@operator("ssd")
def _ssd_op(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: list[float] | None, initial_states: Tensor | None, cu_seqlens: Tensor | None,
    layout: str | None, threads: int, memory_budget: int, timeout: float, world: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():  # operators run below autograd, so the function must not enter it again
        return _ssm.ssd(
            x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
            dt_limit=None if dt_limit is None else tuple(dt_limit), initial_states=initial_states, return_final_states=True,
            cu_seqlens=cu_seqlens, layout=layout_of(layout), world=world_of(world), threads=threads, memory_budget=memory_budget,
            timeout=timeout,
        )  # fmt: skip


@fake("ssd")
def _(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, cu_seqlens, layout, threads, memory_budget, timeout,
      world=None):  # fmt: skip
    if world is not None and worlds.of_key(world).size > 1:
        own = worlds.of_key(world)
        lengths = _ssm.lengths_of_runs(x, x.ndim == 4, cu_seqlens, layout_of(layout), own)
        sequences = len((layout_of(layout) or layouts.super_segments(lengths, own.size)).ends(own.rank))
    else:
        sequences = _sequences(x, x.ndim == 4, cu_seqlens, layout)
    return x.new_empty(x.shape), x.new_empty((sequences, *x.shape[-2:], B.shape[-1]), dtype=torch.float32)


def ssd(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None, initial_states=None,
        return_final_states=False, cu_seqlens=None, layout=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0,
        **unknown):  # fmt: skip
    check_known("ssd", unknown)
    wanting = _gradients.requiring({"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias,
                                    "initial_states": initial_states})  # fmt: skip
    if wanting is not None:
        _gradients.check_out(wanting, out)
    y, states = run(
        "ssd", x, dt, A, B, C, D, z, dt_bias, dt_softplus, _limit(dt_limit), initial_states, tensor_of(cu_seqlens),
        _layout_text(layout), threads, memory_budget, timeout, key_of(world),
    )  # fmt: skip
    y = given("ssd", out, y)
    return (y, states) if is_true("return_final_states", return_final_states) else y


def _limit(dt_limit) -> list[float] | None:
    return None if dt_limit is None else list(dt_limit)


@operator("ssd_backward")
def _ssd_backward_op(
    dy: Tensor, dstates: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None, initial_states: Tensor | None, cu_seqlens: Tensor | None, dt_softplus: bool,
    dt_limit: list[float] | None, layout: str | None, threads: int, memory_budget: int, timeout: float, world: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, dt, A, B, C, D, z, dt_bias and initial_states; empty for those that are not given."""
    return _ssd_backward.ssd_backward(
        dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, dt_softplus=dt_softplus,
        dt_limit=None if dt_limit is None else tuple(dt_limit), layout=layout_of(layout), world=world_of(world), threads=threads,
        memory_budget=memory_budget, timeout=timeout,
    )  # fmt: skip


@fake("ssd_backward")
def _(dy, dstates, x, dt, A, B, C, D, z, dt_bias, initial_states, *_):
    given_arrays = x, dt, A, B, C, D, z, dt_bias, initial_states
    return tuple(
        x.new_empty(0, dtype=torch.float32) if array is None else array.new_empty(array.shape) for array in given_arrays
    )


def _save_ssd(ctx, inputs, output):
    *arrays, dt_softplus, dt_limit, initial_states, cu_seqlens, layout, threads, memory_budget, timeout, world = inputs
    A = arrays[2]
    if A.ndim == 2:
        names = (*_gradients.INPUTS["ssd"][:8], "initial_states")
        wanted = [name for name, array in zip(names, (*arrays, initial_states)) if array is not None and array.requires_grad]
        if wanted:
            _gradients.refuse_selective(wanted[0])
    ctx.save_for_backward(*arrays, initial_states, cu_seqlens)
    ctx.set_materialize_grads(False)
    ctx.settings = dt_softplus, dt_limit, layout, threads, memory_budget, timeout, world
    ctx.world = None if world is None else worlds.of_key(world)  # keeps it


def _ssd_gradients(ctx, dy, dstates):
    x, *arrays = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    *made, dinitial = torch.ops.ringattn.ssd_backward(dy, dstates, x, *arrays, *ctx.settings)
    needed = ctx.needs_input_grad
    of_inputs = [gradient if needed[place] else None for place, gradient in enumerate(made)]
    return *of_inputs, None, None, dinitial if needed[10] else None, *(None for _ in needed[11:])


gradients_of("ssd", _save_ssd, _ssd_gradients)


# Each channel is a head of dim 1.
def _heads(*rows) -> list:
    return [None if array is None else array[..., None] for array in rows]


def _groups(rows_axes: int, *rows) -> list:
    return [array if array.ndim == rows_axes else array[..., None, :] for array in rows]


def selective_scan(u, delta, A, B, C, *, D=None, z=None, delta_bias=None, delta_softplus=False, initial_states=None,
                   return_last_state=False, cu_seqlens=None, layout=None, world=None, out=None, threads=0, memory_budget=0,
                   timeout=60.0, **unknown):  # fmt: skip
    check_known("selective_scan", unknown)
    check_alone("selective_scan", world)
    wanting = _gradients.requiring({"u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias,
                                    "initial_states": initial_states})  # fmt: skip
    if wanting is not None:
        _gradients.refuse_selective(wanting)
    x, z = _heads(u, z)
    B, C = _groups(u.ndim + 1, B, C)
    if initial_states is not None:
        initial_states = initial_states[:, :, None, :]
    y, states = ssd(x, delta, A, B, C, D=D, z=z, dt_bias=delta_bias, dt_softplus=delta_softplus, initial_states=initial_states,
                    return_final_states=True, cu_seqlens=cu_seqlens, layout=layout, threads=threads, memory_budget=memory_budget,
                    timeout=timeout)  # fmt: skip
    y = given("selective_scan", out, y[..., 0])
    return (y, states[:, :, 0]) if is_true("return_last_state", return_last_state) else y


@operator("ssd_update", mutates=("state",))
def _ssd_update_op(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, dt_softplus: bool, dt_limit: list[float] | None, state_batch_indices: Tensor | None, threads: int,
    timeout: float,
) -> Tensor:  # fmt: skip
    return _ssm.ssd_update(
        state, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        dt_limit=None if dt_limit is None else tuple(dt_limit), state_batch_indices=state_batch_indices, threads=threads,
        timeout=timeout,
    )  # fmt: skip


@fake("ssd_update")
def _(state, x, *_):
    return x.new_empty(x.shape)


def ssd_update(state, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None,
               state_batch_indices=None, out=None, threads=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("ssd_update", unknown)
    y = run("ssd_update", state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, _limit(dt_limit), state_batch_indices,
            threads, timeout)  # fmt: skip
    return given("ssd_update", out, y)


def selective_update(state, u, delta, A, B, C, *, D=None, z=None, delta_bias=None, delta_softplus=False,
                     state_batch_indices=None, out=None, threads=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("selective_update", unknown)
    x, z = _heads(u, z)
    B, C = _groups(3, B, C)
    y = ssd_update(state[:, :, None], x, delta, A, B, C, D=D, z=z, dt_bias=delta_bias, dt_softplus=delta_softplus,
                   state_batch_indices=state_batch_indices, threads=threads, timeout=timeout)  # fmt: skip
    return given("selective_update", out, y[..., 0])


@operator("causal_conv1d")
def _causal_conv1d_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, initial_states: Tensor | None,
    cu_seqlens: Tensor | None, layout: str | None, threads: int, timeout: float, world: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():  # below autograd
        return _conv1d.causal_conv1d(
            x, weight, bias, activation=activation, initial_states=initial_states, return_final_states=True,
            cu_seqlens=cu_seqlens, layout=layout_of(layout), world=world_of(world), threads=threads, timeout=timeout,
        )  # fmt: skip


@fake("causal_conv1d")
def _(x, weight, bias, activation, initial_states, cu_seqlens, layout, *_):
    sequences = _sequences(x, x.ndim == 3, cu_seqlens, layout)
    return x.new_empty(x.shape), x.new_empty((sequences, weight.shape[1] - 1, weight.shape[0]))


def causal_conv1d(x, weight, bias=None, *, activation=None, initial_states=None, return_final_states=False, cu_seqlens=None,
                  layout=None, world=None, out=None, threads=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("causal_conv1d", unknown)
    check_alone("causal_conv1d", world)
    name = _gradients.requiring({"x": x, "weight": weight, "bias": bias, "initial_states": initial_states})
    if name is not None:
        _gradients.check(name, False, None, out)
    y, states = run("causal_conv1d", x, weight, bias, activation, initial_states, tensor_of(cu_seqlens), _layout_text(layout),
                    threads, timeout)  # fmt: skip
    y = given("causal_conv1d", out, y)
    return (y, states) if is_true("return_final_states", return_final_states) else y


def recorded_conv1d(x, weight, bias, initial_states, activation, cu_seqlens, layout, world, threads, timeout):
    """causal_conv1d() by the operator that autograd records, over any world."""
    return run("causal_conv1d", x, weight, bias, activation, initial_states, tensor_of(cu_seqlens), _layout_text(layout), threads,
               timeout, key_of(world))  # fmt: skip


@operator("causal_conv1d_backward")
def _causal_conv1d_backward_op(
    dy: Tensor, dstates: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, initial_states: Tensor | None,
    cu_seqlens: Tensor | None, activation: str | None, layout: str | None, threads: int, timeout: float, world: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weight, bias and initial_states; the last two are empty where there are none."""
    return _conv1d_backward.causal_conv1d_backward(
        dy, dstates, x, weight, bias, initial_states, cu_seqlens, activation=activation, layout=layout_of(layout),
        world=world_of(world), threads=threads, timeout=timeout,
    )  # fmt: skip


@fake("causal_conv1d_backward")
def _(dy, dstates, x, weight, bias, initial_states, *_):
    dbias = weight.new_empty(0 if bias is None else bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, x.new_empty(
        0 if initial_states is None else initial_states.shape
    )


def _save_conv1d(ctx, inputs, output):
    x, weight, bias, activation, initial_states, cu_seqlens, layout, threads, timeout, world = inputs
    ctx.settings = (activation, layout, threads, timeout, world)
    ctx.save_for_backward(x, weight, bias, initial_states, cu_seqlens)
    ctx.set_materialize_grads(False)
    ctx.world = None if world is None else worlds.of_key(world)  # keeps it


def _conv1d_gradients(ctx, dy, dstates):
    x, *others = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    made = torch.ops.ringattn.causal_conv1d_backward(dy, dstates, x, *others, *ctx.settings)
    of_inputs = [None] * len(ctx.needs_input_grad)
    for place, gradient in zip((0, 1, 2, 4), made):
        of_inputs[place] = gradient if ctx.needs_input_grad[place] else None
    return tuple(of_inputs)


gradients_of("causal_conv1d", _save_conv1d, _conv1d_gradients)


@operator("causal_conv1d_update", mutates=("conv_state",))
def _causal_conv1d_update_op(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    conv_state_indices: Tensor | None, threads: int, timeout: float,
) -> Tensor:  # fmt: skip
    return _conv1d.causal_conv1d_update(
        x, conv_state, weight, bias, activation=activation, conv_state_indices=conv_state_indices, threads=threads,
        timeout=timeout,
    )  # fmt: skip


@fake("causal_conv1d_update")
def _(x, *_):
    return x.new_empty(x.shape)


def causal_conv1d_update(x, conv_state, weight, bias=None, *, activation=None, conv_state_indices=None, out=None, threads=0,
                         timeout=60.0, **unknown):  # fmt: skip
    check_known("causal_conv1d_update", unknown)
    y = run("causal_conv1d_update", x, conv_state, weight, bias, activation, conv_state_indices, threads, timeout)
    return given("causal_conv1d_update", out, y)


def _rope_arguments(rope, dim) -> list:
    """RoPE's settings as the operators take them; a type of "" means none."""
    settings = _linear_attention.rope_settings(rope, constant(dim))
    if settings is None:
        return ["", "", 0.0, 0.0, False, False, None, 0.0]
    *numbers, frequencies, attention_factor = settings
    return [*numbers, None if frequencies is None else list(frequencies), attention_factor]


def _rope_of(type, parameters, theta, rotary_factor, interleaved, exact, inv_freq, attention_factor):
    return None if not type else (type, parameters, theta, rotary_factor, interleaved, exact,
                                  None if inv_freq is None else tuple(inv_freq), attention_factor)  # fmt: skip


@operator("linear_attention")
def _linear_attention_op(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float | None, initial_state: Tensor | None, type: str,
    parameters: str, theta: float, rotary_factor: float, interleaved: bool, exact: bool, inv_freq: list[float] | None,
    attention_factor: float, positions: Tensor | None, cu_seqlens: Tensor | None, layout: str | None, threads: int,
    memory_budget: int, timeout: float, world: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    settings = _rope_of(type, parameters, theta, rotary_factor, interleaved, exact, inv_freq, attention_factor)
    with torch.no_grad():  # below autograd
        return _linear_attention.attend(
            q, k, v, log_decay, scale, initial_state, True, settings, positions, cu_seqlens, layout_of(layout), world_of(world),
            None, threads, memory_budget, timeout,
        )  # fmt: skip


@fake("linear_attention")
def _(q, k, v, log_decay, scale, initial_state, type, parameters, theta, rotary_factor, interleaved, exact, inv_freq,
      attention_factor, positions, cu_seqlens, layout, *_):  # fmt: skip
    sequences = _sequences(q, q.ndim == 4, cu_seqlens, layout)
    return v.new_empty(v.shape), v.new_empty((sequences, *v.shape[-2:], q.shape[-1]), dtype=torch.float32)


def linear_attention(q, k, v, log_decay, *, scale=None, initial_state=None, return_final_states=False, rope=None, positions=None,
                     cu_seqlens=None, layout=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0,
                     **unknown):  # fmt: skip
    check_known("linear_attention", unknown)
    check_alone("linear_attention", world)
    _linear_attention.no_gradients("linear_attention", {"q": q, "k": k, "v": v, "log_decay": log_decay,
                                                        "initial_state": initial_state})  # fmt: skip
    made, states = run("linear_attention", q, k, v, log_decay, scale, initial_state, *_rope_arguments(rope, q.shape[-1]),
                       positions, tensor_of(cu_seqlens), _layout_text(layout), threads, memory_budget, timeout)  # fmt: skip
    made = given("linear_attention", out, made)
    return (made, states) if is_true("return_final_states", return_final_states) else made


@operator("linear_attention_update", mutates=("state",))
def _linear_attention_update_op(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float | None, type: str, parameters: str,
    theta: float, rotary_factor: float, interleaved: bool, exact: bool, inv_freq: list[float] | None, attention_factor: float,
    positions: Tensor | None, state_batch_indices: Tensor | None, threads: int, timeout: float,
) -> Tensor:  # fmt: skip
    settings = _rope_of(type, parameters, theta, rotary_factor, interleaved, exact, inv_freq, attention_factor)
    return _linear_attention.step(state, q, k, v, log_decay, scale, settings, positions, state_batch_indices, None, threads,
                                  timeout)  # fmt: skip


@fake("linear_attention_update")
def _(state, q, k, v, *_):
    return v.new_empty(v.shape)


def linear_attention_update(state, q, k, v, log_decay, *, scale=None, rope=None, positions=None, state_batch_indices=None,
                            out=None, threads=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("linear_attention_update", unknown)
    _linear_attention.no_gradients("linear_attention_update", {"state": state, "q": q, "k": k, "v": v, "log_decay": log_decay})
    made = run("linear_attention_update", state, q, k, v, log_decay, scale, *_rope_arguments(rope, q.shape[-1]), positions,
               state_batch_indices, threads, timeout)  # fmt: skip
    return given("linear_attention_update", out, made)
