# SPDX-License-Identifier: Apache-2.0
"""Moves rows from one layout to another, between layers that distribute tokens differently, such as attention and a scan.

    x = ringattn.reshard(x, "zigzag", ringattn.segments(lengths, world.size), world=world)"""

import math

import numpy as np

from . import _gradients, _job, _structs
from ._arguments import refuse_unknown, shown
from ._errors import refuse
from ._loaded_torch import loaded_torch
from ._tensors import empty, is_contiguous, traced, type_name
from .layouts import BY_NAME, Layout, segments, super_segments
from .worlds import World

_NAMED = BY_NAME | {"segments": segments, "super_segments": super_segments}


class Reshard(_job.Prepared):
    """A prepared reshard. reshard() keeps such objects. Creating one is collective."""

    op = "reshard"


def layouts_of(from_layout, to_layout, ranks: int) -> tuple[Layout, Layout]:
    """Both layouts as a Layout. One of them may be a name; it then gets the lengths of the other."""
    named = {"from_layout": from_layout, "to_layout": to_layout}
    whole = next((layout for layout in named.values() if isinstance(layout, Layout)), None)
    made = []
    for name, layout in named.items():
        if isinstance(layout, Layout):
            if layout.world != ranks:
                refuse(f"{name} is a layout of {layout.world} ranks", f"the world has {ranks}", "Make it for the world's ranks.")
        elif not isinstance(layout, str) or layout not in _NAMED:
            refuse(f"{name} is {shown(repr(layout))}", f"it is a ringattn.Layout, or the name of one: {', '.join(_NAMED)}",
                   "Make one, such as ringattn.zigzag(lengths, ranks).")  # fmt: skip
        elif whole is None:
            refuse(f"from_layout is {from_layout!r} and to_layout {shown(repr(to_layout))}", "names have no lengths of sequences",
                   "Pass a ringattn.Layout for one of them.")  # fmt: skip
        else:
            layout = _NAMED[layout](whole.lengths, ranks)  # noqa: PLW2901
        made.append(layout)
    before, after = made
    if before.lengths != after.lengths:
        refuse(f"from_layout has lengths {shown(list(before.lengths))} and to_layout {shown(list(after.lengths))}",
               "both deal the tokens of one batch", "Make both of the same lengths.")  # fmt: skip
    return before, after


def check_rows(x, before: Layout, rank: int) -> None:
    if x.ndim < 1 or x.shape[0] != before.tokens(rank):
        refuse(f"x is {list(x.shape)}", f"rank {rank} has {before.tokens(rank)} tokens of from_layout",
               "Pass [tokens, …], this rank's rows of all sequences.")  # fmt: skip


def _as_bytes(rows):
    """Contiguous rows of any type, as uint8 [tokens, bytes]; a view."""
    flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    return flat.view(np.uint8 if isinstance(rows, np.ndarray) else loaded_torch().uint8)


def move(x, before: Layout, after: Layout, world: World, timeout: float, out=None):
    """x in the layout `after`. All arguments are checked."""
    width = math.prod(x.shape[1:]) * (x.itemsize if isinstance(x, np.ndarray) else x.element_size())
    if width == 0:
        refuse(f"x is {list(x.shape)}", "its rows have no elements", "Pass rows that have some.")

    def make():
        (from_count, from_runs), (to_count, to_runs) = before.c_runs(), after.c_runs()
        spec = _structs.reshard_spec(token_bytes=width, sequences=len(before.lengths), lengths=_job.longs(before.lengths),
                                     from_run_count=from_count, from_runs=from_runs, to_run_count=to_count,
                                     to_runs=to_runs)  # fmt: skip
        return Reshard(world, spec, _job.run_options(timeout_seconds=timeout))

    prepared = world.prepared(("reshard", before, after, width, timeout), make)
    made = empty(x, (after.tokens(world.rank), *x.shape[1:])) if out is None else out
    rows = np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()
    prepared._do(x, {"x": _as_bytes(rows), "y": _as_bytes(made)})
    return made


@traced
def reshard(x, from_layout, to_layout, *, world: World | None = None, out=None, timeout: float = 60.0, **unknown):
    """Moves the rows of all tokens from one layout to another, for instance from the layout of attention to that of a scan.
    Collective with several ranks.

    Args:
        x: this rank's rows in from_layout, [tokens, …] of any type, with all sequences packed.
        from_layout, to_layout: Layouts of the same lengths over the ranks of `world`. One of them may be a name: "contiguous",
            "zigzag", "striped", "packed", "segments" or "super_segments".
        world: the ranks. None: only this rank.
        out: contiguous, of the result's shape and dtype. None: a new array.
        timeout: seconds to wait for a peer without heartbeats.

    Returns:
        This rank's rows in to_layout, [tokens, …], with x's dtype. Rows are copied as bytes, so a stack of layers has the same
        bits on any number of ranks. The gradient of x is the reshard back.

    Raises:
        CallError: a keyword is unknown.
        UsageError: the layouts differ in ranks or lengths, or x does not have this rank's rows of from_layout.
        UnsupportedError: the ranks' layouts or rows do not match.
        PeerError: another rank failed.

    Example:
        >>> zigzag, segments = ringattn.zigzag([8], 2), ringattn.contiguous([8], 2)
        >>> x = np.arange(8)
        >>> parts = ringattn.run_ranks(2, lambda world: ringattn.reshard(
        ...     ringattn.shard(x, zigzag, world.rank), zigzag, segments, world=world).tolist())
        >>> parts
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if unknown:
        refuse_unknown("reshard", unknown)
    _job.check_arrays("reshard", {"x": x}, out=out)
    _gradients.refuse_transforms((x, out))
    world = _job.world_of(x, world)
    before, after = layouts_of(from_layout, to_layout, world.size)
    check_rows(x, before, world.rank)
    wanting = _gradients.requiring({"x": x})
    if wanting is not None:
        _gradients.check_out(wanting, out)
        from . import torch_ops  # noqa: PLC0415, needs torch

        return torch_ops.recorded_reshard(x, before, after, world, timeout)
    if out is not None:
        wanted = [after.tokens(world.rank), *x.shape[1:]]
        if list(out.shape) != wanted or out.dtype != x.dtype:
            refuse(f"out is {type_name(out.dtype)} {list(out.shape)}", f"the result is {type_name(x.dtype)} {wanted}",
                   "Pass one of that shape and type, or none.")  # fmt: skip
        if not is_contiguous(out):
            refuse("out is not contiguous", "rows are copied as bytes", "Pass a contiguous one, or none.")
    return move(x, before, after, world, timeout, out)
