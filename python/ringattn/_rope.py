# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE) of q and k.

    q, k = ringattn.rope(q, k, theta=500000.0)                                       # positions 0, 1, 2, ...
    q, k = ringattn.rope(q, k, rope_parameters=config.rope_parameters)               # as a model of Hugging Face has it
    q, k = ringattn.rope(q_mine, k_mine, layout=layout, world=world)                 # a rank's rows"""

import ctypes
import json
import math

import numpy as np

from . import _gradients, _job, _structs, layouts
from ._abi import lib
from ._arguments import as_int, as_number, check_axes, is_true, lengths_of, refuse_unknown, shown
from ._errors import refuse
from ._loaded_torch import loaded_torch
from ._tensors import as_rows, check_array, contiguous_heads, data_type, empty, flat_view, is_torch, traced, type_name
from .layouts import Layout
from .worlds import World

_MAX_HEAD_DIM = 512

# Names of rope_parameters that are arguments of their own in the library.
_APART = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


class Rope(_job.Prepared):
    """A prepared rotation. rope() keeps such objects. Creating one is not collective."""

    op = "rope"


def _text_of(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ":".join(_text_of(x) for x in value)
    return repr(float(value)) if isinstance(value, float) else str(value)


def _positive(value, name: str) -> float:
    """Checks a positive number. 0 is refused, because it means the default in the library."""
    number = as_number(value, name)
    if not number > 0:
        refuse(f"{name} is {value}", "it is above 0", "Pass such a number, or leave it out.")
    return number


def _rotary_factor(rotary_dim: int, head_dim: int) -> float:
    """A factor that gives rotary_dim when the library multiplies it by head_dim and rounds down. The rounded quotient alone may
    give one less."""
    factor = rotary_dim / head_dim
    return factor if int(head_dim * factor) == rotary_dim else math.nextafter(factor, math.inf)


def settings_of(rope_parameters, theta, rotary_dim, head_dim: int, interleaved, inv_freq, attention_factor, exact,
                length) -> tuple:  # fmt: skip
    """The spec's members other than tensors: (type, parameters, theta, rotary_factor, interleaved, exact, frequencies,
    attention_factor)."""
    if rope_parameters is not None and not hasattr(rope_parameters, "items"):
        refuse(f"rope_parameters is {type(rope_parameters).__name__}", "it is a dict, as in a model's config",
               'Pass one, such as {"rope_type": "linear", "factor": 4.0}.')  # fmt: skip
    given = {name: value for name, value in (rope_parameters or {}).items() if value is not None}
    if any(isinstance(value, dict) for value in given.values()):
        refuse("rope_parameters has parameters for each kind of layer", "a call is one layer's",
               'Pass those of its kind, such as config.rope_parameters["full_attention"].')  # fmt: skip
    kind = given.get("rope_type", given.get("type", "default"))
    factor = _positive(given.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
    if rotary_dim is not None:
        if "partial_rotary_factor" in given:
            refuse("rotary_dim and partial_rotary_factor are given", "they say the same", "Pass one of them.")
        _positive(as_int(rotary_dim, "rotary_dim"), "rotary_dim")
        factor = _rotary_factor(rotary_dim, head_dim)
    if theta is not None and "rope_theta" in given:
        refuse("theta and rope_theta are given", "they say the same", "Pass one of them.")
    theta = _positive(given.get("rope_theta", 10000.0) if theta is None else theta, "theta")
    texts = [f"{name}={_text_of(value)}" for name, value in given.items() if name not in _APART]
    if length is not None:
        texts.append(f"length={as_int(length, 'length')}")
    frequencies = None
    if inv_freq is not None:
        try:
            frequencies = tuple(float(x) for x in (inv_freq.tolist() if hasattr(inv_freq, "tolist") else inv_freq))
        except (TypeError, ValueError):
            refuse(f"inv_freq is {' '.join(shown(inv_freq).split())}", "it is a flat list of numbers, one for each pair",
                   "Pass a model's rotary_emb.inv_freq.")  # fmt: skip
    elif attention_factor is not None:
        refuse("attention_factor is given without inv_freq", "the type of RoPE has its own",
               "Leave it out, or pass it in rope_parameters.")  # fmt: skip
    return (str(kind), ",".join(texts), float(theta), float(factor), is_true("interleaved", interleaved),
            is_true("exact", exact), frequencies, 0.0 if attention_factor is None else
            _positive(attention_factor, "attention_factor"))  # fmt: skip


class RopeSettings:
    """How decode() rotates q and k_new, as arguments of rope(). decode() is faster if the same object is passed again.
    torch.compile can't trace the constructor, so make the object outside of compiled functions.

    Args:
        head_dim: of q and k_new.
        rope_parameters, theta, rotary_dim, interleaved, inv_freq, attention_factor, exact, length: as in rope().

    Raises:
        UsageError: arguments contradict each other.

    Example:
        >>> ringattn.RopeSettings(64, theta=1e6) == ringattn.RopeSettings(64, rope_parameters={"rope_theta": 1e6})
        True
    """

    __slots__ = ("head_dim", "settings", "text")

    def __init__(self, head_dim: int, *, rope_parameters=None, theta=None, rotary_dim: int | None = None,
                 interleaved: bool = False, inv_freq=None, attention_factor=None, exact: bool = False,
                 length: int | None = None):  # fmt: skip
        self.head_dim = as_int(head_dim, "head_dim")
        _positive(self.head_dim, "head_dim")
        self._set(settings_of(rope_parameters, theta, rotary_dim, self.head_dim, interleaved, inv_freq, attention_factor, exact,
                              length))  # fmt: skip

    def _set(self, settings: tuple) -> None:
        self.settings = settings
        self.text = json.dumps([self.head_dim, *settings])

    @classmethod
    def from_text(cls, text: str) -> "RopeSettings":
        """The settings with this `text`, which graphs of torch.compile hold."""
        made = cls.__new__(cls)
        made.head_dim, *settings, frequencies, factor = json.loads(text)
        made._set((*settings, None if frequencies is None else tuple(frequencies), factor))
        return made

    def __eq__(self, other):
        return isinstance(other, RopeSettings) and self.text == other.text

    def __hash__(self):
        return hash(self.text)

    def __repr__(self):
        return f"RopeSettings({self.text})"


def spec_of(like, head_dim: int, settings: tuple):
    kind, parameters, theta, rotary_factor, interleaved, exact, frequencies, attention_factor = settings
    count = 0 if frequencies is None else len(frequencies)
    numbers = None if frequencies is None else (ctypes.c_double * count)(*frequencies)
    return _structs.rope_spec(dtype=data_type(like), head_dim=head_dim, type=kind.encode(), parameters=parameters.encode(),
                              theta=theta, rotary_factor=rotary_factor, interleaved=int(interleaved), exact=int(exact),
                              frequencies=numbers, frequency_count=count, attention_factor=attention_factor)  # fmt: skip


def _prepared(world: World, like, head_dim: int, settings: tuple, threads: int) -> Rope:
    def make():
        return Rope(world, spec_of(like, head_dim, settings), _structs.options(threads=threads))

    return world.prepared(("rope", like.dtype, head_dim, settings, threads), make)


def _like(array, values: np.ndarray):
    """int64 values on the array's device."""
    if not is_torch(array):
        return values
    return loaded_torch().from_numpy(values).to(array.device)


def given_positions(positions, rows: tuple[int, ...], axes: int):
    """int32 or int64 [rows] or [axes, rows], of positions whose shape can be that of the tokens."""
    if str(positions.dtype).removeprefix("torch.") not in ("int32", "int64"):
        refuse(f"positions are {positions.dtype}", "they are int32 or int64", "Convert them.")
    shape = tuple(positions.shape)
    wanted = rows if axes == 1 else (axes, *rows)
    if len(shape) + 1 == len(wanted):
        positions = positions[None] if axes == 1 else positions[:, None]
    fits = positions.ndim == len(wanted) and all(a in (1, b) for a, b in zip(positions.shape, wanted, strict=True))
    if not fits or (axes > 1 and positions.shape[0] != axes):
        refuse(f"positions are {list(shape)}", f"the rows are {list(wanted)}", "Pass one for each row, on each axis.")
    if tuple(positions.shape) != wanted:
        positions = positions.expand(wanted) if is_torch(positions) else np.broadcast_to(positions, wanted)
    flat = positions.reshape(-1) if axes == 1 else positions.reshape(axes, -1)
    return flat.contiguous() if is_torch(flat) else np.ascontiguousarray(flat)


def _positions_of(q, positions, cu_seqlens, offset: int, layout, world: World, axes: int) -> tuple:
    """(positions or None, the first position) of the rows of q."""
    rows = tuple(q.shape[:-2])
    count = int(np.prod(rows))
    ways = {"cu_seqlens": cu_seqlens, "layout": layout, "offset": offset or None}
    others = [name for name, value in ways.items() if value is not None]
    if positions is not None:
        if others:
            refuse(f"positions and {others[0]} are given", "each says where rows are", "Pass one of them.")
        return given_positions(positions, rows, axes), 0
    if layout is not None:
        lengths = layout.lengths if isinstance(layout, Layout) else None
        if cu_seqlens is not None:
            lengths = lengths_of(cu_seqlens)
        if lengths is None:
            refuse("layout is a name", "lengths of the sequences belong to it", "Pass a ringattn.Layout, or cu_seqlens, too.")
        made = layouts.positions(layouts.make_layout(layout, lengths, world.size), world.rank)
    elif cu_seqlens is not None:
        made = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths_of(cu_seqlens)] or [np.empty(0, np.int64)])
    elif len(rows) == 2 and rows[0] != 1:
        made = np.tile(np.arange(rows[1], dtype=np.int64), rows[0])
    elif axes == 1:
        return None, offset
    else:
        made = np.arange(count, dtype=np.int64)
    if len(made) != count:
        refuse(f"there are {count} rows", f"cu_seqlens or the layout has {len(made)}", "Pass this rank's rows of each sequence.")
    made = np.ascontiguousarray(made.astype(np.int64) + offset)
    return _like(q, made if axes == 1 else np.ascontiguousarray(np.broadcast_to(made, (axes, count)))), 0


def rotate(q, k, positions, cu_seqlens, offset: int, layout, settings: tuple, inverse: bool, world, threads: int, out) -> tuple:
    """(q, k) rotated; k may be None."""
    world = _job.world_of(q, world)
    prepared = _prepared(world, q, q.shape[-1], settings, threads)
    positions, first = _positions_of(q, positions, cu_seqlens, offset, layout, world, prepared.facts.axes)
    arrays, results = {"positions": positions}, []
    for name, rows, into in zip(("q", "k"), (q, k), out, strict=True):
        if rows is None:
            arrays |= {name: None, f"{name}_out": None}
            results.append(None)
            continue
        result = empty(rows, rows.shape) if into is None else into
        given = contiguous_heads(rows)
        arrays[name] = as_rows(given) if rows.ndim == 4 else given
        arrays[f"{name}_out"] = flat_view(result) if rows.ndim == 4 else result
        results.append(result)
    prepared._do(q, arrays, first_position=first, inverse=int(inverse))
    return tuple(results)


@traced
def rope(q, k=None, *, positions=None, cu_seqlens=None, offset: int = 0, layout=None, rope_parameters=None, theta=None,
         rotary_dim: int | None = None, interleaved: bool = False, inv_freq=None, attention_factor=None, exact: bool = False,
         length: int | None = None, world: World | None = None, out=None, threads: int = 0, **unknown):  # fmt: skip
    """Rotary position embedding (RoPE) of q and k, as apply_rotary_pos_emb of Hugging Face's transformers computes it in float32,
    with one rounding at the end. Not collective: each rank rotates its own rows.

    Args:
        q: [(batch,) tokens, heads, head_dim], float32, float16 or bfloat16. head_dim is even, up to 512. Views into a fused
            projection are read in place.
        k: the same tokens with any number of heads, or None.
        positions: int32 or int64 [(batch,) tokens], or [3, (batch,) tokens] for mrope. Axes of size 1 are expanded. None: tokens
            count from `offset` in each sequence of the batch, of cu_seqlens or of `layout`.
        cu_seqlens: [sequences + 1] cumulative lengths of packed sequences.
        offset: position of the first token of each sequence.
        layout: a Layout, or the name of one together with cu_seqlens. q and k are then this rank's rows.
        rope_parameters: a model's dict with rope_type ("default", "linear", "dynamic", "yarn", "longrope", "llama3",
            "proportional"), rope_theta, factor and the type's other parameters; also mrope_section.
        theta, rotary_dim: used if there is no rope_parameters. None: 10,000 and head_dim.
        interleaved: pairs are neighbours, as in GPT-J, and not halves of the head.
        inv_freq, attention_factor: a model's own values, such as rotary_emb.inv_freq on the host, instead of rope_parameters.
            PyTorch's powers differ by up to 1 ulp from the correctly rounded ones that ringattn computes.
        exact: angles in float64, for positions in the millions, where float32 angles are off by up to 0.1.
        length: the longest sequence, tokens, for which the frequencies of "dynamic" and "longrope" are fixed.
        world: the ranks of layout. None: only this rank.
        out: (q_out, k_out), or one array without k; they may be q and k themselves. None: new ones.
        threads: CPU threads. 0: all processors.

    Returns:
        (q, k), or only q without k, of the same shapes and dtype. A row's bits depend only on the row, its position and the
        settings, not on batch, ranks, device or SIMD target. Both have gradients, which are rotated by the negative angle.

    Raises:
        CallError: a keyword is unknown.
        UsageError: arguments contradict each other, head_dim is odd or above 512, or positions don't have one number for each
            row.

    Formula:
        RoFormer (arXiv:2104.09864), with the types of transformers/modeling_rope_utils.py (5.24); docs/rope.md::

            y[a] = x[a] * cos - x[b] * sin        (a, b) = (i, i + rotary_dim / 2), or (2i, 2i + 1) if interleaved
            y[b] = x[b] * cos + x[a] * sin        cos and sin of position * inv_freq[i]
            inv_freq[i] = theta ** (-2i / rotary_dim), scaled by the type

    Example:
        >>> q, k = np.ones((10, 8, 64), "float32"), np.ones((10, 2, 64), "float32")
        >>> rotated_q, rotated_k = ringattn.rope(q, k, theta=1e6)
        >>> rotated_q.shape, bool((rotated_q[0] == q[0]).all())          # position 0 is not rotated
        ((10, 8, 64), True)
    """
    if unknown:
        refuse_unknown("rope", unknown)
    out = (None, None) if out is None else tuple(out) if isinstance(out, (list, tuple)) else (out, None)
    if len(out) != 2 or (k is None and out[1] is not None):
        refuse("out does not fit q and k", "there is a result for each", "Pass (q_out, k_out), or one array without k.")
    _job.check_arrays("rope", {"q": q}, k=k, positions=positions)
    for name, rows, into in (("q", q, out[0]), ("k", k, out[1])):
        if rows is None:
            continue
        check_axes(name, rows, (3, 4), "[(batch,) tokens, heads, head_dim]")
        if tuple(rows.shape[:-2]) != tuple(q.shape[:-2]) or rows.shape[-1] != q.shape[-1] or rows.dtype != q.dtype:
            refuse(f"{name} is {list(rows.shape)} {type_name(rows.dtype)}", f"q is {list(q.shape)} {type_name(q.dtype)}",
                   "They are [(batch,) tokens, heads, head_dim] of one type, with the same tokens and head_dim.")  # fmt: skip
        if into is not None:
            check_array(f"out of {name}", into, written=True)
        if into is not None and (tuple(into.shape) != tuple(rows.shape) or into.dtype != rows.dtype):
            refuse(f"out of {name} is {list(into.shape)}", f"{name} is {list(rows.shape)}", "Pass one of that shape and type.")
    _job.check_dtypes(q=q, k=k)
    settings = settings_of(rope_parameters, theta, rotary_dim, q.shape[-1], interleaved, inv_freq, attention_factor, exact,
                           length)  # fmt: skip
    offset = as_int(offset, "offset")
    wanting = _gradients.requiring({"q": q, "k": k})
    if wanting is not None:
        _gradients.check_out(wanting, None if out == (None, None) else out)
        from . import torch_ops  # noqa: PLC0415, needs torch

        q, k = torch_ops.recorded_rope(q, k, positions, cu_seqlens, offset, layout, settings, world, threads)
    else:
        q, k = rotate(q, k, positions, cu_seqlens, offset, layout, settings, False, world, threads, out)
    return q if k is None else (q, k)


def rope_frequencies(head_dim: int, *, rope_parameters=None, theta=None, rotary_dim: int | None = None, exact: bool = False,
                     length: int | None = None) -> tuple[np.ndarray, float]:  # fmt: skip
    """The frequencies that rope() uses.

    Args:
        head_dim: even, up to 512.
        rope_parameters, theta, rotary_dim, exact, length: as in rope().

    Returns:
        (inv_freq, attention_factor): float32 [rotary_dim / 2], or float64 if exact, and the factor of cos and sin.

    Raises:
        UsageError: as rope().

    Formula:
        inv_freq of rope(), scaled by the type (docs/rope.md).

    Example:
        >>> inv_freq, factor = ringattn.rope_frequencies(4, theta=100.0)
        >>> inv_freq.tolist(), factor
        ([1.0, 0.10000000149011612], 1.0)
    """
    if not 0 < as_int(head_dim, "head_dim") <= _MAX_HEAD_DIM:
        refuse(f"head_dim is {shown(head_dim)}", f"it is even, up to {_MAX_HEAD_DIM}", "Check it.")
    like = np.empty((0, 1, head_dim), "float32")
    settings = settings_of(rope_parameters, theta, rotary_dim, head_dim, False, None, None, exact, length)
    prepared = _prepared(_job.world_of(like, None), like, head_dim, settings, 1)
    count = prepared.facts.rotary_dim // 2
    numbers, factor = (ctypes.c_double * count)(), ctypes.c_double()
    prepared.turn.run(lambda: lib.rope_frequencies(prepared.handle, count, numbers, ctypes.byref(factor)))
    return np.array(numbers, "float64" if exact else "float32"), factor.value
