# SPDX-License-Identifier: Apache-2.0
"""Accuracy checks of attention: compares a result of ringattn or of any other system with fp64 on sampled rows,
compares bits
over numbers of ranks, and names the first wrong row.

    ringattn.testing.check_attention(q, k, v, out, lse, mask="causal")        # another system's out and lse
    ringattn.testing.check_bits(q, k, v, ranks=(1, 2, 3, 4))                   # ringattn, over numbers of ranks
    ringattn.testing.assert_same_bits(out, other_out)                          # of two runs of anything
"""

import dataclasses
import itertools

import numpy as np

from . import _job
from ._arguments import as_int, as_number, check_axes, lengths_of
from ._errors import WrongResult, refuse
from ._tensors import check_array, is_torch, type_name
from ._attention import varlen
from .layouts import BY_NAME, check_name, shard, unshard
from .worlds import run_ranks

__all__ = ["Accuracy", "assert_same_bits", "check_attention", "check_bits", "first_difference", "raw_bytes", "sample_rows"]

# Tolerances. out: twice the error of a same-precision reference, which rounds scores and weights to the input dtype and
# sums in
# fp32, plus this value; for a row with elements beyond 1, this share of the largest. lse: the error of rounding scores
# to fp32.
OUT_SLACK = 1e-6
OUT_FACTOR = 2.0
LSE_RELATIVE_F32 = 1e-5
LSE_ABSOLUTE_16BIT = 1e-3
LSE_RELATIVE_16BIT = 2.0**-21

# Number of "few" rows, times the keys of the longest sequence; shorter sequences take as long per row. Same rule as
# `ringattn verify --peer` (few_rows() in src/ops/attention_jobs/accuracy.cpp).
_FEW_KEYS = 2**21
_KEYS_OF_SHORT_ROWS = 256


def _host(array) -> np.ndarray:
    """A NumPy array of the same values; float32 for dtypes that NumPy lacks."""
    if is_torch(array):
        array = _readable(array)
        array = array.detach().cpu()
        return array.float().numpy() if str(array.dtype) == "torch.bfloat16" else array.numpy()
    return np.asarray(array)


def _readable(array):
    """The tensor without pending negation or conjugation. Refuses one whose elements can't be read."""
    if array.is_meta or str(array.layout) != "torch.strided":
        refuse(f"an array is of layout {array.layout} on {array.device}", "its elements can't be read", "Pass a dense tensor.")
    return array.resolve_neg().resolve_conj()


def _type_name(array) -> str:
    return str(array.dtype).removeprefix("torch.")


def _round(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to the values of a dtype; returns float64."""
    if dtype == "bfloat16":
        single = values.astype(np.float32)
        bits = single.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        return np.where(np.isnan(single), single, rounded).astype(np.float64)
    return values.astype(dtype).astype(np.float64)


def _weights(scores: np.ndarray, most: float) -> np.ndarray:
    """Softmax weights of scores. As in exact arithmetic, the weight of a finite score is never 0, so ∞ in v gives ∞ and not
    0 · ∞."""
    weights = np.exp(scores - most)
    return np.where(np.isfinite(scores), np.maximum(weights, np.finfo(np.float64).tiny), weights)


def _row(q, k, v, seen, scale, softcap, sink, dtype):
    """out and lse of one row of one head in fp64, and the maximum error of the same-precision reference over elements
    that are finite in both. If a score is NaN or +∞ the row is NaN, as exp(∞ − ∞). A row whose scores are all −∞ is
    like a row that sees no key, as in `ringattn verify` (src/kernels/attention/oracle.hpp)."""
    scores = (k[seen].astype(np.float64) @ q.astype(np.float64)) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    values = v[seen].astype(np.float64)
    highest = np.maximum(scores.max(initial=-np.inf), sink)
    most = 0.0 if highest == -np.inf else highest
    weights = _weights(scores, most)
    total = weights.sum() + np.exp(sink - most)
    exact = weights @ values
    if total == 0.0:
        return exact, -np.inf, 0.0
    exact = exact / total
    plain_scores = (k[seen].astype(np.float32) @ q.astype(np.float32)) * np.float32(scale)
    if softcap:
        plain_scores = np.float32(softcap) * np.tanh(plain_scores / np.float32(softcap))
    plain_weights = _round(np.exp(_round(plain_scores, dtype) - most), dtype).astype(np.float32)
    plain_total = plain_weights.sum() + np.float32(np.exp(sink - most))
    plain = _round(plain_weights @ v[seen].astype(np.float32) / plain_total, dtype)
    errors = np.abs(plain - exact)
    return exact, highest + np.log(total), errors[np.isfinite(errors)].max(initial=0.0)


def _error_of_scores(q, k, v, seen, scale, softcap, lse, exact) -> float:
    """The error of a row if each score is off by half an fp32 unit in the last place of the sum of its terms' magnitudes.
    Rounding of large scores causes errors of this size. The reference adds in another order, and may happen to err less."""
    keys, values = k[seen].astype(np.float64), v[seen].astype(np.float64)
    scores = (keys @ q.astype(np.float64)) * scale
    terms = (np.abs(keys) @ np.abs(q).astype(np.float64)) * abs(scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
        terms *= 1.0 - (scores / softcap) ** 2  # the derivative of the cap
    errors = (np.exp(scores - lse) * (terms + np.abs(scores)) * 2.0**-24) @ np.abs(values - exact)
    return errors[np.isfinite(errors)].max(initial=0.0)


def _seen(position: int, keys: int, mask) -> slice:
    kind, left, right = _job.read_mask(mask)
    if kind == 1:
        return slice(0, keys)
    first = 0 if kind == 0 or left < 0 else max(0, position - left)
    end = position + 1 if kind == 0 else (keys if right < 0 else position + right + 1)
    return slice(min(first, keys), max(min(end, keys), min(first, keys)))


@dataclasses.dataclass
class Accuracy:
    """Result of check_attention(): the maximum errors.

    Attributes:
        rows: number of compared rows.
        out_error, lse_error: absolute errors.
        out_part, lse_part: errors as shares of the tolerances."""

    rows: int
    out_error: float
    out_part: float
    lse_error: float
    lse_part: float


def sample_rows(tokens: int, heads: int, rows: int | None, seed: int = 1) -> list[tuple[int, int]]:
    """Distinct (token, head) pairs, ascending, always with the first and, from two on, the last one.

    Args:
        tokens, heads: numbers of tokens and heads of the result.
        rows: number of pairs. None: all.
        seed: seed of the sample.

    Returns:
        A list of (token, head).

    Raises:
        UsageError: rows is below 1.

    Example:
        >>> ringattn.testing.sample_rows(100, 4, 2)
        [(0, 0), (99, 3)]
    """
    count = tokens * heads
    if rows is not None and rows < 1:
        refuse(f"rows is {rows}", "at least one is compared", 'Pass a number of rows, "few", or None for all.')
    if rows is None or rows >= count:
        chosen = range(count)
    elif rows == 1:
        chosen = [0]
    else:
        drawn = np.random.default_rng(seed).choice(count - 2, size=rows - 2, replace=False)
        chosen = [0, *sorted(int(number) + 1 for number in drawn), count - 1]
    return [divmod(number, heads) for number in chosen]


def check_attention(q, k, v, out, lse=None, *, mask="causal", softmax_scale=None, softcap=0.0, sinks=None,
                    cu_seqlens_q=None, cu_seqlens_k=None, q_offsets=None, rows: int | str | None = "few",
                    seed: int = 1) -> Accuracy:  # fmt: skip
    """Compares a result of any system with fp64 attention on sampled rows, each of one token and head. NaN and ±∞ must be where
    fp64 has them, and nowhere else.

    Args:
        q: [tokens, heads, head_dim], all sequences packed. NumPy arrays or PyTorch tensors.
        k, v: [keys, kv_heads, head_dim or head_dim_v].
        out: [tokens, heads, head_dim_v], the result to check.
        lse: [tokens, heads], natural logarithm. None: not checked.
        mask, softmax_scale, softcap, sinks, cu_seqlens_q, cu_seqlens_k, q_offsets: as in varlen(). Without cu_seqlens_q there is
            one sequence.
        rows: number of sampled rows. None: all. "few": as many as take about a second, at least 64; in small jobs these are all
            rows.
        seed: seed of the sample.

    Returns:
        Accuracy.

    Raises:
        WrongResult: a row is wrong. The error has token, sequence, head, actual and expected value of the first wrong row.
        UsageError: arrays and arguments do not match.

    Formula:
        A row may differ by twice the error of a reference that rounds scores and weights to the dtype and sums in fp32, plus
        1e-6 of its largest element and half a unit in the last place (docs/python.md).

    Example:
        >>> q = np.random.default_rng(1).standard_normal((20, 2, 32), dtype="float32")
        >>> out, lse = ringattn.attention(q, q, q)
        >>> ringattn.testing.check_attention(q, q, q, out, lse, mask="causal").rows
        40
    """
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse), ("sinks", sinks)):
        if array is not None or name in ("q", "k", "v", "out"):
            check_array(name, array, written=False, differentiable=True)
            if type_name(array.dtype) not in ("float32", "float16", "bfloat16", "float64"):
                refuse(f"{name} is {type_name(array.dtype)}", "rows of float32, float16 and bfloat16 are compared", "Convert it.")
    dtype = _type_name(q)
    q, k, v, out = _host(q), _host(k), _host(v), _host(out)
    lse, sinks = (None if array is None else _host(array) for array in (lse, sinks))
    _check_shapes(q, k, v, out, lse, sinks)
    q_lengths = lengths_of(cu_seqlens_q) if cu_seqlens_q is not None else (q.shape[0],)
    k_lengths = (
        lengths_of(cu_seqlens_k)
        if cu_seqlens_k is not None
        else (q_lengths if cu_seqlens_q is not None else (k.shape[0],))
    )
    offsets = [b - a for a, b in zip(q_lengths, k_lengths)] if q_offsets is None else list(map(int, q_offsets))
    _check_lengths(q, k, q_lengths, k_lengths, offsets)
    q_begin, k_begin = np.concatenate([[0], np.cumsum(q_lengths)]), np.concatenate([[0], np.cumsum(k_lengths)])
    scale = 1.0 / np.sqrt(q.shape[2]) if softmax_scale is None else as_number(softmax_scale, "softmax_scale")
    group = q.shape[1] // k.shape[1]
    seen = Accuracy(0, 0.0, 0.0, 0.0, 0.0)
    for name, value in (("softmax_scale", scale), ("softcap", as_number(softcap, "softcap"))):
        if not np.isfinite(value) or (name == "softcap" and value < 0):
            refuse(f"{name} is {value}", "it is a finite number, and a softcap is 0 or more", "Pass that of the job.")
    side = min(_job.read_mask(mask)[1:])
    if side < -1:
        refuse(f"a side of mask is {side}", "it is a number of tokens, or -1 for no limit", "Pass that of the job.")
    rows = rows if rows is None or rows == "few" else as_int(rows, "rows")
    if rows == "few":
        rows = max(64, _FEW_KEYS // max(_KEYS_OF_SHORT_ROWS, *k_lengths))
    for token, head in sample_rows(q.shape[0], q.shape[1], rows, seed):
        s = int(np.searchsorted(q_begin, token, side="right")) - 1
        place = token - int(q_begin[s])
        keys = slice(int(k_begin[s]), int(k_begin[s + 1]))
        sink = -np.inf if sinks is None else float(sinks[head])
        visible = _seen(place + offsets[s], k_lengths[s], mask)
        where = f"row {token} (token {place} of sequence {s}), head {head}"
        with np.errstate(all="ignore"):
            job = q[token, head], k[keys, head // group], v[keys, head // group], visible, scale, softcap
            ours = out[token, head].astype(np.float64)
            exact, exact_lse, plain = _row(*job, sink, dtype)
            largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
            slack = OUT_SLACK * max(1.0, largest) + largest * _last_digit(dtype)
            if dtype == "float32" and not np.abs(ours - exact).max(initial=0.0) <= OUT_FACTOR * plain + slack:
                plain = max(plain, _error_of_scores(*job, exact_lse, exact))
            _compare(seen, where, ours, exact, OUT_FACTOR * plain + slack, dtype)
            if lse is not None:
                _compare_lse(seen, where, float(lse[token, head]), exact_lse, dtype)
        seen.rows += 1
    return seen


def _check_shapes(q, k, v, out, lse, sinks) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_axes(name, array, (3,), "[tokens, heads, dim], with all sequences packed")
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        refuse(f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}",
               "k and v have the same tokens and heads, q and k the same head_dim",
               "Pass those of one job.")  # fmt: skip
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        refuse(f"q has {heads} heads, and k and v have {kv_heads}", "each of theirs serves the same number of q's",
               "Pass rows of one job, [tokens, heads, dim].")  # fmt: skip
    if out.shape != (*q.shape[:2], v.shape[2]):
        refuse(f"out is {list(out.shape)}", f"q and v make it {[*q.shape[:2], v.shape[2]]}",
               "Pass [tokens, heads, head_dim_v].")  # fmt: skip
    if lse is not None and lse.shape != q.shape[:2]:
        refuse(f"lse is {list(lse.shape)}", f"q makes it {list(q.shape[:2])}", "Transpose [heads, tokens].")
    if sinks is not None and sinks.shape != (heads,):
        refuse(f"sinks is {list(sinks.shape)}", f"q has {heads} heads", "Pass one number for each.")


def _check_lengths(q, k, q_lengths, k_lengths, offsets) -> None:
    sequences = len(q_lengths)
    if len(k_lengths) != sequences or len(offsets) != sequences:
        refuse(f"there are {sequences} sequences of queries, {len(k_lengths)} of keys and {len(offsets)} offsets",
               "each sequence has all of them", "Check cu_seqlens_q, cu_seqlens_k and q_offsets.")  # fmt: skip
    for name, rows, lengths in (("q", q, q_lengths), ("k", k, k_lengths)):
        if sum(lengths) != rows.shape[0]:
            refuse(f"{name} has {rows.shape[0]} tokens", f"the sequences have {sum(lengths)}",
                   f"Check cu_seqlens_{name}.")  # fmt: skip


def _last_digit(dtype: str) -> float:
    """Half a unit in the last place of a dtype at 1: the rounding error of the result itself."""
    return 2.0 ** -{"bfloat16": 9, "float16": 12}.get(dtype, 24)


def _compare(seen: Accuracy, where: str, ours: np.ndarray, exact: np.ndarray, allowed: float, dtype: str) -> None:
    # Beyond the range of the dtype, values round to ∞.
    expected = _round(exact, dtype)
    right = np.where(np.isnan(expected), np.isnan(ours), ours == expected)
    errors = np.where(np.isfinite(expected) & np.isfinite(ours), np.abs(ours - exact), np.where(right, 0.0, np.inf))
    worst = int(errors.argmax()) if errors.size else 0
    error = float(errors[worst]) if errors.size else 0.0
    seen.out_error, seen.out_part = max(seen.out_error, error), max(seen.out_part, error / allowed)
    if error > allowed:
        raise WrongResult(f"out is wrong in {where}, number {worst}", f"it is {ours[worst]:.9g}, in fp64 {exact[worst]:.9g}; "
                          f"{error:.3g} apart, {allowed:.3g} are allowed",
                          "Check mask, scale, layout of the rows and positions first.")  # fmt: skip


def _compare_lse(seen: Accuracy, where: str, ours: float, exact: float, dtype: str) -> None:
    expected = np.float32(exact)
    if not np.isfinite(expected) and (ours == expected or (np.isnan(ours) and np.isnan(expected))):
        return
    size = max(1.0, abs(exact)) if np.isfinite(exact) else 1.0
    allowed = LSE_RELATIVE_F32 * size if dtype == "float32" else max(LSE_ABSOLUTE_16BIT, LSE_RELATIVE_16BIT * size)
    error = abs(ours - exact) if np.isfinite(ours) and np.isfinite(expected) else np.inf
    seen.lse_error, seen.lse_part = max(seen.lse_error, error), max(seen.lse_part, error / allowed)
    if not error <= allowed:
        raise WrongResult(f"lse is wrong in {where}", f"it is {ours:.9g}, in fp64 {exact:.9g}; {allowed:.3g} are allowed",
                          "It is the natural logarithm of the sum of exp(score), with the sink.")  # fmt: skip


def first_difference(a, b) -> tuple[int, ...] | None:
    """Where two arrays differ first, bit by bit. 0.0 and -0.0 differ.

    Args:
        a, b: arrays of one shape and dtype, NumPy or PyTorch, on any device.

    Returns:
        Index of the first element whose bits differ. None if all are equal.

    Raises:
        UsageError: shape or dtype differ.

    Example:
        >>> ringattn.testing.first_difference(np.zeros((2, 3)), np.array([[0.0, 0.0, 0.0], [0.0, -0.0, 0.0]]))
        (1, 1)
    """
    a, b = (x if is_torch(x) else np.asarray(x) for x in (a, b))
    if tuple(a.shape) != tuple(b.shape) or str(a.dtype) != str(b.dtype):
        refuse(f"arrays of {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} can't have equal bits",
               "shape or type differ", "Compare results of one job.")  # fmt: skip
    raw_a, raw_b = raw_bytes(a), raw_bytes(b)
    different = np.flatnonzero((raw_a != raw_b).any(axis=1)) if raw_a.size else np.zeros(0, int)
    return None if different.size == 0 else tuple(int(i) for i in np.unravel_index(different[0], tuple(a.shape)))


def raw_bytes(array) -> np.ndarray:
    """The bytes of an array.

    Args:
        array: of any dtype, NumPy or PyTorch, on any device.

    Returns:
        uint8 [elements, bytes per element], a NumPy array.

    Raises:
        UsageError: a tensor's elements can't be read, as on the meta device.

    Example:
        >>> ringattn.testing.raw_bytes(np.array([1, 258], "uint16")).tolist()
        [[1, 0], [2, 1]]
    """
    if is_torch(array):
        import torch  # noqa: PLC0415, only where the array is one of its tensors

        flat = _readable(array).detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().reshape(flat.shape[0], -1) if flat.numel() else np.zeros((0, 1), np.uint8)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(flat.shape[0], -1) if flat.size else np.zeros((0, 1), np.uint8)


def assert_same_bits(a, b, what: str = "the arrays") -> None:
    """Checks that two arrays have the same bits.

    Args:
        a, b: arrays of one shape and dtype, NumPy or PyTorch, on any device.
        what: their name in the message.

    Returns:
        None.

    Raises:
        WrongResult: bits differ. The error names the first such element.
        UsageError: shape or dtype differ.

    Example:
        >>> ringattn.testing.assert_same_bits(np.zeros(3), np.zeros(3))
    """
    at = first_difference(a, b)
    if at is None:
        return
    x, y = (_host(array)[at] for array in (a, b))
    raise WrongResult(f"{what} differ at {list(at)}", f"row {at[0]} is the first whose bits differ: {x} and {y} there",
                      "Equal bits require the same kernel, device model and build.")  # fmt: skip


def check_bits(q, k, v, cu_seqlens=None, *, ranks=(1, 2, 3, 4), layouts=tuple(BY_NAME), **arguments) -> None:
    """Computes attention of packed rows over several numbers of ranks and layouts in this process, in host memory, and compares
    bits.

    Args:
        q, k, v: as in varlen(), with all tokens.
        cu_seqlens: [sequences + 1] cumulative lengths. None: one sequence.
        ranks: numbers of ranks.
        layouts: names of layouts.
        **arguments: other arguments of varlen().

    Returns:
        None.

    Raises:
        WrongResult: a bit of out or lse differs from those of one rank.
        UsageError: a layout has another name; or as varlen().

    Example:
        >>> q = np.random.default_rng(1).standard_normal((20, 2, 32), dtype="float32")
        >>> ringattn.testing.check_bits(q, q, q, ranks=(2,), layouts=("zigzag",))
    """
    cu_seqlens = [0, q.shape[0]] if cu_seqlens is None else cu_seqlens
    lengths = lengths_of(cu_seqlens)
    out, lse = varlen(q, k, v, cu_seqlens, **arguments)
    for name in layouts:
        check_name(name)
    for count, name in itertools.product(ranks, layouts):
        layout = BY_NAME[name](lengths, count)

        def rank(world, layout=layout):
            mine = [shard(x, layout, world.rank) for x in (q, k, v)]
            return varlen(*mine, cu_seqlens, world=world, layout=layout, **arguments)

        shards = run_ranks(count, rank)
        assert_same_bits(unshard([o for o, _ in shards], layout), out, f"out of {count} ranks ({name}) and of one")
        assert_same_bits(unshard([x for _, x in shards], layout), lse, f"lse of {count} ranks ({name}) and of one")
