# SPDX-License-Identifier: Apache-2.0
"""Linear attention with decays: lightning attention, RetNet and GLA, with the same bits on any number of ranks.

    out = ringattn.linear_attention(q, k, v, log_decay)                              # log_decay [heads]
    out, states = ringattn.linear_attention(q, k, v, log_decay, cu_seqlens=cu, return_final_states=True)
    out = ringattn.linear_attention_update(states, q[-1:], k[-1:], v[-1:], log_decay)"""

import ctypes
import math

from . import _gradients, _job, _rope, _structs
from ._arguments import as_fp32, check_axes, is_true, refuse_unknown
from ._errors import called_by, refuse, unsupported
from ._ssm import check_state, lengths_of_runs, run_options
from ._tensors import as_rows, contiguous_heads, data_type, empty, flat_view, traced, type_name
from .layouts import Layout
from .worlds import World

_HEAD, _TOKEN, _DIM = range(3)  # ringattn_decay
_ROPE = ("rope_parameters", "theta", "rotary_dim", "interleaved", "inv_freq", "attention_factor", "exact", "length")


class LinearAttention(_job.Prepared):
    """A prepared job. linear_attention() keeps such objects. Creating one is collective."""

    op = "linear_attention"


def rope_settings(rope, dim: int) -> tuple | None:
    """The members of a RoPE spec from a dict of rope()'s arguments. None: q and k are not rotated."""
    if rope is None:
        return None
    if not hasattr(rope, "items"):
        refuse(f"rope is {type(rope).__name__}", "it is a dict of arguments of ringattn.rope()", 'Pass one, as {"theta": 1e4}.')
    unknown = [name for name in rope if name not in _ROPE]
    if unknown:
        refuse(f"rope has {unknown[0]!r}", f"it takes {', '.join(_ROPE)}", "Check its names.")
    given = {"interleaved": False, "exact": False} | dict(rope)
    return _rope.settings_of(*(given.get(name) for name in _ROPE[:3]), dim, *(given.get(name) for name in _ROPE[3:]))


def decay_kind(q, log_decay) -> int:
    """Checks log_decay, and returns from its axes whether there is a decay per head, token or dim."""
    if type_name(log_decay.dtype) != "float32":
        refuse(f"log_decay is {type_name(log_decay.dtype)}", "it is float32, whatever q is", "Convert it; bfloat16 is exact.")
    rows = tuple(q.shape[:-2])
    heads, dim = q.shape[-2:]
    shapes = {_HEAD: (heads,), _TOKEN: (*rows, heads), _DIM: (*rows, heads, dim)}
    for kind, shape in shapes.items():
        if tuple(log_decay.shape) == shape:
            return kind
    refuse(f"log_decay is {list(log_decay.shape)}", f"q is {list(q.shape)}",
           f"Pass {', '.join(str(list(shape)) for shape in shapes.values())}.")  # fmt: skip


def _check(q, k, v, log_decay, axes: tuple[int, ...], form: str) -> None:
    if q.ndim not in axes or k.shape != q.shape or v.ndim != q.ndim or v.shape[:-1] != q.shape[:-1]:
        refuse(f"q, k and v are {list(q.shape)}, {list(k.shape)} and {list(v.shape)}",
               f"q and k are {form}, and v may have another dim", "Give them the same tokens and heads.")  # fmt: skip
    _job.check_dtypes(q=q, k=k, v=v)


def _prepared(world: World, q, v, kind: int, lengths, batch: dict, scale, rope, layout, members) -> LinearAttention:
    heads, dim = q.shape[-2:]
    key = ("linear_attention", q.dtype, heads, dim, v.shape[-1], kind, lengths, *batch.values(), scale, rope, layout,
           *members.items())  # fmt: skip

    def make():
        spec = _structs.linear_attention_spec(dtype=data_type(q), heads=heads, dim=dim, dim_v=v.shape[-1], decay=kind)
        if scale is not None:
            spec.has_scale, spec.scale = 1, scale
        if rope is not None:
            spec.rope = ctypes.pointer(_rope.spec_of(q, dim, rope))
        given = _structs.ssm_batch(sequences=len(lengths), lengths=_job.longs(lengths), **batch)
        return LinearAttention(world, spec, given, run_options(world, lengths, layout, members))

    return world.prepared(key, make)


def _rows(array):
    return as_rows(contiguous_heads(array))


def _decays(log_decay, kind: int):
    if kind == _HEAD:
        return log_decay
    return as_rows(log_decay, 1)[..., None] if kind == _TOKEN else _rows(log_decay)


def _positions(positions, rope, rows: tuple[int, ...]):
    if positions is None:
        return None
    if rope is None:
        refuse("positions are given without rope", "nothing else depends on them", "Pass rope={}, or leave them out.")
    return _rope.given_positions(positions, rows, 1)


def _scale(scale) -> float | None:
    if scale is None:
        return None
    number = as_fp32(scale, "scale")
    if not math.isfinite(number):
        refuse(f"scale is {scale}", "it is finite", "Leave it out for 1 / sqrt(dim).")
    return number


def no_gradients(op: str, arrays: dict) -> None:
    wanting = _gradients.requiring(arrays)
    if wanting is not None:
        unsupported(f"{wanting} of {op} requires a gradient", _gradients.WITHOUT, _gradients.SUGGESTION)


def attend(q, k, v, log_decay, scale, initial_state, return_final_states, settings, positions, cu_seqlens, layout, world, out,
           threads, memory_budget, timeout):  # fmt: skip
    """linear_attention() of arrays, with settings of RoPE as rope_settings() makes them."""
    _check(q, k, v, log_decay, (3, 4), "[(batch,) tokens, heads, dim]")
    kind = decay_kind(q, log_decay)
    world = _job.world_of(q, world)
    lengths = lengths_of_runs(q, q.ndim == 4, cu_seqlens, layout, world)
    batch = {"initial_states": int(initial_state is not None), "final_states": int(return_final_states)}
    members = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    job = _prepared(world, q, v, kind, lengths, batch, _scale(scale), settings, layout, members)
    if out is not None and tuple(out.shape) != tuple(v.shape):
        refuse(f"out is {list(out.shape)}", f"v is {list(v.shape)}", "Pass one of that shape, or none.")
    flat = math.prod(v.shape[:-2]), *v.shape[-2:]
    made = empty(v, flat) if out is None else flat_view(out) if out.ndim == 4 else out
    states = empty(v, (job.facts.ending, *v.shape[-2:], q.shape[-1]), "float32") if return_final_states else None
    # If no sequence of this rank begins here, there are no initial states to pass.
    job._do(q, {"q": _rows(q), "k": _rows(k), "v": _rows(v), "log_decay": _decays(log_decay, kind),
                "initial_state": initial_state if job.facts.beginning else None,
                "positions": _positions(positions, settings, tuple(q.shape[:-2])), "slots": None, "out": made,
                "final_states": states if job.facts.ending else None})  # fmt: skip
    made = made.reshape(v.shape)
    return (made, states) if return_final_states else made


def step(state, q, k, v, log_decay, scale, settings, positions, state_batch_indices, out, threads, timeout):
    """linear_attention_update() likewise."""
    _check(q, k, v, log_decay, (3,), "[sequences, heads, dim]")
    kind = decay_kind(q, log_decay)
    sequences, heads, dim = q.shape
    check_state("state", state, state_batch_indices, sequences, (heads, v.shape[-1], dim), "float32")
    batch = {"initial_states": 1, "final_states": 1, "update": 1}
    members = {"threads": threads, "timeout_seconds": timeout}
    job = _prepared(_job.world_of(q, None), q, v, kind, (1,) * sequences, batch, _scale(scale), settings, None, members)
    if out is not None and tuple(out.shape) != tuple(v.shape):
        refuse(f"out is {list(out.shape)}", f"v is {list(v.shape)}", "Pass one of that shape, or none.")
    made = empty(v, v.shape) if out is None else out
    job._do(q, {"q": _rows(q), "k": _rows(k), "v": _rows(v), "log_decay": _decays(log_decay, kind), "initial_state": None,
                "positions": _positions(positions, settings, (sequences,)), "slots": state_batch_indices, "out": made,
                "final_states": state})  # fmt: skip
    return made


@traced
def linear_attention(q, k, v, log_decay, *, scale: float | None = None, initial_state=None, return_final_states: bool = False,
                     rope: dict | None = None, positions=None, cu_seqlens=None, layout: Layout | None = None,
                     world: World | None = None, out=None, threads: int = 0, memory_budget: int = 0, timeout: float = 60.0,
                     **unknown):  # fmt: skip
    """Linear attention with decays: lightning attention, RetNet and GLA. Collective with several ranks.

    Args:
        q, k: [(batch,) tokens, heads, dim] of one dtype, float32, float16 or bfloat16.
        v: [(batch,) tokens, heads, dim_v] of q's dtype.
        log_decay: float32 [heads] (lightning attention, RetNet), [(batch,) tokens, heads], or [(batch,) tokens, heads, dim]
            (GLA). In models it is at most 0; -inf clears the state.
        scale: factor of out. None: 1 / sqrt(dim).
        initial_state: float32 [sequences, heads, dim_v, dim]. None: zeros.
        return_final_states: also returns the states after each sequence.
        rope: a dict of arguments of ringattn.rope() (theta, rotary_dim, interleaved, rope_parameters, ...), by which q and k are
            rotated first, with one rounding. None: no rotation.
        positions: int32 or int64 [(batch,) tokens], for rope. None: tokens count from 0 in their sequences.
        cu_seqlens, layout, world, out, threads, memory_budget, timeout: as in ssd(); out has v's shape. A rank also passes and
            gets states as in ssd().

    Returns:
        out, [(batch,) tokens, heads, dim_v] of v's dtype; with return_final_states (out, states float32 [sequences, heads,
        dim_v, dim]). The bits are the same on any number of ranks, also if a sequence is cut at a multiple of 65,536 tokens and
        continued. There are no gradients.

    Raises:
        CallError, UsageError, UnsupportedError, OutOfMemory, PeerError: as attention().

    Formula:
        Lightning attention (arXiv:2401.04658), RetNet (arXiv:2307.08621), GLA (arXiv:2312.06635); docs/linear-attention.md. For
        each head, with a state S [dim_v, dim]::

            S = exp(log_decay) * S + outer(v, k)        out = scale * S @ q

    Example:
        >>> q = np.ones((10, 2, 16), "float32")
        >>> out, states = ringattn.linear_attention(q, q, q, np.zeros(2, "float32"), return_final_states=True)
        >>> out.shape, states.shape
        ((10, 2, 16), (1, 2, 16, 16))
    """
    if unknown:
        refuse_unknown("linear_attention", unknown)
    is_true("return_final_states", return_final_states)
    _job.check_arrays("linear_attention", {"q": q, "k": k, "v": v, "log_decay": log_decay}, initial_state=initial_state,
                      positions=positions, out=out)  # fmt: skip
    no_gradients("linear_attention", {"q": q, "k": k, "v": v, "log_decay": log_decay, "initial_state": initial_state})
    check_axes("q", q, (3, 4), "[(batch,) tokens, heads, dim]")
    return attend(q, k, v, log_decay, scale, initial_state, return_final_states, rope_settings(rope, q.shape[-1]), positions,
                  cu_seqlens, layout, world, out, threads, memory_budget, timeout)  # fmt: skip


@traced
def linear_attention_update(state, q, k, v, log_decay, *, scale: float | None = None, rope: dict | None = None, positions=None,
                            state_batch_indices=None, out=None, threads: int = 0, timeout: float = 60.0,
                            **unknown):  # fmt: skip
    """Updates the state of each sequence by one token, as in decode. One rank.

    Args:
        state: float32 [sequences, heads, dim_v, dim], contiguous, updated in place, e.g. the final states of linear_attention().
        q, k: [sequences, heads, dim].
        v: [sequences, heads, dim_v].
        log_decay: float32 [heads], [sequences, heads] or [sequences, heads, dim].
        positions: int32 or int64 [sequences], required with rope.
        state_batch_indices: as in ssd_update().
        scale, rope, out, threads, timeout: as in linear_attention().

    Returns:
        out, of v's shape and dtype. A row does not depend on the other rows. It agrees with linear_attention() within a
        tolerance.

    Raises:
        CallError, UsageError, UnsupportedError: as linear_attention().

    Formula:
        That of linear_attention() for one token.

    Example:
        >>> state, q = np.zeros((2, 2, 16, 16), "float32"), np.ones((2, 2, 16), "float32")
        >>> ringattn.linear_attention_update(state, q, q, q, np.zeros(2, "float32")).shape
        (2, 2, 16)
    """
    if unknown:
        refuse_unknown("linear_attention_update", unknown)
    _job.check_arrays("linear_attention_update", {"q": q, "k": k, "v": v, "log_decay": log_decay, "state": state},
                      positions=positions, state_batch_indices=state_batch_indices, out=out)  # fmt: skip
    no_gradients("linear_attention_update", {"state": state, "q": q, "k": k, "v": v, "log_decay": log_decay})
    check_axes("q", q, (3,), "[sequences, heads, dim]")
    settings = rope_settings(rope, q.shape[-1])
    return called_by({"final_states": "state"}, step, state, q, k, v, log_decay, scale, settings, positions, state_batch_indices,
                     out, threads, timeout)  # fmt: skip
