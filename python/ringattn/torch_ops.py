# SPDX-License-Identifier: Apache-2.0
"""torch.ops.ringattn.*: the ops of this package as PyTorch operators with fake implementations, so that torch.compile
and
torch.export keep them in graphs. Under torch.compile ringattn.attention() and the other functions become these
operators.

A Layout is passed as Layout.text, which has the same meaning in any process. A world is passed as World.key, which is
valid in its
own process while the world is referenced. mask is "causal", "full" or "window" with left and right. Keys and values are
lists of
tensors: [rows] with format "" and dim 0, or streams and tables of a Compressed with its format and dim."""

import torch
from torch import Tensor

from . import (
    _attention,
    _attention_backward,
    _batched_gemm,
    _compression,
    _decode,
    _eviction,
    _gradients,
    _mla,
    _mla_backward,
    _rope,
    worlds,
)
from ._compression import Compressed
from ._torch_tools import (
    check_alone,
    check_known,
    constant,
    constant_result,
    fake,
    given,
    gradients_of,
    key_of,
    layout_argument,
    layout_of,
    mask_arguments,
    mask_of,
    new_rows,
    operator,
    run,
    tensor_of,
    world_of,
)
from .torch_linear_ops import linear  # noqa: F401, its own file
from .torch_layout_ops import recorded_reshard, reshard  # noqa: F401, another part
from .torch_delta_ops import gated_delta, gated_delta_update  # noqa: F401, another part
from .torch_ssm_ops import (  # noqa: F401, the second half
    causal_conv1d,
    causal_conv1d_update,
    selective_scan,
    selective_update,
    ssd,
    ssd_update,
    linear_attention,
    linear_attention_update,
)


# Properties of a format, which are constants of a graph.
@constant_result
def _parts_of(*given):
    return _compression.parts_of(*given)


@constant_result
def _choose_formats(*given):
    return _compression.choose_formats(*given)


# The number of tokens after an eviction does not depend on the values of tensors either.
@constant_result
def _kept_lengths(*given):
    return _eviction.kept_lengths(*given)


def _keys_arguments(rows) -> tuple[list[Tensor], str, int]:
    """Keys or values as arguments of an operator."""
    return (rows.parts, rows.format, rows.shape[-1]) if isinstance(rows, Compressed) else ([rows], "", 0)


def _keys(q: Tensor, parts: list[Tensor], format: str, dim: int):
    """The inverse of _keys_arguments(); q has their dtype."""
    if not format:
        return parts[0]
    heads = constant(parts[0].shape[-2])
    streams, tables = _parts_of(format, _compression.type_name(q.dtype), heads, constant(dim))
    names = [name for name, _, _ in (*streams, *tables)]
    named = dict(zip(names, parts, strict=True))
    tails = {name: named.pop(name) for name, _, _ in tables}
    return Compressed(format, (*parts[0].shape[:-1], dim), q.dtype, named, tails, ())


# Operators run below autograd, so the functions that they call must not enter it again.
_below_autograd = torch.no_grad


def _check_gradients(name: str | None, k_format: str, v_format: str, k_positions, out) -> None:
    if name is not None:
        _gradients.check(name, bool(k_format or v_format), k_positions, out)


def _save(ctx, q, k, v, formats: tuple[str, str], sinks, k_positions, begins: tuple, output, world: str | None) -> None:
    """Saves what a backward pass needs besides settings. begins: cu_seqlens."""
    arrays = {"q": q, "k": k[0], "v": v[0], "sinks": sinks}
    names = [name for name, array in arrays.items() if array is not None and array.requires_grad]
    _check_gradients(names[0] if names else None, *formats, k_positions, None)
    ctx.save_for_backward(q, k[0], v[0], sinks, *output, *begins)
    ctx.set_materialize_grads(False)
    ctx.world = None if world is None else worlds.of_key(world)  # keeps it


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return _attention_backward.default_scale(q) if softmax_scale is None else softmax_scale


def _gradients_of_inputs(ctx, sinks_place: int, gradients) -> tuple:
    """The gradients of all arguments of an operator, whose k and v are lists."""
    dq, dk, dv, dsinks = gradients
    needed = ctx.needs_input_grad
    of_inputs = [None] * len(needed)
    of_inputs[:3] = dq if needed[0] else None, [dk if needed[1][0] else None], [dv if needed[2][0] else None]
    of_inputs[sinks_place] = dsinks if needed[sinks_place] else None
    return tuple(of_inputs)


@operator("attention")
def _attention_op(
    q: Tensor, k: list[Tensor], v: list[Tensor], k_format: str, k_dim: int, v_format: str, v_dim: int,
    sinks: Tensor | None, mask: str, left: int, right: int, softmax_scale: float | None, softcap: float, q_offset: int | None,
    layout: str | None, key_layout: str | None, lengths: list[int] | None, world: str | None, threads: int,
    memory_budget: int, timeout: float, k_positions: Tensor | None = None, k_lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with _below_autograd():
        return _attention.attention(
            q, _keys(q, k, k_format, k_dim), _keys(q, v, v_format, v_dim), mask=mask_of(mask, left, right),
            softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, q_offset=q_offset,
            layout=layout_of(layout), key_layout=layout_of(key_layout),
            lengths=None if lengths is None else tuple(lengths), k_positions=k_positions, k_lengths=k_lengths,
            world=world_of(world), threads=threads, memory_budget=memory_budget, timeout=timeout,
        )  # fmt: skip


@fake("attention")
def _(q, k, v, k_format, k_dim, v_format, v_dim, *_):
    return new_rows(q, v_dim or v[0].shape[-1])


def attention(q, k, v, *, mask="causal", softmax_scale=None, softcap=0.0, sinks=None, q_offset=None, layout=None, key_layout=None,
              lengths=None, k_positions=None, k_lengths=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0,
              **unknown):  # fmt: skip
    check_known("attention", unknown)
    name = _gradients.requiring({"q": q, "k": k, "v": v, "sinks": sinks})
    (k, *k_is), (v, *v_is) = _keys_arguments(k), _keys_arguments(v)
    _check_gradients(name, k_is[0], v_is[0], k_positions, out)
    made, lse = run(
        "attention", q, k, v, *k_is, *v_is, sinks, *mask_arguments(mask), softmax_scale, softcap, q_offset,
        layout_argument(layout), layout_argument(key_layout), None if lengths is None else list(lengths), key_of(world), threads,
        memory_budget, timeout, k_positions,
        [k_lengths] * (q.shape[0] if q.ndim == 4 else 1) if isinstance(k_lengths, int) else k_lengths,
    )  # fmt: skip
    return given("attention", out, made), lse


@operator("attention_backward")
def _attention_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    mask: str, left: int, right: int, softmax_scale: float, softcap: float, q_offset: int | None, layout: str | None,
    key_layout: str | None, lengths: list[int] | None, world: str | None, threads: int, memory_budget: int, timeout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and sinks; the last one is empty without sinks."""
    return _attention_backward.attention_backward(
        dout, dlse, q, k, v, sinks, out, lse, mask=mask_of(mask, left, right), softmax_scale=softmax_scale, softcap=softcap,
        q_offset=q_offset, layout=layout_of(layout), key_layout=layout_of(key_layout),
        lengths=None if lengths is None else tuple(lengths), world=world_of(world), threads=threads,
        memory_budget=memory_budget, timeout=timeout,
    )  # fmt: skip


def _new_gradients(dout, dlse, q, k, v, sinks, *_):
    made = [rows.new_empty(rows.shape) for rows in (q, k, v)]
    return *made, q.new_empty((0,) if sinks is None else sinks.shape, dtype=torch.float32)


fake("attention_backward")(_new_gradients)


def _save_attention(ctx, inputs, output):
    q, k, v, k_format, _, v_format, _, sinks, mask, left, right, softmax_scale, *settings, k_positions, _ = inputs
    ctx.settings = (mask, left, right, _scale(q, softmax_scale), *settings)
    world = settings[5]
    _save(ctx, q, k, v, (k_format, v_format), sinks, k_positions, (), output, world)


def _attention_gradients(ctx, dout, dlse):
    q, k, v, sinks, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    made = torch.ops.ringattn.attention_backward(dout, dlse, q, k, v, sinks, out, lse, *ctx.settings)
    return _gradients_of_inputs(ctx, 7, made)


gradients_of("attention", _save_attention, _attention_gradients)


@operator("varlen")
def _varlen_op(
    q: Tensor, k: list[Tensor], v: list[Tensor], k_format: str, k_dim: int, v_format: str, v_dim: int, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None, sinks: Tensor | None, mask: str,
    left: int, right: int, softmax_scale: float | None, softcap: float, q_offsets: list[int] | None, layout: str | None,
    key_layout: str | None, world: str | None, threads: int, memory_budget: int, timeout: float,
    k_positions: Tensor | None = None, k_lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with _below_autograd():
        return _attention.varlen(
            q, _keys(q, k, k_format, k_dim), _keys(q, v, v_format, v_dim), cu_seqlens_q, cu_seqlens_k,
            mask=mask_of(mask, left, right), softmax_scale=softmax_scale, softcap=softcap,
            sinks=sinks, q_offsets=q_offsets, layout=layout_of(layout), key_layout=layout_of(key_layout),
            k_positions=k_positions, k_lengths=k_lengths,
            world=world_of(world), threads=threads, memory_budget=memory_budget, timeout=timeout,
        )  # fmt: skip


@fake("varlen")
def _(q, k, v, k_format, k_dim, v_format, v_dim, *_):
    return new_rows(q, v_dim or v[0].shape[-1])


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, mask="causal", softmax_scale=None, softcap=0.0, sinks=None,
           q_offsets=None, layout=None, key_layout=None, k_positions=None, k_lengths=None, world=None, out=None, threads=0,
           memory_budget=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("varlen", unknown)
    name = _gradients.requiring({"q": q, "k": k, "v": v, "sinks": sinks})
    (k, *k_is), (v, *v_is) = _keys_arguments(k), _keys_arguments(v)
    _check_gradients(name, k_is[0], v_is[0], k_positions, out)
    made, lse = run(
        "varlen", q, k, v, *k_is, *v_is, tensor_of(cu_seqlens_q), tensor_of(cu_seqlens_k), sinks, *mask_arguments(mask),
        softmax_scale, softcap, q_offsets,
        layout_argument(layout), layout_argument(key_layout), key_of(world), threads, memory_budget, timeout,
        k_positions, None if k_lengths is None else list(k_lengths),
    )  # fmt: skip
    return given("varlen", out, made), lse


@operator("varlen_backward")
def _varlen_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, mask: str, left: int, right: int, softmax_scale: float, softcap: float,
    q_offsets: list[int] | None, layout: str | None, key_layout: str | None, world: str | None, threads: int,
    memory_budget: int, timeout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and sinks; the last one is empty without sinks."""
    return _attention_backward.varlen_backward(
        dout, dlse, q, k, v, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, mask=mask_of(mask, left, right),
        softmax_scale=softmax_scale, softcap=softcap, q_offsets=q_offsets, layout=layout_of(layout),
        key_layout=layout_of(key_layout), world=world_of(world), threads=threads, memory_budget=memory_budget, timeout=timeout,
    )  # fmt: skip


fake("varlen_backward")(_new_gradients)


def _save_varlen(ctx, inputs, output):
    q, k, v, k_format, _, v_format, _, *begins, sinks, mask, left, right, softmax_scale = inputs[:14]
    *settings, k_positions, _ = inputs[14:]
    ctx.settings = (mask, left, right, _scale(q, softmax_scale), *settings)
    world = settings[4]
    _save(ctx, q, k, v, (k_format, v_format), sinks, k_positions, tuple(begins), output, world)


def _varlen_gradients(ctx, dout, dlse):
    q, k, v, sinks, out, lse, *begins = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    made = torch.ops.ringattn.varlen_backward(dout, dlse, q, k, v, sinks, out, lse, *begins, *ctx.settings)
    return _gradients_of_inputs(ctx, 9, made)


gradients_of("varlen", _save_varlen, _varlen_gradients)


@operator("decode", mutates=("k_cache", "v_cache", "lengths_before"))
def _decode_op(
    q: Tensor, k_cache: list[Tensor], v_cache: list[Tensor], k_format: str, k_dim: int, v_format: str, v_dim: int,
    lengths: Tensor | None, lengths_before: Tensor | None, update_lengths: bool, block_table: Tensor | None,
    k_new: Tensor | None, v_new: Tensor | None, sinks: Tensor | None, mask: str, left: int, right: int,
    softmax_scale: float | None, softcap: float, rope: str, max_keys: int | None, threads: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _decode.decode(
        q, _keys(q, k_cache, k_format, k_dim), _keys(q, v_cache, v_format, v_dim), lengths=lengths,
        lengths_before=lengths_before, update_lengths=update_lengths, block_table=block_table, k_new=k_new, v_new=v_new,
        mask=mask_of(mask, left, right), softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
        rope=_rope.RopeSettings.from_text(rope) if rope else None, max_keys=max_keys, threads=threads, timeout=timeout,
    )  # fmt: skip


@fake("decode")
def _(q, k_cache, v_cache, k_format, k_dim, v_format, v_dim, *_):
    return new_rows(q, v_dim or v_cache[0].shape[-1])


def decode(q, k_cache, v_cache, lengths=None, *, lengths_before=None, update_lengths=False, block_table=None, k_new=None,
           v_new=None, mask="causal", softmax_scale=None, softcap=0.0, sinks=None, rope=None, max_keys=None, world=None,
           out=None, threads=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("decode", unknown)
    check_alone("decode", world)
    (k, *k_is), (v, *v_is) = _keys_arguments(k_cache), _keys_arguments(v_cache)
    made, lse = run(
        "decode", q, k, v, *k_is, *v_is, lengths, lengths_before, update_lengths, block_table, k_new, v_new, sinks,
        *mask_arguments(mask), softmax_scale, softcap, "" if rope is None else rope.text, max_keys, threads, timeout,
    )  # fmt: skip
    return given("decode", out, made), lse


@operator("mla")
def _mla_op(
    q: Tensor, latent: Tensor, k_rope: Tensor | None, w_uk: Tensor | None, w_uv: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, sinks: Tensor | None, form: str | None, head_dim: int | None, head_dim_v: int | None, mask: str,
    left: int, right: int, softmax_scale: float | None, softcap: float, layout: str | None, key_layout: str | None,
    world: str | None, threads: int, memory_budget: int, timeout: float, q_offsets: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    with _below_autograd():
        return _mla.mla(
            q, latent, k_rope, w_uk, w_uv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, form=form, head_dim=head_dim,
            head_dim_v=head_dim_v, mask=mask_of(mask, left, right), softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
            q_offsets=q_offsets, layout=layout_of(layout), key_layout=layout_of(key_layout), world=world_of(world),
            threads=threads, memory_budget=memory_budget, timeout=timeout,
        )  # fmt: skip


@fake("mla")
def _(q, latent, k_rope, w_uk, w_uv, *_):
    if w_uv is not None:
        return new_rows(q, w_uv.shape[1])
    whole = k_rope is not None
    return new_rows(q, latent.shape[-1] if whole else _mla.latent_dim_of(latent, _mla.rotary_of(q, latent, None, w_uk)))


def mla(q, latent, k_rope=None, w_uk=None, w_uv=None, *, cu_seqlens_q=None, cu_seqlens_k=None, form=None, head_dim=None,
        head_dim_v=None, mask="causal", softmax_scale=None, softcap=0.0, sinks=None, q_offsets=None, layout=None,
        key_layout=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0, **unknown):  # fmt: skip
    check_known("mla", unknown)
    name = _gradients.requiring({"q": q, "latent": latent, "k_rope": k_rope, "w_uk": w_uk, "w_uv": w_uv, "sinks": sinks})
    if name is not None:
        _gradients.check_mla(name, w_uk is not None and w_uv is not None and form != "absorbed", k_rope is None,
                             memory_budget, out)  # fmt: skip
        form = "expanded"
    made, lse = run(
        "mla", q, latent, k_rope, w_uk, w_uv, tensor_of(cu_seqlens_q), tensor_of(cu_seqlens_k), sinks, form, head_dim,
        head_dim_v, *mask_arguments(mask), softmax_scale, softcap, layout_argument(layout),
        layout_argument(key_layout), key_of(world), threads, memory_budget, timeout,
        None if q_offsets is None else list(q_offsets),
    )  # fmt: skip
    return given("mla", out, made), lse


@operator("mla_backward")
def _mla_backward_op(
    dout: Tensor, dlse: Tensor | None, q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor,
    sinks: Tensor | None, out: Tensor, lse: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, mask: str,
    left: int, right: int, softmax_scale: float, softcap: float, layout: str | None, key_layout: str | None,
    world: str | None, threads: int, memory_budget: int, timeout: float, q_offsets: list[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, latent, k_rope, w_uk, w_uv and sinks; the last one is empty without sinks."""
    return _mla_backward.mla_backward(
        dout, dlse, q, latent, k_rope, w_uk, w_uv, sinks, out, lse, cu_seqlens_q, cu_seqlens_k, mask=mask_of(mask, left, right),
        softmax_scale=softmax_scale, softcap=softcap, q_offsets=q_offsets, layout=layout_of(layout),
        key_layout=layout_of(key_layout), world=world_of(world), threads=threads, memory_budget=memory_budget, timeout=timeout,
    )  # fmt: skip


@fake("mla_backward")
def _(dout, dlse, q, latent, k_rope, w_uk, w_uv, sinks, *_):
    made = [x.new_empty(x.shape) for x in (q, latent, k_rope, w_uk, w_uv)]
    return *made, q.new_empty((0,) if sinks is None else sinks.shape, dtype=torch.float32)


def _save_mla(ctx, inputs, output):
    q, latent, k_rope, w_uk, w_uv, *begins, sinks, form, _, _, mask, left, right, softmax_scale = inputs[:15]
    *settings, _ = inputs[15:]
    whole = {"q": q, "latent": latent, "k_rope": k_rope, "w_uk": w_uk, "w_uv": w_uv, "sinks": sinks}
    names = [name for name, array in whole.items() if array is not None and array.requires_grad]
    _gradients.check_mla(names[0] if names else "q", form == "expanded", k_rope is None, settings[5], None)
    ctx.settings = (mask, left, right, _scale(q, softmax_scale), *settings)
    ctx.q_offsets, world = inputs[-1], settings[3]
    ctx.save_for_backward(q, latent, k_rope, w_uk, w_uv, sinks, *output, *begins)
    ctx.set_materialize_grads(False)
    ctx.world = None if world is None else worlds.of_key(world)  # keeps it


def _mla_gradients(ctx, dout, dlse):
    *tensors, out, lse, begin_q, begin_k = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    made = torch.ops.ringattn.mla_backward(dout, dlse, *tensors, out, lse, begin_q, begin_k, *ctx.settings, ctx.q_offsets)
    of_inputs = [None] * len(ctx.needs_input_grad)
    for place, gradient in zip((0, 1, 2, 3, 4, 7), made):
        of_inputs[place] = gradient if ctx.needs_input_grad[place] else None
    return tuple(of_inputs)


gradients_of("mla", _save_mla, _mla_gradients)


@operator("mla_decode", mutates=("cache", "lengths_before"))
def _mla_decode_op(
    q: Tensor, cache: Tensor, lengths: Tensor | None, w_uk: Tensor | None, w_uv: Tensor | None,
    lengths_before: Tensor | None, update_lengths: bool, block_table: Tensor | None, latent: Tensor | None,
    k_rope: Tensor | None, sinks: Tensor | None, rope_dim: int, head_dim: int | None, head_dim_v: int | None,
    mask: str, left: int, right: int, softmax_scale: float | None, softcap: float, max_keys: int | None, threads: int,
    timeout: float, kernel: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _mla.mla_decode(
        q, cache, lengths, w_uk, w_uv, lengths_before=lengths_before, update_lengths=update_lengths,
        block_table=block_table, latent=latent, k_rope=k_rope, rope_dim=rope_dim, head_dim=head_dim,
        head_dim_v=head_dim_v, mask=mask_of(mask, left, right), softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
        max_keys=max_keys, threads=threads, timeout=timeout, kernel=kernel,
    )  # fmt: skip


@fake("mla_decode")
def _(q, cache, lengths, w_uk, w_uv, lengths_before, update_lengths, block_table, latent, k_rope, sinks, rope_dim, *_):
    return new_rows(q, _mla.latent_dim_of(cache, rope_dim) if w_uv is None else w_uv.shape[1])


def mla_decode(q, cache, lengths=None, w_uk=None, w_uv=None, *, lengths_before=None, update_lengths=False, block_table=None,
               latent=None, k_rope=None, rope_dim=64, head_dim=None, head_dim_v=None, mask="causal", softmax_scale=None,
               softcap=0.0, sinks=None, max_keys=None, world=None, out=None, threads=0, timeout=60.0, kernel=None,
               **unknown):  # fmt: skip
    check_known("mla_decode", unknown)
    check_alone("mla_decode", world)
    made, lse = run(
        "mla_decode", q, cache, lengths, w_uk, w_uv, lengths_before, update_lengths, block_table, latent, k_rope, sinks, rope_dim,
        head_dim, head_dim_v, *mask_arguments(mask), softmax_scale, softcap, max_keys, threads, timeout, kernel,
    )  # fmt: skip
    return given("mla_decode", out, made), lse


@operator("batched_gemm")
def _batched_gemm_op(rows: Tensor, weights: Tensor, threads: int) -> Tensor:
    return _batched_gemm.batched_gemm(rows, weights, threads=threads)


@fake("batched_gemm")
def _(rows, weights, *_):
    return rows.new_empty((*rows.shape[: max(rows.ndim - 2, 1)], *weights.shape[:2]))


def batched_gemm(rows, weights, *, out=None, threads=0, **unknown):
    check_known("batched_gemm", unknown)
    return given("batched_gemm", out, run("batched_gemm", rows, weights, threads))


@operator("rope")
def _rope_op(
    q: Tensor, k: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None, offset: int, layout: str | None,
    type: str, parameters: str, theta: float, rotary_factor: float, interleaved: bool, exact: bool,
    inv_freq: list[float] | None, attention_factor: float, inverse: bool, threads: int, world: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotated q and k; the latter is empty without k."""
    settings = (type, parameters, theta, rotary_factor, interleaved, exact,
                None if inv_freq is None else tuple(inv_freq), attention_factor)  # fmt: skip
    with _below_autograd():
        q, k = _rope.rotate(q, k, positions, cu_seqlens, offset, layout_of(layout), settings, inverse, world_of(world), threads,
                            (None, None))  # fmt: skip
    return q, q.new_empty(0) if k is None else k


@fake("rope")
def _(q, k, *_):
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


def recorded_rope(q, k, positions, cu_seqlens, offset, layout, settings, world, threads):
    """rope() by the operator that autograd records."""
    *numbers, frequencies, attention_factor = settings
    q, rotated_k = run("rope", q, k, positions, tensor_of(cu_seqlens), offset, layout_argument(layout), *numbers,
                       None if frequencies is None else list(frequencies), attention_factor, False, threads,
                       key_of(world))  # fmt: skip
    return q, None if k is None else rotated_k


def rope(q, k=None, *, positions=None, cu_seqlens=None, offset=0, layout=None, rope_parameters=None, theta=None, rotary_dim=None,
         interleaved=False, inv_freq=None, attention_factor=None, exact=False, length=None, world=None, out=None, threads=0,
         **unknown):  # fmt: skip
    check_known("rope", unknown)
    name = _gradients.requiring({"q": q, "k": k})
    if name is not None:
        _gradients.check_out(name, out)
    settings = _rope.settings_of(rope_parameters, theta, rotary_dim, constant(q.shape[-1]), interleaved, inv_freq,
                                 attention_factor, exact, length)  # fmt: skip
    made_q, made_k = recorded_rope(q, k, positions, cu_seqlens, offset, layout, settings, world, threads)
    into = out if isinstance(out, (list, tuple)) else (out, None)
    made_q = given("rope", into[0], made_q)
    return made_q if k is None else (made_q, given("rope", into[1], made_k))


def _save_rope(ctx, inputs, output):
    _, _, positions, cu_seqlens, *ctx.settings = inputs
    ctx.save_for_backward(positions, cu_seqlens)
    ctx.set_materialize_grads(False)
    ctx.shapes = [None if array is None else array.shape for array in inputs[:2]]
    ctx.world = None if inputs[-1] is None else worlds.of_key(inputs[-1])  # keeps it


def _rope_gradients(ctx, dq, dk):
    *settings, inverse, threads, world = ctx.settings
    like = dk if dq is None else dq
    q_shape, k_shape = ctx.shapes
    dq = like.new_zeros(q_shape) if dq is None else dq
    if k_shape is None:
        dk = None
    elif dk is None and ctx.needs_input_grad[1]:
        dk = like.new_zeros(k_shape)
    dq, dk = torch.ops.ringattn.rope(dq, dk, *ctx.saved_tensors, *settings, not inverse, threads, world)
    of_inputs = [None] * len(ctx.needs_input_grad)
    of_inputs[:2] = dq if ctx.needs_input_grad[0] else None, dk if ctx.needs_input_grad[1] else None
    return tuple(of_inputs)


gradients_of("rope", _save_rope, _rope_gradients)


@operator("compress")
def _compress_op(x: Tensor, name: str, format: str, lengths: list[int], seed: int, threads: int) -> list[Tensor]:
    return _compression.compress_one(name, x, format, tuple(lengths), seed, threads).parts


@fake("compress")
def _(x, name, format, lengths, seed, threads):
    heads, dim = map(constant, x.shape[-2:])
    streams, tables = _parts_of(format, _compression.type_name(x.dtype), heads, dim, len(lengths))
    return [
        x.new_empty(shape, dtype=getattr(torch, kind))
        for kind, shape in [(kind, (*x.shape[:-2], *token)) for _, kind, token in streams]
        + [(kind, whole) for _, kind, whole in tables]
    ]


@operator("decompress")
def _decompress_op(
    parts: list[Tensor], like: Tensor, format: str, dim: int, lengths: list[int], threads: int
) -> Tensor:  # fmt: skip
    x = _keys(like, parts, format, dim)
    x.lengths = tuple(lengths)
    return _compression.decompress(x, threads=threads)


@fake("decompress")
def _(parts, like, format, dim, lengths, threads):
    return like.new_empty((*parts[0].shape[:-1], dim))


def compress(k, v, method="int4", *, ratio=None, cu_seqlens=None, seed=0, threads=0, **unknown):
    check_known("compress", unknown)
    heads, k_dim, v_dim = constant(k.shape[-2]), constant(k.shape[-1]), constant(v.shape[-1])
    formats = _choose_formats(method, ratio, _compression.type_name(k.dtype), heads, k_dim, v_dim)
    made = []
    for name, x, format in zip("kv", (k, v), formats):
        lengths = _compression.lengths_of(x, cu_seqlens)
        parts = run("compress", x, name, format, list(lengths), seed, threads)
        made.append(_keys(x, parts, format, x.shape[-1]))
        made[-1].lengths = lengths
    return tuple(made)


def decompress(x, *, out=None, threads=0, name="x", **unknown):
    check_known("decompress", unknown)
    like = x.parts[0].new_empty((), dtype=x.dtype)
    made = run("decompress", x.parts, like, x.format, x.shape[-1], list(x.lengths), threads)
    return given("decompress", out, made)


@operator("evict")
def _evict_op(
    k: Tensor, v: Tensor, q: Tensor | None, method: str, ratio: float, mask: str, left: int, right: int,
    softmax_scale: float | None, softcap: float, lengths: list[int], q_lengths: list[int], threads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    settings = (method, ratio, mask_of(mask, left, right), softmax_scale, softcap)
    return _eviction.evict_rows(k, v, q, settings, tuple(lengths), tuple(q_lengths), threads)


@fake("evict")
def _(k, v, q, method, ratio, mask, left, right, softmax_scale, softcap, lengths, q_lengths, threads):
    settings = (method, ratio, mask_of(mask, left, right), softmax_scale, softcap)
    kept, heads = _eviction.kept_of(_eviction.shape_of(k, v, q), settings, tuple(map(int, lengths)), tuple(map(int, q_lengths)))
    form = (k.shape[0], kept[0]) if k.ndim == 4 else (sum(kept),)
    places = torch.empty((*form, heads), dtype=torch.int32, device="cpu")
    return k.new_empty((*form, *k.shape[-2:])), v.new_empty((*form, *v.shape[-2:])), places


def evict(k, v, method="snapkv", *, ratio=0.5, q=None, cu_seqlens=None, cu_seqlens_q=None, mask="causal", softmax_scale=None,
          softcap=0.0, threads=0, **unknown):  # fmt: skip
    check_known("evict", unknown)
    lengths, q_lengths = _eviction.sequences_of(k, q, cu_seqlens, cu_seqlens_q)
    k, v, places = run("evict", k, v, q, method, ratio, *mask_arguments(mask), softmax_scale, softcap, list(lengths),
                       list(q_lengths), threads)  # fmt: skip
    # Lengths that come from tensor shapes need not be constants of a graph; those of cu_seqlens are.
    kept = (places.shape[0],) if cu_seqlens is None else _kept_lengths(method, ratio, lengths)
    return _eviction.Kept(k, v, places, lengths, _eviction.begins(k, kept))
