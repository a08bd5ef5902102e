# SPDX-License-Identifier: Apache-2.0
"""SSM layers: Mamba-2's SSD (ssd) and Mamba-1's selective scan (selective_scan), with the same bits on any number of
ranks, and
their updates by one token per sequence (ssd_update, selective_update) for decode.

y = ringattn.ssd(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
y, states = ringattn.ssd(x, dt, A, B, C, cu_seqlens=cu, initial_states=states, return_final_states=True)
y = ringattn.ssd_update(states, x[-1:], dt[-1:], A, B[-1:], C[-1:])"""

import math

from . import _abi, _gradients, _job, _structs
from ._arguments import check_axes, check_leading, is_true, lengths_of, refuse_unknown, shown
from ._errors import called_by, refuse
from ._tensors import as_rows, check_array, contiguous_heads, data_type, empty, flat_view, is_contiguous, traced, type_name
from .layouts import Layout, make_layout, super_segments
from .worlds import World


# Mamba-1 names of arguments and results, by the Mamba-2 names that the common code uses.
_CHANNELS = {"x": "u", "dt": "delta", "dt_bias": "delta_bias"}
_STATE = {"final_states": "state"}


class Ssm(_job.Prepared):
    """A prepared job. ssd() keeps such objects. Creating one is collective."""

    op = "ssm"
    settings = ()  # between its batch and its options


def lengths_of_runs(x, batched: bool, cu_seqlens, layout, world: World) -> tuple[int, ...]:
    """Lengths of the sequences of x, [(batch,) tokens, …], over all ranks."""
    if batched and (cu_seqlens is not None or world.size > 1):
        refuse(
            "x has a batch axis",
            "cu_seqlens, and ranks, deal packed rows",
            "Pass [tokens, …] with all sequences packed.",
        )
    if cu_seqlens is not None:
        return lengths_of(cu_seqlens)
    if batched:
        return (x.shape[1],) * x.shape[0]
    if isinstance(layout, Layout):
        return layout.lengths
    if world.size > 1:
        refuse(
            "cu_seqlens is not given", "ranks may have different numbers of tokens", "Pass it, or a layout."
        )
    return (x.shape[0],)


def check_layout(layout, deal=super_segments) -> None:
    if layout is not None and not isinstance(layout, Layout):
        refuse(f"layout is {layout!r}", f"ranks have whole {deal.__name__.replace('_', '-')} of sequences",
               f"Leave it out, or pass ringattn.{deal.__name__}(lengths, ranks) or another ringattn.Layout.")  # fmt: skip


def run_options(world: World, lengths, layout: Layout | None, members: dict, deal=super_segments) -> _structs.options:
    options = _job.run_options(**members)
    check_layout(layout, deal)
    dealt = None if layout is None else make_layout(layout, lengths, world.size)
    if world.size > 1:
        dealt = dealt or deal(lengths, world.size)
        options.layout = _abi.RUNS
        options.query_run_count, options.query_runs = dealt.c_runs()
    return options


def check_state(name: str, state, slots, sequences: int, shape: tuple, dtype: str) -> None:
    """Checks that there is one state per sequence, or, with slots, any number of states."""
    wanted = ["slots" if slots is not None else sequences, *shape]
    fits = tuple(state.shape[1:]) == shape and (slots is not None or state.shape[0] == sequences)
    if not fits or type_name(state.dtype) != dtype:
        refuse(f"{name} is {type_name(state.dtype)} {list(state.shape)}",
               f"it should be {dtype} [{', '.join(map(str, wanted))}]", "Check it against the rows.")  # fmt: skip
    if not is_contiguous(state):
        refuse(f"{name} is not contiguous", "it is read, and written, as one stretch of memory", "Make it contiguous.")


def prepared_of(kind: type[Ssm], world, x, heads, head_dim, state_dim, groups, state_decays, lengths, layout, flags, limits,
                members):  # fmt: skip
    key = (kind.op, x.dtype, heads, head_dim, state_dim, groups, state_decays, lengths, layout, *flags.items(), limits,
           *members.items())  # fmt: skip

    def make():
        wanted = dict(flags)
        batch = _structs.ssm_batch(sequences=len(lengths), lengths=_job.longs(lengths), initial_states=wanted.pop("initial"),
                                    final_states=wanted.pop("final"), update=wanted.pop("update", 0))  # fmt: skip
        spec = _structs.ssm_spec(dtype=data_type(x), heads=heads, head_dim=head_dim, state_dim=state_dim, groups=groups,
                                  state_decays=int(state_decays), dt_limits=int(limits is not None), **wanted)  # fmt: skip
        if limits is not None:
            spec.dt_min, spec.dt_max = limits
        return kind(world, spec, batch, *kind.settings, run_options(world, lengths, layout, members))

    return world.prepared(key, make)


def _ssm(op, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, return_final_states, cu_seqlens, layout,
          world, out, members, wanting=None):  # fmt: skip
    """x, z: [(batch,) tokens, heads, head_dim]; dt: [(batch,) tokens, heads]; B, C: [(batch,) tokens, groups, state_dim]."""
    world = _job.world_of(x, world)
    if op == "ssd":
        _check_expanded(x, dt, A, D, dt_bias)
    if x.ndim not in (3, 4) or dt.ndim != x.ndim - 1 or B.ndim != x.ndim or C.ndim != x.ndim:
        refuse(f"x, dt, B and C have {x.ndim}, {dt.ndim}, {B.ndim} and {C.ndim} axes",
               "they are [(batch,) tokens, heads, head_dim], one axis less, and [(batch,) tokens, groups, state_dim]",
               "Reshape them.")  # fmt: skip
    _check_leading(op, x, dt, B, C, z)
    lengths = lengths_of_runs(x, x.ndim == 4, cu_seqlens, layout, world)
    heads, head_dim = x.shape[-2:]
    flags = flags_of(D, z, dt_bias, dt_softplus) | {"initial": int(initial_states is not None), "final": int(return_final_states)}
    shape = world, x, heads, head_dim, B.shape[-1], B.shape[-2], A.ndim == 2, lengths, layout
    if wanting is not None:
        return _recording(wanting, shape, flags, limits_of(dt_limit), members, out)
    scan = prepared_of(Ssm, *shape, flags, limits_of(dt_limit), members)
    y = empty(x, (math.prod(x.shape[:-2]), heads, head_dim)) if out is None else _flat_out(out, x)
    states = empty(x, (scan.facts.ending, heads, head_dim, B.shape[-1]), "float32") if return_final_states else None
    # If no sequence of this rank begins here, there are no initial states to pass.
    arrays = _arrays(x, dt, A, B, C, D, z, dt_bias, y)
    arrays |= {"initial_states": initial_states if scan.facts.beginning else None,
               "final_states": states if scan.facts.ending else None}  # fmt: skip
    scan._do(x, arrays)
    y = y.reshape(x.shape)
    return (y, states) if return_final_states else y


def _recording(wanting: str, shape: tuple, flags: dict, limits, members: dict, out):
    """Returns the operators that autograd records. Prepares the backward pass first, so that a job without gradients is refused
    before its forward pass runs. wanting: the name of a tensor that requires a gradient."""
    from . import torch_ops  # noqa: PLC0415, needs torch
    from ._ssd_backward import SsdBackward  # noqa: PLC0415, which needs this

    _gradients.check_out(wanting, out)
    final = flags["final"] or shape[0].size > 1  # as in ssd_backward()
    prepared_of(SsdBackward, *shape, flags | {"final": int(final)}, limits, members)
    return torch_ops


def _check_leading(op: str, x, dt, B, C, z) -> None:
    """Compares the leading axes. Names are the caller's."""
    like, of_dt = ("u", "delta") if op.startswith("selective") else ("x", "dt")
    wanted = x.shape[: x.ndim - 2]
    advice = f"Give {like}, {of_dt}, B, C and z the same rows."
    check_leading(like, wanted, {of_dt: dt}, 1, advice)
    check_leading(like, wanted, {"B": B, "C": C, "z": z}, 2, advice)


def _check_expanded(x, dt, A, D, dt_bias) -> None:
    """Refuses arrays expanded over head_dim and state_dim, as mamba_ssm's update kernels take them."""
    form = [f"{name} is {list(array.shape)}" for name, array, axes in (("A", A, 2), ("D", D, 1), ("dt_bias", dt_bias, 1))
            if array is not None and array.ndim > axes]  # fmt: skip
    if x.ndim > 2 and dt.shape == x.shape:
        form.insert(0, f"dt is {list(dt.shape)}")
    if form:
        refuse(", ".join(form), "a head has one number of each",
               "Of expanded arrays pass A[:, 0, 0], dt[..., 0], D[:, 0] and dt_bias[:, 0].")  # fmt: skip


def flags_of(D, z, dt_bias, dt_softplus) -> dict:
    return {"skip": int(D is not None), "gate": int(z is not None), "dt_bias": int(dt_bias is not None),
            "dt_softplus": int(dt_softplus)}  # fmt: skip


def limits_of(dt_limit) -> tuple[float, float] | None:
    if dt_limit is None:
        return None
    try:
        least, most = map(float, dt_limit)
    except (TypeError, ValueError, OverflowError):
        refuse(f"dt_limit is {shown(dt_limit)}", "it is two numbers, (min, max)", "Pass both, or leave it out.")
    return None if (least, most) == (-math.inf, math.inf) else (least, most)


def _flat_out(out, like):
    if out.shape != like.shape:
        refuse(f"out is {list(out.shape)}", f"x is {list(like.shape)}", "Pass one of that shape, or none.")
    return flat_view(out) if out.ndim == 4 else out


def _arrays(x, dt, A, B, C, D, z, dt_bias, y) -> dict:
    def rows(array):
        return None if array is None else as_rows(contiguous_heads(array))

    return {"x": rows(x), "dt": as_rows(dt, 1)[..., None], "b": rows(B), "c": rows(C), "z": rows(z), "a": A, "d": D,
            "dt_bias": dt_bias, "y": y}  # fmt: skip


def _update(op, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, slots, out, members, unknown):
    """Update by one token per sequence. x, z: [sequences, heads, head_dim]; dt: [sequences, heads]; B, C: [sequences, groups,
    state_dim]."""
    if unknown:
        refuse_unknown(op, unknown)
    limits = limits_of(dt_limit)
    given = {"x": x, "dt": dt, "a": A, "b": B, "c": C, "d": D, "z": z, "dt_bias": dt_bias, "final_states": state, "slots": slots}
    call, results = _job.known_call(None, (op, dt_softplus, limits, *members.values()), given, out)
    if results is not None:
        return results[0]
    _job.check_arrays(op, {"x": x, "dt": dt, "A": A, "B": B, "C": C, "state": state}, D=D, z=z, dt_bias=dt_bias,
                      state_batch_indices=slots, out=out)  # fmt: skip
    if op == "ssd_update":
        _check_expanded(x, dt, A, D, dt_bias)
    if x.ndim != 3 or dt.ndim != 2 or B.ndim != 3 or C.ndim != 3:
        refuse(f"x, dt, B and C have {x.ndim}, {dt.ndim}, {B.ndim} and {C.ndim} axes",
               "they are [sequences, heads, head_dim], one axis less, and [sequences, groups, state_dim]",
               "Pass one token of each sequence.")  # fmt: skip
    _check_leading(op, x, dt, B, C, z)
    sequences, heads, head_dim = x.shape
    check_state("state", state, slots, sequences, (heads, head_dim, B.shape[-1]), "float32")
    flags = flags_of(D, z, dt_bias, dt_softplus) | {"initial": 1, "final": 1, "update": 1}
    scan = prepared_of(Ssm, _job.world_of(x, None), x, heads, head_dim, B.shape[-1], B.shape[-2], A.ndim == 2, (1,) * sequences,
                       None, flags, limits, members)  # fmt: skip
    y = empty(x, x.shape) if out is None else _flat_out(out, x)
    arrays = _arrays(x, dt, A, B, C, D, z, dt_bias, y) | {"final_states": state, "slots": slots}
    scan._do(x, arrays)
    _job.keep_call(None, call, scan, arrays, given, y, None)
    return y


@traced
def ssd(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None,
        initial_states=None, return_final_states: bool = False, cu_seqlens=None, layout: Layout | None = None,
        world: World | None = None, out=None, threads: int = 0, memory_budget: int = 0, timeout: float = 60.0,
        **unknown):  # fmt: skip
    """Mamba-2's SSD, like mamba_chunk_scan_combined of mamba_ssm (docs/ssm.md lists the differences). Collective with several
    ranks.

    Args:
        x: [tokens, heads, head_dim] or [batch, tokens, heads, head_dim], float32, float16 or bfloat16.
        dt: [(batch,) tokens, heads] of x's dtype.
        A: float32 [heads].
        B, C: [(batch,) tokens, groups, state_dim] of x's dtype; groups divides heads.
        D: float32 [heads], factor of x in y. None: 0.
        z: gate of x's shape and dtype. None: no gate.
        dt_bias: float32 [heads], added to dt. None: 0.
        dt_softplus: dt = log(1 + exp(dt + dt_bias)).
        dt_limit: (min, max) to which dt is clamped after that. None: no limit.
        initial_states: float32 [sequences, heads, head_dim, state_dim]. None: zeros.
        return_final_states: returns the states after each sequence, too.
        cu_seqlens: [sequences + 1] cumulative lengths of packed sequences. An empty sequence passes its state through.
        layout: with several ranks, whole super-segments of 65,536 tokens: ringattn.super_segments(lengths, ranks), the default,
            or a Layout. A rank passes the initial states of the sequences that begin on it (Layout.begins(rank)), and gets the
            final states of the sequences that end on it (Layout.ends(rank)).
        world, out, threads, memory_budget, timeout: as in attention(). out has x's shape.

    Returns:
        y, of x's shape and dtype; with return_final_states (y, states float32 [sequences, heads, head_dim, state_dim]). PyTorch
        tensors have gradients (docs/gradients.md).

    Raises:
        CallError, UsageError, UnsupportedError, OutOfMemory, PeerError: as attention().

    Formula:
        Mamba-2 (arXiv:2405.21060); docs/ssm.md says in which order it is computed::

            S = exp(dt * A) * S + dt * outer(x, B)        y = (S @ C + D * x) * silu(z)

    Example:
        >>> x, dt, B = (np.ones(shape, "float32") for shape in ((10, 4, 16), (10, 4), (10, 1, 8)))
        >>> y, states = ringattn.ssd(x, dt, -np.ones(4, "float32"), B, B, dt_softplus=True, return_final_states=True)
        >>> y.shape, states.shape
        ((10, 4, 16), (1, 4, 16, 8))
    """
    if unknown:
        refuse_unknown("ssd", unknown)
    is_true("dt_softplus", dt_softplus), is_true("return_final_states", return_final_states)
    _job.check_arrays("ssd", {"x": x, "dt": dt, "A": A, "B": B, "C": C}, D=D, z=z, dt_bias=dt_bias,
                      initial_states=initial_states, out=out)  # fmt: skip
    members = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    wanting = _gradients.requiring({"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias,
                                    "initial_states": initial_states})  # fmt: skip
    made = _ssm("ssd", x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, return_final_states, cu_seqlens,
                layout, world, out, members, wanting)  # fmt: skip
    if wanting is None:
        return made
    return made.ssd(x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit,
                    initial_states=initial_states, return_final_states=return_final_states, cu_seqlens=cu_seqlens, layout=layout,
                    world=world, threads=threads, memory_budget=memory_budget, timeout=timeout)  # fmt: skip


@traced
def ssd_update(state, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus: bool = False,
               dt_limit: tuple[float, float] | None = None, state_batch_indices=None, out=None, threads: int = 0,
               timeout: float = 60.0, **unknown):  # fmt: skip
    """Updates the state of each sequence by one token, as mamba_ssm's selective_state_update with A, D and dt per head. One rank.

    Args:
        state: float32 [sequences, heads, head_dim, state_dim], contiguous, updated in place, e.g. the final states of ssd().
        x, z: [sequences, heads, head_dim].
        dt: [sequences, heads].
        B, C: [sequences, groups, state_dim].
        state_batch_indices: int32 [sequences], distinct slots of a state with any number of slots: row s updates that slot. A
            negative slot marks a padding row: no state is written, and its y is zeros.
        A, D, dt_bias, dt_softplus, dt_limit, out, threads, timeout: as in ssd().

    Returns:
        y, of x's shape and dtype. A row does not depend on the other rows. It agrees with ssd() within a tolerance.

    Raises:
        CallError, UsageError, UnsupportedError: as ssd(). There are no gradients.

    Formula:
        That of ssd() for one token.

    Example:
        >>> state = np.zeros((2, 4, 16, 8), "float32")
        >>> x, dt, B = (np.ones(shape, "float32") for shape in ((2, 4, 16), (2, 4), (2, 1, 8)))
        >>> y = ringattn.ssd_update(state, x, dt, -np.ones(4, "float32"), B, B)
        >>> y.shape, float(state[0, 0, 0, 0])
        ((2, 4, 16), 1.0)
    """
    is_true("dt_softplus", dt_softplus)
    members = {"threads": threads, "timeout_seconds": timeout}
    return called_by(_STATE, _update, "ssd_update", state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit,
                     state_batch_indices, out, members, unknown)  # fmt: skip


@traced
def selective_scan(u, delta, A, B, C, *, D=None, z=None, delta_bias=None, delta_softplus: bool = False, initial_states=None,
                   return_last_state: bool = False, cu_seqlens=None, layout: Layout | None = None, world: World | None = None,
                   out=None, threads: int = 0, memory_budget: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Mamba-1's selective scan, as mamba_ssm's selective_scan_fn, but with the token axis before the channel axis. Collective
    with several ranks.

    Args:
        u, delta, z: [(batch,) tokens, channels] of one dtype, float32, float16 or bfloat16; z may be None.
        A: float32 [channels, state_dim].
        B, C: [(batch,) tokens, (groups,) state_dim] of u's dtype.
        D: float32 [channels], factor of u in y. None: 0.
        delta_bias: float32 [channels], added to delta. None: 0.
        delta_softplus: delta = log(1 + exp(delta + delta_bias)).
        initial_states: float32 [sequences, channels, state_dim]. None: zeros.
        return_last_state: returns the states after each sequence, too.
        cu_seqlens, layout, world, out, threads, memory_budget, timeout: as in ssd().

    Returns:
        y, of u's shape and dtype; with return_last_state (y, states float32 [sequences, channels, state_dim]). No gradients.

    Raises:
        CallError, UsageError, UnsupportedError, OutOfMemory, PeerError: as attention().

    Formula:
        Mamba (arXiv:2312.00752), for each channel; docs/ssm.md::

            S = exp(delta * A) * S + delta * u * B        y = (dot(S, C) + D * u) * silu(z)

    Example:
        >>> u, B = np.ones((10, 16), "float32"), np.ones((10, 8), "float32")
        >>> y, states = ringattn.selective_scan(u, u, -np.ones((16, 8), "float32"), B, B, return_last_state=True)
        >>> y.shape, states.shape
        ((10, 16), (1, 16, 8))
    """
    if unknown:
        refuse_unknown("selective_scan", unknown)
    is_true("delta_softplus", delta_softplus), is_true("return_last_state", return_last_state)
    _job.check_arrays("selective_scan", {"u": u, "delta": delta, "A": A, "B": B, "C": C}, D=D, z=z, delta_bias=delta_bias,
                      initial_states=initial_states, out=out)  # fmt: skip
    check_axes("u", u, (2, 3), "[(batch,) tokens, channels]")
    for name, rows in (("B", B), ("C", C)):
        check_axes(name, rows, (u.ndim, u.ndim + 1), "[(batch,) tokens, (groups,) state_dim]")
    check_axes("initial_states", initial_states, (3,), "[sequences, channels, state_dim]")
    members = {"threads": threads, "memory_budget": memory_budget, "timeout_seconds": timeout}
    grouped = [rows if rows.ndim == u.ndim + 1 else rows[..., None, :] for rows in (B, C)]
    states = None if initial_states is None else initial_states[:, :, None, :]
    made = called_by(_CHANNELS, _ssm, "selective_scan", u[..., None], delta, A, *grouped, D,
                     None if z is None else z[..., None], delta_bias, delta_softplus, None, states, return_last_state, cu_seqlens,
                     layout, world, None if out is None else out[..., None], members)  # fmt: skip
    return (made[0][..., 0], made[1][:, :, 0]) if return_last_state else made[..., 0]


@traced
def selective_update(state, u, delta, A, B, C, *, D=None, z=None, delta_bias=None, delta_softplus: bool = False,
                     state_batch_indices=None, out=None, threads: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Updates the state of each sequence by one token, as mamba_ssm's selective_state_update. One rank.

    Args:
        state: float32 [sequences, channels, state_dim], contiguous, updated in place.
        u, delta, z: [sequences, channels].
        B, C: [sequences, (groups,) state_dim].
        state_batch_indices: as in ssd_update().
        A, D, delta_bias, delta_softplus, out, threads, timeout: as in selective_scan().

    Returns:
        y, of u's shape and dtype. A row doesn't depend on the other rows. It agrees with selective_scan() within a tolerance.

    Raises:
        CallError, UsageError, UnsupportedError: as selective_scan().

    Formula:
        That of selective_scan() for one token.

    Example:
        >>> state, u, B = np.zeros((2, 16, 8), "float32"), np.ones((2, 16), "float32"), np.ones((2, 8), "float32")
        >>> ringattn.selective_update(state, u, u, -np.ones((16, 8), "float32"), B, B).shape
        (2, 16)
    """
    is_true("delta_softplus", delta_softplus)
    try:
        named = {"u": u, "state": state, "B": B, "C": C}
        if u.ndim != 2 or state.ndim != 3 or B.ndim not in (2, 3) or C.ndim not in (2, 3):
            refuse(", ".join(f"{name} has {array.ndim} axes" for name, array in named.items()),
                   "u is [sequences, channels], state [sequences, channels, state_dim], B and C [sequences, (groups,) state_dim]",
                   "Pass one token of each sequence.")  # fmt: skip
        if z is not None:
            check_array("z", z)
        if out is not None:
            check_array("out", out)
    except AttributeError:
        for name, array in named.items():
            check_array(name, array)
        raise
    members = {"threads": threads, "timeout_seconds": timeout}
    B, C = (rows if rows.ndim == 3 else rows[:, None, :] for rows in (B, C))
    y = called_by(_CHANNELS | _STATE, _update, "selective_update", state[:, :, None], u[..., None], delta, A, B, C, D,
                  None if z is None else z[..., None], delta_bias, delta_softplus, None, state_batch_indices,
                  None if out is None else out[..., None], members, unknown)  # fmt: skip
    return y[..., 0]
