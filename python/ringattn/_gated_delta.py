# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of Gated DeltaNet (GDN) and Kimi Delta Attention (KDA), with the same bits on any number of ranks, and
its update by one token per sequence for decode.

    out = ringattn.gated_delta(q, k, v, log_decay, beta, qk_l2norm=True)
    out, states = ringattn.gated_delta(q, k, v, log_decay, beta, cu_seqlens=cu, return_final_states=True)
    out = ringattn.gated_delta_update(states, q[-1:], k[-1:], v[-1:], log_decay[-1:], beta[-1:])"""

import numpy as np

from . import _job, _ssm, _structs
from ._arguments import as_fp32, check_leading, is_true, refuse_unknown
from ._errors import called_by, refuse
from ._tensors import as_rows, contiguous_heads, data_type, empty, flat_view, traced, type_name
from .layouts import Layout, segments
from .worlds import World

_STATE = {"final_states": "state"}


class GatedDelta(_job.Prepared):
    """A prepared job. gated_delta() keeps such objects. Creating one is collective."""

    op = "gated_delta"


def _fp32(array):
    """The array in float32, which holds 16-bit values exactly; a float32 array is returned as it is."""
    if type_name(array.dtype) == "float32":
        return array
    return array.astype(np.float32) if isinstance(array, np.ndarray) else array.float()


def _check_rows(op: str, q, k, v, log_decay, beta, axes: tuple[int, ...]) -> None:
    named = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    if q.ndim not in axes or k.ndim != q.ndim or v.ndim != q.ndim or beta.ndim != q.ndim - 1 or (
        log_decay.ndim not in (q.ndim - 1, q.ndim)
    ):
        refuse(", ".join(f"{name} has {array.ndim} axes" for name, array in named.items()),
               "q and k are [(batch,) tokens, key_heads, key_dim], v is [(batch,) tokens, value_heads, value_dim], log_decay "
               "[(batch,) tokens, value_heads] or one axis more, beta [(batch,) tokens, value_heads]",
               "Reshape them.")  # fmt: skip
    advice = "Give q, k, v, log_decay and beta the same rows."
    check_leading("q", q.shape[:-2], {"k": k, "v": v}, 2, advice)
    check_leading("v", v.shape[:-1], {"beta": beta}, 0, advice)
    check_leading("v", v.shape[:-1], {"log_decay": log_decay}, log_decay.ndim - q.ndim + 1, advice)
    for name, array in (("log_decay", log_decay), ("beta", beta)):
        if type_name(array.dtype) not in ("float32", "float16", "bfloat16"):
            refuse(f"{name} is {type_name(array.dtype)}", "it is float32, or float16 or bfloat16, which are exact in float32",
                   "Convert it to float32.")  # fmt: skip
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            refuse(f"{name} is {type_name(array.dtype)}", f"q is {type_name(q.dtype)}", f"Give q, k and v of {op} one dtype.")


def _prepared(world, q, v, log_decay, lengths, layout, flags, qk_l2norm, scale, members):
    key_decays = log_decay.ndim == q.ndim
    key = ("gated_delta", q.dtype, *q.shape[-2:], *v.shape[-2:], key_decays, lengths, layout, *flags.values(), qk_l2norm, scale,
           *members.items())  # fmt: skip

    def make():
        batch = _structs.ssm_batch(sequences=len(lengths), lengths=_job.longs(lengths), initial_states=flags["initial"],
                                   final_states=flags["final"], update=flags["update"])  # fmt: skip
        spec = _structs.gated_delta_spec(
            dtype=data_type(q), key_heads=q.shape[-2], value_heads=v.shape[-2], key_dim=q.shape[-1], value_dim=v.shape[-1],
            key_decays=int(key_decays), qk_l2norm=int(qk_l2norm), scale=scale,
        )  # fmt: skip
        return GatedDelta(world, spec, batch, _ssm.run_options(world, lengths, layout, members, segments))

    return world.prepared(key, make)


def _scale_of(scale) -> float:
    """0.0 is the library's default."""
    if scale is None:
        return 0.0
    number = as_fp32(scale, "scale")
    if number == 0:
        refuse("scale is 0", "out would be zeros, and 0 means the default in the library", "Leave it out, or pass another.")
    return number


def _arrays(q, k, v, log_decay, beta, out) -> dict:
    decays = as_rows(_fp32(log_decay)) if log_decay.ndim == q.ndim else as_rows(_fp32(log_decay), 1)[..., None]
    rows = {"q": as_rows(contiguous_heads(q)), "k": as_rows(contiguous_heads(k)), "v": as_rows(contiguous_heads(v))}
    return rows | {"log_decay": contiguous_heads(decays), "beta": as_rows(_fp32(beta), 1)[..., None], "out": out}


def _out_of(out, like):
    if out is None:
        return empty(like, (*as_rows(like).shape,))
    if out.shape != like.shape:
        refuse(f"out is {list(out.shape)}", f"v is {list(like.shape)}", "Pass one of that shape, or none.")
    return flat_view(out) if out.ndim == 4 else out


@traced
def gated_delta(q, k, v, log_decay, beta, *, qk_l2norm: bool = False, scale: float | None = None, initial_states=None,
                return_final_states: bool = False, cu_seqlens=None, layout: Layout | None = None, world: World | None = None,
                out=None, threads: int = 0, memory_budget: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """The gated delta rule, like chunk_gated_delta_rule and chunk_kda of flash-linear-attention (docs/gated-delta.md lists the
    differences). Collective with several ranks.

    Args:
        q, k: [(batch,) tokens, key_heads, key_dim] of one dtype, float32, float16 or bfloat16. key_heads divides value_heads.
        v: [(batch,) tokens, value_heads, value_dim] of q's dtype.
        log_decay: [(batch,) tokens, value_heads] (GDN) or [(batch,) tokens, value_heads, key_dim] (KDA), natural logarithms
            (flash-linear-attention's g). float32, float16 or bfloat16, converted to float32.
        beta: [(batch,) tokens, value_heads], float32, float16 or bfloat16, converted to float32.
        qk_l2norm: divides rows of q and k by sqrt(sum of squares + 1e-6).
        scale: factor of out. None: 1 / sqrt(key_dim).
        initial_states: float32 [sequences, value_heads, key_dim, value_dim]. None: zeros.
        return_final_states: also returns the states after each sequence.
        cu_seqlens: [sequences + 1] cumulative lengths of packed sequences. An empty sequence passes its state through.
        layout: with several ranks, whole segments of 2,048 tokens: ringattn.segments(lengths, ranks), the default, or a Layout.
            It determines the states that a rank passes and gets, as in ssd().
        world, out, threads, memory_budget, timeout: as in attention(). out has v's shape.

    Returns:
        out, of v's shape and dtype; with return_final_states (out, states float32 [sequences, value_heads, key_dim, value_dim]).
        There are no gradients.

    Raises:
        CallError, UsageError, UnsupportedError, OutOfMemory, PeerError: as attention().

    Formula:
        Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692); docs/gated-delta.md::

            S = diag(exp(log_decay)) @ S        S = S + beta * outer(k, v - S.T @ k)        out = scale * S.T @ q

    Example:
        >>> q, v = np.ones((10, 1, 16), "float32"), np.ones((10, 2, 16), "float32")
        >>> decay, beta = np.zeros((10, 2), "float32"), np.ones((10, 2), "float32")
        >>> out, states = ringattn.gated_delta(q, q, v, decay, beta, qk_l2norm=True, return_final_states=True)
        >>> out.shape, states.shape
        ((10, 2, 16), (1, 2, 16, 16))
    """
    if unknown:
        refuse_unknown("gated_delta", unknown)
    is_true("qk_l2norm", qk_l2norm), is_true("return_final_states", return_final_states)
    _job.check_arrays("gated_delta", {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta},
                      initial_states=initial_states, out=out)  # fmt: skip
    _check_rows("gated_delta", q, k, v, log_decay, beta, (3, 4))
    world = _job.world_of(q, world)
    lengths = _ssm.lengths_of_runs(q, q.ndim == 4, cu_seqlens, layout, world)
    flags = {"initial": int(initial_states is not None), "final": int(return_final_states), "update": 0}
    members = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    rule = _prepared(world, q, v, log_decay, lengths, layout, flags, qk_l2norm, _scale_of(scale), members)
    made = _out_of(out, v)
    shape = (v.shape[-2], q.shape[-1], v.shape[-1])
    states = empty(v, (rule.facts.ending, *shape), "float32") if return_final_states else None
    # If no sequence of this rank begins here, there are no initial states to pass.
    arrays = _arrays(q, k, v, log_decay, beta, made)
    arrays |= {"initial_states": initial_states if rule.facts.beginning else None,
               "final_states": states if rule.facts.ending else None, "slots": None}  # fmt: skip
    rule._do(q, arrays)
    made = made.reshape(v.shape)
    return (made, states) if return_final_states else made


@traced
def gated_delta_update(state, q, k, v, log_decay, beta, *, qk_l2norm: bool = False, scale: float | None = None,
                       state_batch_indices=None, out=None, threads: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Updates the state of each sequence by one token. One rank.

    Args:
        state: float32 [sequences, value_heads, key_dim, value_dim], contiguous, updated in place, e.g. the final states of
            gated_delta().
        q, k: [sequences, key_heads, key_dim].
        v: [sequences, value_heads, value_dim].
        log_decay: [sequences, value_heads] or [sequences, value_heads, key_dim].
        beta: [sequences, value_heads].
        state_batch_indices: as in ssd_update().
        qk_l2norm, scale, out, threads, timeout: as in gated_delta().

    Returns:
        out, of v's shape and dtype. A row does not depend on the other rows. It agrees with gated_delta() within a tolerance.

    Raises:
        CallError, UsageError, UnsupportedError: as gated_delta().

    Formula:
        That of gated_delta() for one token.

    Example:
        >>> state, q, v = np.zeros((2, 2, 16, 16), "float32"), np.ones((2, 1, 16), "float32"), np.ones((2, 2, 16), "float32")
        >>> beta = np.ones((2, 2), "float32")
        >>> ringattn.gated_delta_update(state, q, q, v, 0 * beta, beta).shape
        (2, 2, 16)
    """
    is_true("qk_l2norm", qk_l2norm)
    members = {"threads": threads, "timeout_seconds": timeout}
    return called_by(_STATE, _update, state, q, k, v, log_decay, beta, qk_l2norm, scale, state_batch_indices, out, members,
                     unknown)  # fmt: skip


def _update(state, q, k, v, log_decay, beta, qk_l2norm, scale, slots, out, members, unknown):
    if unknown:
        refuse_unknown("gated_delta_update", unknown)
    factor = _scale_of(scale)
    given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "final_states": state, "slots": slots}
    call, results = _job.known_call(None, ("gated_delta_update", qk_l2norm, factor, *members.values()), given, out)
    if results is not None:
        return results[0]
    _job.check_arrays("gated_delta_update", {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state},
                      state_batch_indices=slots, out=out)  # fmt: skip
    _check_rows("gated_delta_update", q, k, v, log_decay, beta, (3,))
    sequences = q.shape[0]
    _ssm.check_state("state", state, slots, sequences, (v.shape[-2], q.shape[-1], v.shape[-1]), "float32")
    flags = {"initial": 1, "final": 1, "update": 1}
    rule = _prepared(_job.world_of(q, None), q, v, log_decay, (1,) * sequences, None, flags, qk_l2norm, factor, members)
    made = _out_of(out, v)
    arrays = _arrays(q, k, v, log_decay, beta, made) | {"initial_states": None, "final_states": state, "slots": slots}
    rule._do(q, arrays)
    _job.keep_call(None, call, rule, arrays, given, made, None)
    return made
