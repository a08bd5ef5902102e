# SPDX-License-Identifier: Apache-2.0
"""The products around a latent as an op of their own: rows of heads times a matrix for each head.

    q_latent = ringattn.batched_gemm(q_nope, w_uk.swapaxes(1, 2))     # [tokens, heads, head_dim] to latent_dim
    out = ringattn.batched_gemm(out_latent, w_uv)                     # and back, to head_dim_v"""

from . import _job, _structs
from ._arguments import check_axes, refuse_unknown
from ._errors import refuse
from ._tensors import as_rows, contiguous_heads, data_type, empty, flat_view, traced, type_name


class BatchedGemm(_job.Prepared):
    """A prepared product. batched_gemm() keeps such objects. Making one is not collective."""

    op = "batched_gemm"


@traced
def batched_gemm(rows, weights, *, out=None, threads: int = 0, **unknown):
    """out[row, head, o] = sum over i of rows[row, head, i] * weights[head, o, i], in float32 and rounded once.

    rows: [(batch,) tokens, heads, dim_k], or 1 head, or [tokens, dim_k], which all heads share; float32, float16 or
    bfloat16. weights: [heads, dim_n, dim_k] of the same type, of whose last two strides one is 1: w_uk and w_uv, views of
    kv_b_proj's weight, expand latents and take outputs back from them, and w_uk with its last two axes exchanged absorbs
    itself into queries. dim_k and dim_n are multiples of 8. Ranks call it each for the rows that they have.
    Returns [(batch,) tokens, heads, dim_n]: a row has the same bits beside any others, and those that mla() and
    mla_decode() make of the same matrices in the absorbed form."""
    given = {"rows": rows, "weights": weights}
    call, results = (None, None) if unknown else _job.known_call(None, ("batched_gemm", threads), given, out)
    if results is not None:
        return results[0]
    if unknown:
        refuse_unknown("batched_gemm", unknown)
    _job.check_arrays("batched_gemm", given, out=out)
    check_axes("rows", rows, (2, 3, 4), "[(batch,) tokens, heads, dim_k], or [tokens, dim_k]")
    check_axes("weights", weights, (3,), "[heads, dim_n, dim_k]")
    if type_name(rows.dtype) not in ("float32", "float16", "bfloat16"):
        refuse(f"rows are {type_name(rows.dtype)}", "numbers are float32, float16 or bfloat16", "Convert them to one of these.")
    heads, dim_n, dim_k = weights.shape
    shape = (*rows.shape[: max(rows.ndim - 2, 1)], heads, dim_n)
    if out is not None and tuple(out.shape) != shape:
        refuse(f"out is {list(out.shape)}", f"rows are {list(rows.shape)} and weights {list(weights.shape)}, and so it is "
               f"{list(shape)}", "Pass one of that shape, or none.")  # fmt: skip
    world = _job.world_of(rows, None)

    def make():
        spec = _structs.batched_gemm_spec(dtype=data_type(rows), heads=heads, dim_k=dim_k, dim_n=dim_n)
        return BatchedGemm(world, spec, _structs.options(threads=threads))

    prepared = world.prepared(("batched_gemm", rows.dtype, heads, dim_k, dim_n, threads), make)
    out = empty(rows, shape) if out is None else out
    flat = contiguous_heads(rows)
    flat = flat[:, None, :] if rows.ndim == 2 else as_rows(flat) if rows.ndim == 4 else flat
    arrays = {"rows": flat, "weights": weights, "out": flat_view(out) if rows.ndim == 4 else out}
    prepared._do(rows, arrays)
    _job.keep_call(None, call, prepared, arrays, given, out, None)
    return out
