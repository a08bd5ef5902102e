# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek's MLA). A token has one latent and one rotary key for all heads. Ranks exchange
latents and rotary keys, and caches hold them.

FP8 rows have FlashMLA's layout, as uint8: latent_dim E4M3 values, a float32 scale for each 128 of them, and the rotary
key in bfloat16: 656 bytes for dims 512 and 64. latent_dim is a multiple of 128, the rotary dim a multiple of 4, and all
other tensors are bfloat16. Results are bitwise identical to those over the dequantized rows."""

from . import _abi, _gradients, _job, _structs
from ._arguments import as_fp32, as_int, as_ints, as_text, check_axes, check_settings, is_true, lengths_of
from ._arguments import refuse_unknown, scale_members
from ._errors import refuse
from ._tensors import contiguous_heads, data_type, empty, traced, traced_step, type_name
from ._decode import DecodePartition, MlaDecode, c_limits, check_tables, check_which_lengths, finish_step, flat, limits_of
from ._decode import steps_of, written_by_step
from .layouts import Layout
from .worlds import World


class Mla(_job.Prepared):
    """A prepared job. mla() keeps such objects. Creating one is collective."""

    op = "mla"

    @property
    def form(self) -> str:
        """The form that was chosen, "expanded" or "absorbed"."""
        return {form: name for name, form in _abi.FORMS.items()}[self.facts.form]


def _check_matrices(w_uk, w_uv) -> None:
    check_axes("w_uk", w_uk, (3,), "[heads, head_dim, latent_dim]")
    check_axes("w_uv", w_uv, (3,), "[heads, head_dim_v, latent_dim]")


def _dims(q, latent_dim: int, rope_dim: int, w_uk, w_uv, head_dim: int | None, head_dim_v: int | None):
    """Returns (head_dim, head_dim_v, dim of out), from the matrices or, without them, from the caller."""
    for name, given, matrix, of in (("head_dim", head_dim, w_uk, "w_uk"), ("head_dim_v", head_dim_v, w_uv, "w_uv")):
        if given is not None and matrix is not None and as_int(given, name) != matrix.shape[1]:
            refuse(f"{name} is {given}", f"{of} is {list(matrix.shape)}, and its second number is that",
                   f"Leave {name} out where {of} is given.")  # fmt: skip
        if given is not None and matrix is None and as_int(given, name) < 1:
            refuse(f"{name} is {given}", "a head has at least one element", f"Check {name}.")
    if w_uk is not None:
        head_dim = w_uk.shape[1]
    elif head_dim is None:
        refuse("head_dim is not given", "without w_uk the queries are in the latent already, and don't tell it",
               "Pass head_dim: the scale is 1 / sqrt(head_dim + rope_dim).")  # fmt: skip
    head_dim_v = w_uv.shape[1] if w_uv is not None else head_dim_v or head_dim
    return head_dim, head_dim_v, head_dim_v if w_uv is not None else latent_dim


def _is_fp8(rows) -> bool:
    """True for FP8 rows."""
    return type_name(rows.dtype) == "uint8"


def _refuse_float8(name: str, rows) -> None:
    if "float8" in type_name(rows.dtype):
        refuse(f"{name} is {type_name(rows.dtype)}", "FP8 rows hold more than quantized values",
               'Pass it as bytes: .view("uint8"), '
               "of PyTorch .view(torch.uint8).")  # fmt: skip


def latent_dim_of(rows, rope_dim: int) -> int:
    """latent_dim of joined rows, [..., latent_dim + rope_dim], or of FP8 rows."""
    numbers = rows.shape[-1]
    return (numbers - 2 * rope_dim) * 32 // 33 if _is_fp8(rows) else numbers - rope_dim


def _check_rows(name: str, rows, rope_dim: int) -> None:
    """Checks that an FP8 row has a multiple of 128 values, their scales and a rotary key."""
    codes, rest = divmod(rows.shape[-1] - 2 * rope_dim, 132)
    if codes < 1 or rest != 0 or rope_dim < 1:
        refuse(f"{name} has rows of {rows.shape[-1]} bytes",
               f"with a rotary key of {rope_dim} numbers it is 132 · n + {2 * rope_dim} bytes, for 128 · n quantized values",
               "Pass all of a row, and the matrices or rope_dim that belong to it.")  # fmt: skip


def rotary_of(q, latent, k_rope, w_uk) -> int:
    """rope_dim of the arrays of mla()."""
    if k_rope is not None:
        return k_rope.shape[-1]
    if w_uk is not None:
        return q.shape[-1] - w_uk.shape[1]
    return q.shape[-1] - (2 * q.shape[-1] - latent.shape[-1]) * 32 // 31  # q has as many numbers as a row has


def _spec(like, heads, head_dim, rope_dim, head_dim_v, latent_dim, mask, softmax_scale, softcap, sinks, fp8):
    kind, left, right = _job.read_mask(mask)
    return _structs.mla_spec(dtype=data_type(like), heads=heads, head_dim=head_dim, rope_dim=rope_dim, head_dim_v=head_dim_v,
                                latent_dim=latent_dim, mask=kind, sinks=int(sinks), window_left=left, window_right=right,
                                softcap=as_fp32(softcap, "softcap"),
                                format=f"latent rope {rope_dim}".encode() if fp8 else None,
                                **scale_members(softmax_scale))  # fmt: skip


@traced
def mla(q, latent, k_rope=None, w_uk=None, w_uv=None, *, cu_seqlens_q=None, cu_seqlens_k=None, form: str | None = None,
        head_dim: int | None = None, head_dim_v: int | None = None, mask: _job.Mask = "causal",
        softmax_scale: float | None = None, softcap: float = 0.0, sinks=None, q_offsets=None,
        layout: str | Layout | None = None, key_layout: str | Layout | None = None, world: World | None = None, out=None,
        threads: int = 0, memory_budget: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Multi-head latent attention over a packed batch. cu_seqlens_q gives its sequences, or else a Layout; without either there
    is one sequence. Collective with several ranks.

    Args:
        q: [tokens, heads, head_dim + rope_dim]; in the absorbed form without w_uk [tokens, heads, latent_dim + rope_dim].
        latent: [keys, latent_dim]. FP8: uint8 [keys, row_bytes], which also hold the rotary keys.
        k_rope: [keys, rope_dim]; None with FP8 latents. latent and k_rope may be columns of one tensor.
        w_uk: [heads, head_dim, latent_dim], a view of kv_b_proj's weight.
        w_uv: [heads, head_dim_v, latent_dim], as w_uk.
        form: "expanded" computes K and V of each head; "absorbed" multiplies w_uk into q and w_uv into out. They round
            differently, so their results are not bitwise identical. None: chosen by the longest query length. In the absorbed
            form w_uk may be None if q is already in the latent space, and w_uv if out is to stay in it.
        head_dim, head_dim_v: dims of the matrices, if these are not given.
        cu_seqlens_q, cu_seqlens_k, mask, softmax_scale, softcap, sinks, q_offsets, layout, key_layout, world, out, threads,
            memory_budget, timeout: as in varlen().

    Returns:
        (out, lse): [tokens, heads, head_dim_v or latent_dim] of q's dtype, and float32 [tokens, heads]. PyTorch tensors have
        gradients of q, latent, k_rope, w_uk, w_uv and sinks, in the expanded form, which is chosen if one is required. With
        several ranks the gradients of w_uk, w_uv and sinks are already sums over all ranks.

    Raises:
        CallError, UsageError, UnsupportedError, OutOfMemory, PeerError: as attention().

    Formula:
        MLA of DeepSeek-V2 (arXiv:2405.04434); docs/mla.md has both forms::

            k_h = concat(w_uk[h] @ latent, k_rope)        v_h = w_uv[h] @ latent        for each head h, then as attention()
            softmax_scale = 1 / sqrt(head_dim + rope_dim) by default

    Example:
        >>> q, latent, k_rope = (np.ones(shape, "float32") for shape in ((10, 2, 24), (10, 32), (10, 8)))
        >>> w_uk = w_uv = np.ones((2, 16, 32), "float32")
        >>> out, lse = ringattn.mla(q, latent, k_rope, w_uk, w_uv)
        >>> out.shape
        (10, 2, 16)
    """
    if unknown:
        refuse_unknown("mla", unknown)
    cu = tuple(None if at is None else lengths_of(at, name)
               for at, name in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k")))  # fmt: skip
    offsets = None if q_offsets is None else tuple(as_ints(q_offsets, "q_offsets"))
    given = {"q": q, "latent": latent, "k_rope": k_rope, "w_uk": w_uk, "w_uv": w_uv, "sinks": sinks}
    settings = ("mla", cu, offsets, form, head_dim, head_dim_v, mask, softmax_scale, softcap, layout, key_layout, threads,
                memory_budget, timeout)  # fmt: skip
    call, results = _job.known_call(world, settings, given, out)
    if results is not None:
        return results
    _job.read_mask(mask)
    _job.check_arrays("mla", {"q": q, "latent": latent}, k_rope=k_rope, w_uk=w_uk, w_uv=w_uv, sinks=sinks, out=out)
    fp8 = _is_fp8(latent)
    _refuse_float8("latent", latent)
    _job.check_dtypes(q=q, latent=latent, k_rope=k_rope, w_uk=w_uk, w_uv=w_uv, out=out)
    if fp8 == (k_rope is not None):
        refuse(f"k_rope of mla is {'given' if fp8 else 'missing'}", f"latent is {type_name(latent.dtype)}, and "
               f"{'its rows have the rotary keys' if fp8 else 'only FP8 rows have rotary keys'}",
               "Leave it out." if fp8 else "Pass the rotary keys.")  # fmt: skip
    check_settings((form,))
    if form not in _abi.FORMS:
        refuse(f"form {form!r} is not known", 'there are "expanded" and "absorbed"', "Choose one, or None.")
    check_axes("q", q, (3,), "[tokens, heads, head_dim + rope_dim]")
    check_axes("latent", latent, (2, 3), "[tokens, bytes of a row]" if fp8 else "[tokens, latent_dim]")
    check_axes("k_rope", k_rope, (2, 3), "[tokens, rope_dim]")
    _check_matrices(w_uk, w_uv)
    own = _job.world_of(q, world)
    if fp8:
        _check_rows("latent", latent, rotary_of(q, latent, k_rope, w_uk))
    wanting = _gradients.requiring(given)
    if wanting is not None:
        _gradients.check_mla(wanting, w_uk is not None and w_uv is not None and form != "absorbed", fp8,
                             memory_budget, out)  # fmt: skip
        form = "expanded"
    job = (own, q, latent, k_rope, w_uk, w_uv, cu, offsets, form, head_dim, head_dim_v, mask, softmax_scale, softcap, sinks,
           layout, key_layout)  # fmt: skip
    limits = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    if wanting is not None:
        return _recorded(job, limits, given, cu_seqlens_q, cu_seqlens_k, world)
    prepared = prepared_of(Mla, *job, **limits)
    if out is None:
        out_dim = latent_dim_of_rows(q, latent, k_rope, w_uk) if w_uv is None else w_uv.shape[1]
        out = empty(q, (*q.shape[:2], out_dim))
    lse = empty(q, q.shape[:2], "float32")
    arrays = {"q": contiguous_heads(q), "latent": one_head(latent), "k_rope": None if fp8 else one_head(k_rope),
              "w_uk": w_uk, "w_uv": w_uv, "sinks": sinks, "out": out, "lse": lse}  # fmt: skip
    prepared._do(q, arrays, prepared.facts.workspace_bytes)
    _job.keep_call(world, call, prepared, arrays, given, out, lse, prepared.facts.workspace_bytes)
    return out, lse


def latent_dim_of_rows(q, latent, k_rope, w_uk) -> int:
    """latent_dim of the arrays of mla()."""
    return latent_dim_of(latent, rotary_of(q, latent, k_rope, w_uk)) if _is_fp8(latent) else latent.shape[-1]


def prepared_of(kind, own: World, q, latent, k_rope, w_uk, w_uv, cu, offsets, form, head_dim, head_dim_v, mask, softmax_scale,
                softcap, sinks, layout, key_layout, **limits):  # fmt: skip
    """The world's prepared job of these arrays: an Mla, or an MlaBackward. cu: lengths of queries and of keys, or None."""
    fp8, heads, rope_dim = _is_fp8(latent), q.shape[1], rotary_of(q, latent, k_rope, w_uk)
    latent_dim = latent_dim_of_rows(q, latent, k_rope, w_uk)
    head_dim, head_dim_v, _ = _dims(q, latent_dim, rope_dim, w_uk, w_uv, head_dim, head_dim_v)
    of_keys = layout if key_layout is None else key_layout
    q_lengths = _lengths(cu[0], layout, q.shape[0], own)
    k_lengths = q_lengths if cu[0] is not None and cu[1] is None else _lengths(cu[1], of_keys, latent.shape[0], own)
    key = (kind.op, q.dtype, fp8, heads, head_dim, rope_dim, head_dim_v, latent_dim, form, mask, softmax_scale, softcap,
           sinks is not None, q_lengths, k_lengths, offsets, layout, key_layout, *limits.values())  # fmt: skip

    def make():
        spec = _spec(
            q, heads, head_dim, rope_dim, head_dim_v, latent_dim, mask, softmax_scale, softcap, sinks is not None, fp8
        )
        options = _job.c_options(own, q_lengths, k_lengths, layout, key_layout, **limits)
        return kind(own, spec, _job.c_batch(q_lengths, k_lengths, offsets), _abi.FORMS[form], options)

    return own.prepared(key, make)


def _recorded(job: tuple, limits: dict, given: dict, cu_seqlens_q, cu_seqlens_k, world: World | None):
    """mla() by the operator that autograd records. Prepares the backward pass first, so that a job without gradients is refused
    before its forward pass runs. job: the arguments of prepared_of()."""
    from . import torch_ops  # noqa: PLC0415, needs torch
    from ._mla_backward import MlaBackward, default_scale  # noqa: PLC0415, which needs this

    *shards, offsets, form, head_dim, head_dim_v, mask, softmax_scale, softcap, sinks, layout, key_layout = job
    scale = default_scale(given["q"]) if softmax_scale is None else softmax_scale
    prepared_of(MlaBackward, *shards, offsets, form, head_dim, head_dim_v, mask, scale, softcap, sinks, layout, key_layout,
                **limits)  # fmt: skip
    rows = [given[name] for name in ("q", "latent", "k_rope", "w_uk", "w_uv")]
    return torch_ops.mla(*rows, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, form=form, mask=mask,
                         softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, q_offsets=offsets, layout=layout,
                         key_layout=key_layout, world=world, threads=limits["threads"],
                         memory_budget=limits["memory_budget"], timeout=limits["timeout_seconds"])  # fmt: skip


def _lengths(given: tuple[int, ...] | None, layout, rows: int, world: World) -> tuple[int, ...]:
    """Lengths of the sequences over all ranks."""
    if given is not None:
        return given
    return layout.lengths if isinstance(layout, Layout) else (rows * world.size,)


def one_head(rows):
    """[tokens, dim] as [tokens, 1, dim]; a tensor that has three axes is returned as it is."""
    rows = contiguous_heads(rows)
    return rows if rows.ndim == 3 else rows[:, None, :]


@traced_step("latent", 2)
def mla_decode(q, cache, lengths=None, w_uk=None, w_uv=None, *, lengths_before=None, update_lengths: bool = False,
               block_table=None, latent=None, k_rope=None, rope_dim: int = 64, head_dim: int | None = None,
               head_dim_v: int | None = None, mask: _job.Mask = "causal", softmax_scale: float | None = None,
               softcap: float = 0.0, sinks=None, max_keys: int | None = None, world: World | None = None, out=None,
               threads: int = 0, timeout: float = 60.0, kernel: str | None = None, **unknown):  # fmt: skip
    """One decode step over a latent cache, in the absorbed form. Collective with several ranks.

    On CPUs and with sm80_attention, rows are bitwise identical to those of absorbed mla() over the whole sequence. Hopper's
    sm90_mla and sm90_mla_split1k round differently from mla() and from each other.

    Args:
        q: [sequences, (rows,) heads, head_dim + rope_dim]; without w_uk [..., latent_dim + rope_dim].
        cache: [pages, page_size, latent_dim + rope_dim], the latent, then the rotary key. Or FP8 rows, uint8 [pages, page_size,
            row_bytes]; new tokens are quantized when they are appended.
        latent, k_rope: [sequences, (rows,) latent_dim or rope_dim], new tokens, appended to the cache first.
        rope_dim: dim of the rotary key. DeepSeek's models have 64.
        kernel: name of the kernel to use; "sm90_mla_split1k" is faster for few sequences (docs/mla.md). None: chosen.
        w_uk, w_uv, head_dim, head_dim_v: as in mla().
        lengths, lengths_before, update_lengths, block_table, max_keys: as in decode().
        mask, softmax_scale, softcap, sinks, world, out, threads, timeout: as in attention().

    Returns:
        (out, lse). out: [sequences, (rows,) heads, head_dim_v or latent_dim] of q's dtype. lse: float32 [sequences, (rows,)
        heads]. With several ranks both have only this rank's sequences: see mla_decode_partition().

    Raises:
        CallError, UsageError, UnsupportedError, PeerError: as decode().

    Formula:
        The absorbed form of mla() (arXiv:2405.04434, docs/mla.md).

    Example:
        >>> cache, q = np.ones((1, 64, 40), "float32"), np.ones((1, 2, 24), "float32")
        >>> w = np.ones((2, 16, 32), "float32")
        >>> out, lse = ringattn.mla_decode(q, cache, np.array([20], "int32"), w, w, rope_dim=8)
        >>> out.shape
        (1, 2, 16)
    """
    if unknown:
        refuse_unknown("mla_decode", unknown)
    is_true("update_lengths", update_lengths)
    given = {"q": q, "cache": cache, "block_table": block_table, "lengths": lengths,
             "lengths_before": lengths_before, "sinks": sinks, "w_uk": w_uk, "w_uv": w_uv, "latent": latent,
             "k_rope": k_rope}  # fmt: skip
    settings = ("mla_decode", rope_dim, update_lengths, head_dim, head_dim_v, mask, softmax_scale, softcap, max_keys, threads,
                timeout, kernel)  # fmt: skip
    call, results = _job.known_call(world, settings, given, out)
    if results is not None:
        return results
    check_which_lengths("mla_decode", lengths, lengths_before, update_lengths)
    _job.check_arrays("mla_decode", {"q": q, "cache": cache}, written_by_step(("cache",), latent, update_lengths),
                      lengths=lengths, lengths_before=lengths_before, block_table=block_table, latent=latent, k_rope=k_rope,
                      w_uk=w_uk, w_uv=w_uv, sinks=sinks,
                      out=out)  # fmt: skip
    check_tables(lengths, lengths_before, block_table)
    own = _job.world_of(q, world)
    step, sequences, rows, out_dim = _prepared_step(own, q, cache, w_uk, w_uv, block_table, rope_dim, head_dim, head_dim_v, mask,
                                                    softmax_scale, softcap, sinks, max_keys, threads, timeout,
                                                    kernel)  # fmt: skip
    flat_q = contiguous_heads(q).reshape(sequences * rows, *q.shape[-2:])
    latent_dim = latent_dim_of(cache, rope_dim)
    arrays = {"q": flat_q, "cache": cache if cache.ndim == 4 else cache[:, :, None, :], "block_table": block_table,
              "lengths": lengths, "lengths_before": lengths_before, "sinks": sinks, "w_uk": w_uk, "w_uv": w_uv,
              "latent": flat("latent", latent, q, latent_dim),
              "k_rope": flat("k_rope", k_rope, q, rope_dim)}  # fmt: skip
    return finish_step(step, q, sequences, rows, arrays, out_dim, out, update_lengths, (world, call, given))


def _prepared_step(own: World, q, cache, w_uk, w_uv, block_table, rope_dim, head_dim, head_dim_v, mask, softmax_scale, softcap,
                   sinks, max_keys, threads, timeout, kernel):  # fmt: skip
    """Returns (MlaDecode, sequences, rows per sequence, dim of out)."""
    _job.read_mask(mask)
    if not isinstance(rope_dim, int):
        refuse(f"rope_dim is {rope_dim!r}", "it says how many numbers of a row are the rotary key", "Pass a number: 64.")
    _refuse_float8("cache", cache)
    numbers = "bytes of a row" if _is_fp8(cache) else "latent_dim + rope_dim"
    check_axes("cache", cache, (3, 4), f"[pages, page_size, {numbers}]")
    _check_matrices(w_uk, w_uv)
    sequences, rows = steps_of(q, 4)
    heads, latent_dim, fp8 = q.shape[-2], latent_dim_of(cache, rope_dim), _is_fp8(cache)
    if fp8:
        _check_rows("cache", cache, rope_dim)
    head_dim, head_dim_v, out_dim = _dims(q, latent_dim, rope_dim, w_uk, w_uv, head_dim, head_dim_v)
    limits = limits_of(own, sequences, rows, cache, block_table, max_keys)
    name = None if kernel is None else as_text(kernel, "kernel")
    key = ("mla_decode", q.dtype, fp8, heads, head_dim, rope_dim, head_dim_v, latent_dim, mask, softmax_scale, softcap,
           sinks is not None, limits, threads, timeout, name)  # fmt: skip

    def make():
        spec = _spec(
            q, heads, head_dim, rope_dim, head_dim_v, latent_dim, mask, softmax_scale, softcap, sinks is not None, fp8
        )
        options = _job.run_options(threads=threads, timeout_seconds=timeout, kernel=name)
        return MlaDecode(own, spec, c_limits(limits), options)

    return own.prepared(key, make), sequences, rows, out_dim


def mla_decode_partition(q, cache, w_uk=None, w_uv=None, *, block_table=None, rope_dim: int = 64, head_dim: int | None = None,
                     head_dim_v: int | None = None, mask: _job.Mask = "causal", softmax_scale: float | None = None,
                     softcap: float = 0.0, sinks=None, max_keys: int | None = None, world: World | None = None, threads: int = 0,
                     timeout: float = 60.0, kernel: str | None = None, **unknown) -> DecodePartition:  # fmt: skip
    """This rank's part of a step that mla_decode() runs with these arguments. Collective with several ranks.

    Args:
        q, cache, w_uk, w_uv, block_table: as in mla_decode(). Only shapes and types are read, so the cache may be filled
            afterwards.
        rope_dim, head_dim, head_dim_v, mask, softmax_scale, softcap, sinks, max_keys, world, threads, timeout, kernel: as in the
            decode steps.

    Returns:
        A DecodePartition.

    Raises:
        CallError, UsageError, UnsupportedError, PeerError: as mla_decode().

    Example:
        >>> cache, q, w = np.ones((1, 64, 40), "float32"), np.ones((1, 2, 24), "float32"), np.ones((2, 16, 32), "float32")
        >>> ringattn.mla_decode_partition(q, cache, w, w, rope_dim=8).owned
        range(0, 1)
    """
    if unknown:
        refuse_unknown("mla_decode_partition", unknown)
    _job.check_arrays("mla_decode_partition", {"q": q, "cache": cache}, w_uk=w_uk, w_uv=w_uv, block_table=block_table,
                      sinks=sinks)  # fmt: skip
    check_axes("block_table", block_table, (2,), "[sequences, table_pages]")
    own = _job.world_of(q, world)
    step, sequences, _, _ = _prepared_step(own, q, cache, w_uk, w_uv, block_table, rope_dim, head_dim, head_dim_v, mask,
                                           softmax_scale, softcap, sinks, max_keys, threads, timeout, kernel)  # fmt: skip
    return step.partition(sequences)
