# SPDX-License-Identifier: Apache-2.0
"""torch.ops.ringattn.*: the ops of this package as PyTorch's, with fake implementations, so that torch.compile and
torch.export keep them in their graphs. Under torch.compile ringattn.attention() and the others become these.

A world or a Layout is passed as its number, World.number and Layout.number (0: none), which must live as long as graphs use
it. mask is "causal", "full" or "window" with left and right. Keys and values are lists: [rows], with a format "" and a dim 0, or
the streams and tables of a Compressed with its format and dim."""

import torch
from torch import Tensor, library

from . import _attention, _compression, _decode, _latent, _scan, layouts, worlds
from ._compression import Compressed
from ._errors import unsupported


_LIBRARY = library.Library("ringattn", "DEF")


def _operator(name: str, mutates: tuple[str, ...] = ()):
    """Makes the function an operator of the CPU and of GPUs. library.custom_op() would do so with kernels of Python around it,
    for gradients that there are not, which cost more than the call."""

    def register(function):
        schema = name + library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        return function

    return register


def _mask(mask: str, left: int, right: int):
    return (left, right) if mask == "window" else mask


def _mask_arguments(mask) -> tuple[str, int, int]:
    return (mask, 0, 0) if isinstance(mask, str) else ("window", mask[0], mask[1])


def _layout(name: str, number: int):
    return layouts.by_number[number] if number else name or None


def _layout_arguments(layout) -> tuple[str, int]:
    if layout is None:
        return "", 0
    return (layout, 0) if isinstance(layout, str) else ("", layout.number)


def _world(number: int):
    return worlds.by_number[number] if number else None


def _number(world) -> int:
    return 0 if world is None else world.number


def _rows(q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], dim)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _given(out: Tensor | None, made: Tensor) -> Tensor:
    return made if out is None else out.copy_(made)


# What the library says of a format: constants of a graph.
@torch.compiler.assume_constant_result
def _parts_of(*given):
    return _compression.parts_of(*given)


@torch.compiler.assume_constant_result
def _choose_formats(*given):
    return _compression.choose_formats(*given)


def _keys_arguments(rows) -> tuple[list[Tensor], str, int]:
    """Keys or values as an operator takes them."""
    return (rows.parts, rows.format, rows.shape[-1]) if isinstance(rows, Compressed) else ([rows], "", 0)


def _keys(q: Tensor, parts: list[Tensor], format: str, dim: int):
    """The other way; q is of their dtype."""
    if not format:
        return parts[0]
    streams, tables = _parts_of(format, _compression.type_name(q.dtype), parts[0].shape[-2], dim)
    names = [name for name, _, _ in (*streams, *tables)]
    named = dict(zip(names, parts, strict=True))
    tails = {name: named.pop(name) for name, _, _ in tables}
    return Compressed(format, (*parts[0].shape[:-1], dim), q.dtype, named, tails, ())


@_operator("attention")
def _attention_op(
    q: Tensor, k: list[Tensor], v: list[Tensor], k_format: str, k_dim: int, v_format: str, v_dim: int,
    sinks: Tensor | None, mask: str, left: int, right: int, softmax_scale: float | None, softcap: float, q_offset: int | None,
    layout: str, layout_number: int, key_layout: str, key_layout_number: int,
    lengths: list[int], world: int, threads: int, memory_budget: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attention.attention(
        q, _keys(q, k, k_format, k_dim), _keys(q, v, v_format, v_dim), mask=_mask(mask, left, right),
        softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, q_offset=q_offset,
        layout=_layout(layout, layout_number), key_layout=_layout(key_layout, key_layout_number),
        lengths=tuple(lengths) if lengths else None, world=_world(world), threads=threads, memory_budget=memory_budget,
        timeout=timeout,
    )  # fmt: skip


@library.register_fake("ringattn::attention", lib=_LIBRARY)
def _(q, k, v, k_format, k_dim, v_format, v_dim, *_):
    return _rows(q, v_dim or v[0].shape[-1])


def attention(q, k, v, *, mask="causal", softmax_scale=None, softcap=0.0, sinks=None, q_offset=None, layout=None, key_layout=None,
              lengths=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0, **unknown):  # fmt: skip
    _check("attention", unknown, q, k, v)
    (k, *k_is), (v, *v_is) = _keys_arguments(k), _keys_arguments(v)
    made, lse = torch.ops.ringattn.attention(
        q, k, v, *k_is, *v_is, sinks, *_mask_arguments(mask), softmax_scale, softcap, q_offset, *_layout_arguments(layout),
        *_layout_arguments(key_layout), list(lengths or ()), _number(world), threads, memory_budget, timeout,
    )  # fmt: skip
    return _given(out, made), lse


@_operator("varlen")
def _varlen_op(
    q: Tensor, k: list[Tensor], v: list[Tensor], k_format: str, k_dim: int, v_format: str, v_dim: int, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None, sinks: Tensor | None, mask: str,
    left: int, right: int, softmax_scale: float | None, softcap: float, q_offsets: list[int] | None, layout: str,
    layout_number: int, key_layout: str, key_layout_number: int, world: int, threads: int, memory_budget: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attention.varlen(
        q, _keys(q, k, k_format, k_dim), _keys(q, v, v_format, v_dim), cu_seqlens_q, cu_seqlens_k,
        mask=_mask(mask, left, right), softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, q_offsets=q_offsets, layout=_layout(layout, layout_number),
        key_layout=_layout(key_layout, key_layout_number), world=_world(world), threads=threads, memory_budget=memory_budget,
        timeout=timeout,
    )  # fmt: skip


@library.register_fake("ringattn::varlen", lib=_LIBRARY)
def _(q, k, v, k_format, k_dim, v_format, v_dim, *_):
    return _rows(q, v_dim or v[0].shape[-1])


def _tensor(values):
    return values if values is None or isinstance(values, Tensor) else torch.tensor(values)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, mask="causal", softmax_scale=None, softcap=0.0, sinks=None,
           q_offsets=None, layout=None, key_layout=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0,
           **unknown):  # fmt: skip
    _check("varlen", unknown, q, k, v)
    (k, *k_is), (v, *v_is) = _keys_arguments(k), _keys_arguments(v)
    made, lse = torch.ops.ringattn.varlen(
        q, k, v, *k_is, *v_is, _tensor(cu_seqlens_q), _tensor(cu_seqlens_k), sinks, *_mask_arguments(mask), softmax_scale,
        softcap, q_offsets,
        *_layout_arguments(layout), *_layout_arguments(key_layout), _number(world), threads, memory_budget, timeout,
    )  # fmt: skip
    return _given(out, made), lse


@_operator("decode", mutates=("k_cache", "v_cache", "lengths"))
def _decode_op(
    q: Tensor, k_cache: list[Tensor], v_cache: list[Tensor], k_format: str, k_dim: int, v_format: str, v_dim: int,
    lengths: Tensor, block_table: Tensor | None, k_new: Tensor | None,
    v_new: Tensor | None, sinks: Tensor | None, grow: bool, mask: str, left: int, right: int, softmax_scale: float | None,
    softcap: float, max_keys: int | None, threads: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _decode.decode(
        q, _keys(q, k_cache, k_format, k_dim), _keys(q, v_cache, v_format, v_dim), lengths, block_table=block_table,
        k_new=k_new, v_new=v_new, grow=grow, mask=_mask(mask, left, right),
        softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, max_keys=max_keys, threads=threads, timeout=timeout,
    )  # fmt: skip


@library.register_fake("ringattn::decode", lib=_LIBRARY)
def _(q, k_cache, v_cache, k_format, k_dim, v_format, v_dim, *_):
    return _rows(q, v_dim or v_cache[0].shape[-1])


def decode(q, k_cache, v_cache, lengths, *, block_table=None, k_new=None, v_new=None, grow=False, mask="causal",
           softmax_scale=None, softcap=0.0, sinks=None, max_keys=None, world=None, out=None, threads=0, timeout=60.0,
           **unknown):  # fmt: skip
    _check("decode", unknown, q, k_cache, v_cache, k_new, v_new)
    _check_alone("decode", world)
    (k, *k_is), (v, *v_is) = _keys_arguments(k_cache), _keys_arguments(v_cache)
    made, lse = torch.ops.ringattn.decode(
        q, k, v, *k_is, *v_is, lengths, block_table, k_new, v_new, sinks, grow, *_mask_arguments(mask), softmax_scale, softcap,
        max_keys, threads, timeout,
    )  # fmt: skip
    return _given(out, made), lse


@_operator("mla")
def _mla_op(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor | None, w_uv: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, sinks: Tensor | None, form: str | None, head_dim: int | None, head_dim_v: int | None, mask: str,
    left: int, right: int, softmax_scale: float | None, softcap: float, layout: str, layout_number: int, key_layout: str,
    key_layout_number: int, world: int, threads: int, memory_budget: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _latent.mla(
        q, latent, k_rope, w_uk, w_uv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, form=form, head_dim=head_dim,
        head_dim_v=head_dim_v, mask=_mask(mask, left, right), softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
        layout=_layout(layout, layout_number), key_layout=_layout(key_layout, key_layout_number), world=_world(world),
        threads=threads, memory_budget=memory_budget, timeout=timeout,
    )  # fmt: skip


@library.register_fake("ringattn::mla", lib=_LIBRARY)
def _(q, latent, k_rope, w_uk, w_uv, *_):
    return _rows(q, latent.shape[-1] if w_uv is None else w_uv.shape[1])


def mla(q, latent, k_rope, w_uk=None, w_uv=None, *, cu_seqlens_q=None, cu_seqlens_k=None, form=None, head_dim=None,
        head_dim_v=None, mask="causal", softmax_scale=None, softcap=0.0, sinks=None, layout=None, key_layout=None, world=None,
        out=None, threads=0, memory_budget=0, timeout=60.0, **unknown):  # fmt: skip
    _check("mla", unknown, q, latent, k_rope, w_uk, w_uv)
    made, lse = torch.ops.ringattn.mla(
        q, latent, k_rope, w_uk, w_uv, _tensor(cu_seqlens_q), _tensor(cu_seqlens_k), sinks, form, head_dim, head_dim_v,
        *_mask_arguments(mask), softmax_scale, softcap, *_layout_arguments(layout), *_layout_arguments(key_layout),
        _number(world), threads, memory_budget, timeout,
    )  # fmt: skip
    return _given(out, made), lse


@_operator("mla_decode", mutates=("cache", "lengths"))
def _mla_decode_op(
    q: Tensor, cache: Tensor, lengths: Tensor, w_uk: Tensor | None, w_uv: Tensor | None, block_table: Tensor | None,
    latent: Tensor | None, k_rope: Tensor | None, sinks: Tensor | None, rope_dim: int, grow: bool, head_dim: int | None,
    head_dim_v: int | None, mask: str, left: int, right: int, softmax_scale: float | None, softcap: float, max_keys: int | None,
    threads: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _latent.mla_decode(
        q, cache, lengths, w_uk, w_uv, block_table=block_table, latent=latent, k_rope=k_rope, rope_dim=rope_dim, grow=grow,
        head_dim=head_dim, head_dim_v=head_dim_v, mask=_mask(mask, left, right), softmax_scale=softmax_scale, softcap=softcap,
        sinks=sinks, max_keys=max_keys, threads=threads, timeout=timeout,
    )  # fmt: skip


@library.register_fake("ringattn::mla_decode", lib=_LIBRARY)
def _(q, cache, lengths, w_uk, w_uv, block_table, latent, k_rope, sinks, rope_dim, *_):
    return _rows(q, cache.shape[-1] - rope_dim if w_uv is None else w_uv.shape[1])


def mla_decode(q, cache, lengths, w_uk=None, w_uv=None, *, block_table=None, latent=None, k_rope=None, rope_dim=64, grow=False,
               head_dim=None, head_dim_v=None, mask="causal", softmax_scale=None, softcap=0.0, sinks=None, max_keys=None,
               world=None, out=None, threads=0, timeout=60.0, **unknown):  # fmt: skip
    _check("mla_decode", unknown, q, cache, latent, k_rope, w_uk, w_uv)
    _check_alone("mla_decode", world)
    made, lse = torch.ops.ringattn.mla_decode(
        q, cache, lengths, w_uk, w_uv, block_table, latent, k_rope, sinks, rope_dim, grow, head_dim, head_dim_v,
        *_mask_arguments(mask), softmax_scale, softcap, max_keys, threads, timeout,
    )  # fmt: skip
    return _given(out, made), lse


@_operator("ssd")
def _ssd_op(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
    dt_softplus: bool, dt_limit: list[float] | None, initial_states: Tensor | None, cu_seqlens: Tensor | None, threads: int,
    memory_budget: int, timeout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _scan.ssd(
        x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus,
        dt_limit=None if dt_limit is None else tuple(dt_limit), initial_states=initial_states, return_final_states=True,
        cu_seqlens=cu_seqlens, threads=threads,
        memory_budget=memory_budget, timeout=timeout,
    )  # fmt: skip


@library.register_fake("ringattn::ssd", lib=_LIBRARY)
def _(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, cu_seqlens, *_):
    sequences = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else x.shape[0] if x.ndim == 4 else 1
    return torch.empty_like(x), x.new_empty((sequences, *x.shape[-2:], B.shape[-1]), dtype=torch.float32)


def ssd(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=None, initial_states=None,
        return_final_states=False, cu_seqlens=None, layout=None, world=None, out=None, threads=0, memory_budget=0, timeout=60.0,
        **unknown):  # fmt: skip
    _check("ssd", unknown, x, dt, A, B, C)
    _check_alone("ssd", world)
    limit = None if dt_limit is None else list(dt_limit)
    y, states = torch.ops.ringattn.ssd(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        dt_softplus,
        limit,
        initial_states,
        _tensor(cu_seqlens),
        threads,
        memory_budget,
        timeout,
    )
    y = _given(out, y)
    return (y, states) if return_final_states else y


def selective_scan(u, delta, A, B, C, **named):
    unsupported(
        "selective_scan is not one of torch.ops.ringattn",
        "torch.compile met it",
        "Call it outside of the compiled part.",
    )


@_operator("compress")
def _compress_op(x: Tensor, name: str, format: str, lengths: list[int], seed: int, threads: int) -> list[Tensor]:
    return _compression.compress_one(name, x, format, tuple(lengths), seed, threads).parts


@library.register_fake("ringattn::compress", lib=_LIBRARY)
def _(x, name, format, lengths, seed, threads):
    streams, tables = _parts_of(format, _compression.type_name(x.dtype), x.shape[-2], x.shape[-1], len(lengths))
    return [
        x.new_empty(shape, dtype=getattr(torch, kind))
        for kind, shape in [(kind, (*x.shape[:-2], *token)) for _, kind, token in streams]
        + [(kind, whole) for _, kind, whole in tables]
    ]


@_operator("decompress")
def _decompress_op(
    parts: list[Tensor], like: Tensor, format: str, dim: int, lengths: list[int], threads: int
) -> Tensor:  # fmt: skip
    x = _keys(like, parts, format, dim)
    x.lengths = tuple(lengths)
    return _compression.decompress(x, threads=threads)


@library.register_fake("ringattn::decompress", lib=_LIBRARY)
def _(parts, like, format, dim, lengths, threads):
    return like.new_empty((*parts[0].shape[:-1], dim))


def compress(k, v, method="int4", *, ratio=None, cu_seqlens=None, seed=0, threads=0):
    formats = _choose_formats(method, ratio, _compression.type_name(k.dtype), k.shape[-2], k.shape[-1], v.shape[-1])
    made = []
    for name, x, format in zip("kv", (k, v), formats):
        lengths = _compression.lengths_of(x, cu_seqlens)
        parts = torch.ops.ringattn.compress(x, name, format, list(lengths), seed, threads)
        made.append(_keys(x, parts, format, x.shape[-1]))
        made[-1].lengths = lengths
    return tuple(made)


def decompress(x, *, out=None, threads=0, name="x"):
    like = x.parts[0].new_empty((), dtype=x.dtype)
    made = torch.ops.ringattn.decompress(x.parts, like, x.format, x.shape[-1], list(x.lengths), threads)
    return _given(out, made)


def _check(op: str, unknown: dict, *tensors) -> None:
    for name in unknown:
        unsupported(f"{op} has no {name}", "it was given", "Leave it out.")
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and not isinstance(tensor, Compressed) and tensor.requires_grad:
                unsupported(f"an input of {op} requires a gradient", "ringattn has no backward pass",
                            "Call it under torch.no_grad(), or pass detached tensors.")  # fmt: skip


def _check_alone(op: str, world) -> None:
    if world is not None and world.size > 1:
        unsupported(f"{op} over {world.size} ranks can't be compiled", "the shapes of its results depend on the rank",
                    "Call it outside of the compiled part.")  # fmt: skip
