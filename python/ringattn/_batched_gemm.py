# SPDX-License-Identifier: Apache-2.0
"""The batched GEMM of MLA's projections: the rows of each head times that head's matrix.

    q_latent = ringattn.batched_gemm(q_nope, w_uk.swapaxes(1, 2))     # [tokens, heads, head_dim] to latent_dim
    out = ringattn.batched_gemm(out_latent, w_uv)                     # and back, to head_dim_v"""

from . import _job, _structs
from ._arguments import check_axes, refuse_unknown
from ._errors import refuse
from ._tensors import as_rows, contiguous_heads, data_type, empty, flat_view, traced, type_name


class BatchedGemm(_job.Prepared):
    """A prepared GEMM. batched_gemm() keeps such objects. Creating one is not collective."""

    op = "batched_gemm"


@traced
def batched_gemm(rows, weights, *, out=None, threads: int = 0, **unknown):
    """Multiplies the rows of each head by that head's matrix, as MLA's projections do. Not collective: each rank passes its own
    rows.

    Args:
        rows: [(batch,) tokens, heads, dim_k], float32, float16 or bfloat16. [(batch,) tokens, 1, dim_k] or [tokens, dim_k] if
            all heads share a row. dim_k is a multiple of 8.
        weights: [heads, dim_n, dim_k] of the same dtype. One of the last two strides is 1, and dim_n is a multiple of 8. w_uk
            and w_uv are views of kv_b_proj's weight. Both expand latents, and w_uv also maps outputs out of the latent space.
            w_uk with its last two axes swapped maps queries into the latent space.
        out: array for the result. None: a new one.
        threads: CPU threads. 0: all processors.

    Returns:
        [(batch,) tokens, heads, dim_n] of the same dtype. A row's bits do not depend on other rows, and equal those that mla()
        and mla_decode() compute from the same matrices in the absorbed form.

    Raises:
        CallError: a keyword is unknown.
        UsageError: shapes or dtypes contradict each other.
        UnsupportedError: a dim is not a multiple of 8, or an array requires a gradient.

    Formula:
        Accumulated in float32 and rounded once (docs/mla.md)::

            out[row, head, n] = sum over k of rows[row, head, k] * weights[head, n, k]

    Example:
        >>> q_nope, w_uk = np.ones((10, 2, 16), "float32"), np.ones((2, 16, 32), "float32")
        >>> ringattn.batched_gemm(q_nope, w_uk.swapaxes(1, 2)).shape
        (10, 2, 32)
    """
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
