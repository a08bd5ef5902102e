# SPDX-License-Identifier: Apache-2.0
"""The causal depthwise conv1d before an SSM layer. Results are bitwise identical on any number of ranks, and one token at a
time.

    x = ringattn.causal_conv1d(x, weight, bias, activation="silu")                          # [tokens, channels]
    x, halos = ringattn.causal_conv1d(x, weight, bias, return_final_states=True)
    y = ringattn.causal_conv1d_update(x, halos, weight, bias, activation="silu")            # the next token of each sequence"""

from . import _gradients, _job, _structs
from ._arguments import check_axes, is_true, refuse_unknown
from ._errors import refuse
from ._ssm import check_state, lengths_of_runs, run_options
from ._tensors import as_rows, contiguous_heads, data_type, empty, flat_view, traced, type_name
from .layouts import Layout
from .worlds import World


class CausalConv1d(_job.Prepared):
    """A prepared convolution. causal_conv1d() keeps such objects. Creating one is collective."""

    op = "causal_conv1d"


def prepared_of(kind, world, x, channels, width, bias, activation, lengths, layout, flags, members):
    """The world's prepared job: a CausalConv1d or its backward pass. flags: initial states, final states, update."""
    if activation not in (None, "silu", "swish"):
        refuse(f"activation is {activation!r}", 'it must be None, "silu", or "swish", which is the same', "Choose one.")
    silu = activation is not None
    key = (kind.op, x.dtype, channels, width, bias is not None, silu, lengths, layout, flags, *members.items())

    def make():
        initial, final, update = flags
        batch = _structs.ssm_batch(sequences=len(lengths), lengths=_job.longs(lengths), initial_states=int(initial),
                                    final_states=int(final), update=int(update))  # fmt: skip
        spec = _structs.causal_conv1d_spec(dtype=data_type(x), width=width, channels=channels, bias=int(bias is not None),
                                         silu=int(silu))  # fmt: skip
        return kind(world, spec, batch, run_options(world, lengths, layout, members))

    return world.prepared(key, make)


def _check(op: str, x, axes, form, weight, bias, out, unknown, state=None, **states) -> None:
    """Checks arguments. state: {name: array} of the state that an update requires. states: optional states."""
    if unknown:
        refuse_unknown(op, unknown)
    _job.check_arrays(op, {"x": x, "weight": weight} | (state or {}), bias=bias, out=out, **states)
    check_axes("x", x, axes, form)
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        refuse(f"weight is {list(weight.shape)}", f"x has {x.shape[-1]} channels, so it must be [{x.shape[-1]}, width]",
               "Pass the weight of a torch Conv1d without its middle axis.")  # fmt: skip
    if out is not None and out.shape != x.shape:
        refuse(f"out is {list(out.shape)}", f"x is {list(x.shape)}", "Pass one of that shape, or none.")


def rows_of(array):
    """The array as [rows, 1, channels], the shape that the library takes."""
    return contiguous_heads(array)[:, None, :]


@traced
def causal_conv1d(x, weight, bias=None, *, activation: str | None = None, initial_states=None,
                  return_final_states: bool = False, cu_seqlens=None, layout: Layout | None = None, world: World | None = None,
                  out=None, threads: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Causal depthwise conv1d, as causal_conv1d_fn of the causal-conv1d package, but with the token axis before the channel axis.
    Collective with several ranks.

    Args:
        x: [tokens, channels] or [batch, tokens, channels], float32, float16 or bfloat16.
        weight: float32 [channels, width], width 2 to 4.
        bias: float32 [channels]. None: 0.
        activation: None, or "silu" (also called "swish").
        initial_states: [sequences, width - 1, channels] of x's dtype, the tokens before each sequence, oldest first. None:
            zeros.
        return_final_states: also returns the last tokens of each sequence.
        cu_seqlens: [sequences + 1] cumulative lengths of packed sequences (the package has seq_idx for this). The final state of
            an empty sequence is its initial state.
        layout, world, out, threads, timeout: as in ssd(), as are the states that a rank passes and gets.

    Returns:
        y, of x's shape and dtype. With return_final_states (y, states): the last width - 1 tokens of each sequence, for the next
        call or for causal_conv1d_update(). PyTorch tensors have gradients of x, weight, bias and initial_states. With several
        ranks the gradients of weight and bias are already sums over all ranks.

    Raises:
        CallError, UsageError, UnsupportedError, PeerError: as attention().

    Formula:
        Tokens before the sequence are initial_states (docs/ssm.md)::

            y[t, c] = activation(bias[c] + sum over i of weight[c, i] * x[t - width + 1 + i, c])

    Example:
        >>> x, weight = np.ones((10, 8), "float32"), np.ones((8, 4), "float32")
        >>> y, states = ringattn.causal_conv1d(x, weight, return_final_states=True)
        >>> y[:, 0].tolist(), states.shape
        ([1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], (1, 3, 8))
    """
    _check("causal_conv1d", x, (2, 3), "[(batch,) tokens, channels]", weight, bias, out, unknown, initial_states=initial_states)
    is_true("return_final_states", return_final_states)
    world = _job.world_of(x, world)
    lengths = lengths_of_runs(x, x.ndim == 3, cu_seqlens, layout, world)
    channels, width = weight.shape
    given = {"x": x, "weight": weight, "bias": bias, "initial_states": initial_states}
    wanting = _gradients.requiring(given)
    if wanting is not None:
        _gradients.check(wanting, False, None, out)
        from . import torch_ssm_ops  # noqa: PLC0415, needs torch

        y, states = torch_ssm_ops.recorded_conv1d(*given.values(), activation, cu_seqlens, layout, world, threads, timeout)
        return (y, states) if return_final_states else y
    flags = (initial_states is not None, return_final_states, False)
    convolution = prepared_of(CausalConv1d, world, x, channels, width, bias, activation, lengths, layout, flags,
                            {"threads": threads, "timeout_seconds": timeout})  # fmt: skip
    facts = convolution.facts
    if initial_states is not None:
        check_state("initial_states", initial_states, None, facts.beginning, (width - 1, channels), type_name(x.dtype))
    y = empty(x, x.shape) if out is None else out
    states = empty(x, (facts.ending, width - 1, channels)) if return_final_states else None
    flat_y = flat_view(y) if x.ndim == 3 else y
    convolution._do(x, {"x": rows_of(as_rows(x, 1)), "weight": weight, "bias": bias, "y": flat_y[:, None, :],
                        "initial_halos": initial_states if facts.beginning else None,
                        "final_halos": states if facts.ending else None})  # fmt: skip
    return (y, states) if return_final_states else y


@traced
def causal_conv1d_update(x, conv_state, weight, bias=None, *, activation: str | None = None, conv_state_indices=None, out=None,
                         threads: int = 0, timeout: float = 60.0, **unknown):  # fmt: skip
    """Causal conv1d of one token per sequence, as the causal-conv1d package's function of this name, but conv_state has the token
    axis before the channel axis. One rank.

    Args:
        x: [sequences, channels].
        conv_state: [sequences, width - 1, channels] of x's dtype, contiguous, updated in place, e.g. the final states of
            causal_conv1d().
        conv_state_indices: as state_batch_indices of ssd_update().
        weight, bias, activation, out, threads, timeout: as in causal_conv1d().

    Returns:
        y, of x's shape and dtype, bitwise identical to causal_conv1d() for the same token.

    Raises:
        CallError, UsageError, UnsupportedError: as causal_conv1d(). There are no gradients.

    Formula:
        That of causal_conv1d() for one token.

    Example:
        >>> x, state, weight = np.ones((2, 8), "float32"), np.zeros((2, 3, 8), "float32"), np.ones((8, 4), "float32")
        >>> ringattn.causal_conv1d_update(x, state, weight).shape, float(state[0, -1, 0])
        ((2, 8), 1.0)
    """
    given = {"x": x, "weight": weight, "bias": bias, "final_halos": conv_state, "slots": conv_state_indices}
    call, results = (None, None) if unknown else _job.known_call(None, ("causal_conv1d_update", activation, threads, timeout),
                                                                 given, out)  # fmt: skip
    if results is not None:
        return results[0]
    _check("causal_conv1d_update", x, (2,), "[sequences, channels]", weight, bias, out, unknown, {"conv_state": conv_state},
           conv_state_indices=conv_state_indices)  # fmt: skip
    channels, width = weight.shape
    check_state("conv_state", conv_state, conv_state_indices, x.shape[0], (width - 1, channels), type_name(x.dtype))
    convolution = prepared_of(CausalConv1d, _job.world_of(x, None), x, channels, width, bias, activation, (1,) * x.shape[0], None,
                            (True, True, True), {"threads": threads, "timeout_seconds": timeout})  # fmt: skip
    y = empty(x, x.shape) if out is None else out
    arrays = {"x": rows_of(x), "weight": weight, "bias": bias, "y": y[:, None, :], "final_halos": conv_state,
              "slots": conv_state_indices}  # fmt: skip
    convolution._do(x, arrays)
    _job.keep_call(None, call, convolution, arrays, given, y, None)
    return y
