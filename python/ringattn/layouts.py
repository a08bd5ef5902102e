# SPDX-License-Identifier: Apache-2.0
"""Layouts: which rank holds which tokens. No bit of a result depends on the layout.

layout = ringattn.zigzag([4096, 1000], world=4)
q_mine = ringattn.shard(q, layout, rank)          # rows of the packed q, [tokens, …], or of [batch, tokens, …]
rope(q_mine, ringattn.positions(layout, rank))
whole = ringattn.unshard([out_0, out_1, out_2, out_3], layout)
"""

import ctypes
import functools
import math
import operator
from collections.abc import Sequence

import numpy as np

from . import _structs
from ._errors import refuse
from ._compression import Compressed
from ._arguments import as_int, as_ints, shown
from ._tensors import check_array, is_torch

__all__ = [
    "Layout", "contiguous", "packed", "positions", "segments", "shard", "striped", "super_segments", "unshard",
    "zigzag",
]  # fmt: skip


class Layout:
    """Runs of tokens [begin, end) of sequences for each rank. A rank's rows are these tokens in this order.

    Args:
        lengths: tokens of each sequence.
        runs: runs[rank]: (sequence, begin, end), ascending. Over all ranks the runs cover each token once.

    Raises:
        UsageError: the runs do not ascend, or a token belongs to no rank or to several.

    Example:
        >>> layout = ringattn.Layout([6], [[(0, 0, 2), (0, 4, 6)], [(0, 2, 4)]])
        >>> layout.world, layout.tokens(0), ringattn.positions(layout, 0).tolist()
        (2, 4, [0, 1, 4, 5])
    """

    def __init__(self, lengths: Sequence[int], runs: Sequence[Sequence[tuple[int, int, int]]]):
        self.lengths = tuple(as_ints(lengths))
        index = operator.index  # int() would round 0.5
        try:
            self.runs = tuple(tuple((index(s), index(b), index(e)) for s, b, e in of_rank if e > b) for of_rank in runs)
        except (TypeError, ValueError):
            refuse(f"runs are {shown(runs)}", "each rank has a list of whole numbers (sequence, begin, end)", "Pass such lists.")
        self._key = (self.lengths, self.runs)
        self._check()
        self.text = _text_of(self.lengths, self.runs)
        self._token_indices: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._empty: dict[int, int] | None = None

    def _check(self) -> None:
        for rank, of_rank in enumerate(self.runs):
            for (s, b, e), (t, c, _) in zip(of_rank, of_rank[1:]):
                if (t, c) < (s, e):
                    refuse(f"run {(s, b, e)} of rank {rank} comes before one at {(t, c)}",
                           "runs ascend by sequence and token", "Sort them.")  # fmt: skip
        at = {s: 0 for s in range(len(self.lengths))}
        for s, b, e in sorted(run for of_rank in self.runs for run in of_rank):
            if s not in at or at[s] != b:
                refuse(f"tokens {at.get(s, 0)} to {b} of sequence {s} belong to no rank, or to two",
                       f"the lengths are {list(self.lengths)}", "Deal every token once.")  # fmt: skip
            at[s] = e
        for s, end in at.items():
            if end != self.lengths[s]:
                refuse(
                    f"the runs of sequence {s} end at {end}",
                    f"it has {self.lengths[s]} tokens",
                    "Deal every token once.",
                )

    def __eq__(self, other):
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self):
        return hash(self._key)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.runs)

    def tokens(self, rank: int) -> int:
        """Number of tokens of a rank."""
        return sum(e - b for _, b, e in self.runs[rank])

    def begins(self, rank: int) -> list[int]:
        """The sequences whose first token the rank has. With ssd() the rank passes their initial states. An empty
        sequence begins and ends on the rank of the token before it on the packed axis. If there is none, it is on the
        rank of the token after it, or on rank 0."""
        return sorted([s for s, b, _ in self.runs[rank] if b == 0] + self._empty_sequences(rank))

    def ends(self, rank: int) -> list[int]:
        """The sequences whose last token the rank has. With ssd() the rank gets their final states."""
        return sorted([s for s, _, e in self.runs[rank] if e == self.lengths[s]] + self._empty_sequences(rank))

    def _empty_sequences(self, rank: int) -> list[int]:
        if self._empty is None:
            first = {s: rank for rank, of_rank in enumerate(self.runs) for s, b, _ in of_rank if b == 0}
            last = {s: rank for rank, of_rank in enumerate(self.runs) for s, _, e in of_rank if e == self.lengths[s]}
            owner = first[min(first)] if first else 0
            self._empty = {}
            for s, length in enumerate(self.lengths):
                if length:
                    owner = last[s]
                else:
                    self._empty[s] = owner
        return [s for s, owner in self._empty.items() if owner == rank]

    def token_indices(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(packed token, token in its sequence) of each row of a rank: two int64 arrays [tokens of the rank]."""
        if not 0 <= as_int(rank, "rank") < self.world:
            refuse(f"rank is {rank}", f"the layout has ranks 0 to {self.world - 1}", "Check it.")
        known = self._token_indices.get(rank)
        if known is None:
            begins = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
            of_runs = [np.arange(b, e, dtype=np.int64) for _, b, e in self.runs[rank]]
            firsts = [np.full(e - b, begins[s]) for s, b, e in self.runs[rank]]
            tokens = np.concatenate(of_runs) if of_runs else np.zeros(0, np.int64)
            first = np.concatenate(firsts) if firsts else np.zeros(0, np.int64)
            known = self._token_indices[rank] = (tokens + first, tokens)
        return known

    def c_runs(self):
        """All runs as structs of the library, in order of rank."""
        flat = [_structs.Run(rank, *run) for rank, of_rank in enumerate(self.runs) for run in of_rank]
        return len(flat), ctypes.cast((_structs.Run * max(len(flat), 1))(*flat), ctypes.POINTER(_structs.Run))


def _text_of(lengths, runs) -> str:
    """Lengths and runs as text, sequence:begin:end for each rank. Graphs hold this text, because it has the same
    meaning in any process."""
    parts = [" ".join(map(str, lengths)), *(" ".join(f"{s}:{b}:{e}" for s, b, e in of_rank) for of_rank in runs)]
    return "lengths " + " | ".join(parts)


@functools.lru_cache(256)
def of_text(text: str) -> Layout:
    """The Layout of a text of _text_of()."""
    lengths, *runs = text.removeprefix("lengths").split("|")
    of_ranks = [[tuple(map(int, run.split(":"))) for run in of_rank.split()] for of_rank in runs]
    return Layout(list(map(int, lengths.split())), of_ranks)


# Limits of ranks and of stripes: each one takes time and memory in this process.
_MAX_RANKS, _MAX_STRIPES = 1 << 20, 1 << 24


def _checked_world(world: int) -> int:
    ranks = as_int(world, "world")
    if not 1 <= ranks <= _MAX_RANKS:
        refuse(f"a world of {ranks} ranks is not possible", f"it has 1 to {_MAX_RANKS:,}", "Check it.")
    return ranks


def _check_layout(layout) -> None:
    if not isinstance(layout, Layout):
        refuse(f"layout is {' '.join(shown(repr(layout)).split())}",
               "it should be a ringattn.Layout, which says which rank has which tokens",
               "Make one, such as ringattn.striped([4096], world=2).")  # fmt: skip


def _deal(lengths, world: int, cuts) -> Layout:
    """cuts: of a length, a list of (rank, begin, end). world is checked."""
    runs: list[list] = [[] for _ in range(world)]
    for sequence, length in enumerate(as_ints(lengths)):
        for rank, begin, end in cuts(length):
            of_rank = runs[rank]
            if of_rank and of_rank[-1][0] == sequence and of_rank[-1][2] == begin:
                of_rank[-1] = (sequence, of_rank[-1][1], end)
            elif end > begin:
                of_rank.append((sequence, begin, end))
    return Layout(lengths, runs)


def _parts(length: int, count: int) -> list[int]:
    """Boundaries of `count` nearly equal parts, [count + 1]. The first parts have one token more, as in
    numpy.array_split()."""
    small, more = divmod(length, count)
    return [part * small + min(part, more) for part in range(count + 1)]


def contiguous(lengths: Sequence[int], world: int) -> Layout:
    """Rank r has the r-th of `world` nearly equal parts of each sequence, as in ring_flash_attn's ring functions.

    Args:
        lengths: tokens of each sequence over all ranks.
        world: number of ranks.

    Returns:
        A Layout.

    Raises:
        UsageError: world is below 1 or above 2^20, or a length is no whole number.

    Example:
        >>> ringattn.contiguous([10], 2).runs
        (((0, 0, 5),), ((0, 5, 10),))
    """

    world = _checked_world(world)

    def cuts(length):
        at = _parts(length, world)
        return [(rank, at[rank], at[rank + 1]) for rank in range(world)]

    return _deal(lengths, world, cuts)


def zigzag(lengths: Sequence[int], world: int) -> Layout:
    """Rank r has the parts r and 2 · world − 1 − r of 2 · world nearly equal parts of each sequence, as in ring_flash_attn's
    zigzag functions, Megatron and TransformerEngine.

    Args:
        lengths: tokens of each sequence over all ranks.
        world: number of ranks.

    Returns:
        A Layout.

    Raises:
        UsageError: world is below 1 or above 2^20, or a length is no whole number.

    Example:
        >>> ringattn.zigzag([8], 2).runs
        (((0, 0, 2), (0, 6, 8)), ((0, 2, 6),))
    """

    world = _checked_world(world)

    def cuts(length):
        at = _parts(length, 2 * world)
        return [(min(part, 2 * world - 1 - part), at[part], at[part + 1]) for part in range(2 * world)]

    return _deal(lengths, world, cuts)


def striped(lengths: Sequence[int], world: int, stripe: int = 256) -> Layout:
    """Stripes of `stripe` tokens, distributed to the ranks in snake order (0 1 … P−1 P−1 … 1 0), which continues from sequence to
    sequence. This is the fastest layout for causal masks, because all ranks have equal work in every block. Use longer stripes
    for longer sequences.

    Args:
        lengths: tokens of each sequence over all ranks.
        world: number of ranks.
        stripe: tokens of a stripe.

    Returns:
        A Layout.

    Raises:
        UsageError: world is below 1 or above 2^20, stripe is below 1, there are more than 2^24 stripes, or a length is no whole
            number.

    Example:
        >>> ringattn.striped([1024], 2).runs
        (((0, 0, 256), (0, 768, 1024)), ((0, 256, 768),))
    """
    world, stripe = _checked_world(world), as_int(stripe, "stripe")
    if stripe < 1:
        refuse(f"a stripe of {stripe} tokens is not possible", "it has at least 1", "Choose 256, or a multiple of it.")
    stripes = sum(-(-length // stripe) for length in as_ints(lengths))
    if stripes > _MAX_STRIPES:
        refuse(f"the tokens are {stripes} stripes of {stripe}", f"a layout has at most {_MAX_STRIPES:,}",
               "Check the lengths, or choose longer stripes.")  # fmt: skip
    dealt = 0

    def cuts(length):
        nonlocal dealt
        runs = []
        for begin in range(0, length, stripe):
            place = dealt % (2 * world)
            runs.append((min(place, 2 * world - 1 - place), begin, min(begin + stripe, length)))
            dealt += 1
        return runs

    return _deal(lengths, world, cuts)


def packed(lengths: Sequence[int], world: int) -> Layout:
    """Rank r has the r-th of `world` nearly equal parts of the packed axis, across sequences, as in llama3's context parallelism
    and Hugging Face's adapters.

    Args:
        lengths: tokens of each sequence over all ranks.
        world: number of ranks.

    Returns:
        A Layout.

    Raises:
        UsageError: world is below 1 or above 2^20, or a length is no whole number.

    Example:
        >>> ringattn.packed([6, 2], 2).runs
        (((0, 0, 4),), ((0, 4, 6), (1, 0, 2)))
    """
    world = _checked_world(world)
    at = _parts(sum(as_ints(lengths)), world)
    runs: list[list] = [[] for _ in range(world)]
    first = 0
    for sequence, length in enumerate(as_ints(lengths)):
        for rank in range(world):
            begin, end = max(at[rank], first), min(at[rank + 1], first + length)
            if end > begin:
                runs[rank].append((sequence, begin - first, end - first))
        first += length
    return Layout(lengths, runs)


# Tokens of a super-segment, which layouts of SSM layers must not cut, and of a segment, likewise for gated delta rules.
SUPER_SEGMENT = 65536
SEGMENT = 2048
MAX_UNITS = 1 << 20  # super-segments, or segments, of a job


def super_segments(lengths: Sequence[int], world: int) -> Layout:
    """The default layout of ssd(): each rank has adjacent whole super-segments of 65,536 tokens, balanced by tokens. With fewer
    super-segments than ranks some ranks have none.

    Args:
        lengths: tokens of each sequence over all ranks.
        world: number of ranks.

    Returns:
        A Layout.

    Raises:
        UsageError: world is below 1 or above 2^20, or the sequences have more than 2^20 super-segments.

    Example:
        >>> ringattn.super_segments([100_000], 2).runs
        (((0, 0, 65536),), ((0, 65536, 100000),))
    """
    return _whole_units(lengths, world, SUPER_SEGMENT)


def segments(lengths: Sequence[int], world: int) -> Layout:
    """The default layout of gated_delta(): each rank has adjacent whole segments of 2,048 tokens, balanced by tokens. With fewer
    segments than ranks some ranks have none.

    Args:
        lengths: tokens of each sequence over all ranks.
        world: number of ranks.

    Returns:
        A Layout.

    Raises:
        UsageError: world is below 1 or above 2^20, or the sequences have more than 2^20 segments.

    Example:
        >>> ringattn.segments([5000], 2).runs
        (((0, 0, 2048),), ((0, 2048, 5000),))
    """
    return _whole_units(lengths, world, SEGMENT)


def _whole_units(lengths: Sequence[int], world: int, unit: int) -> Layout:
    world = _checked_world(world)
    given = as_ints(lengths)
    units = sum(-(-length // unit) for length in given)
    if units > MAX_UNITS:
        refuse(f"{sum(given)} tokens are {units} units of {unit:,}", f"a job has at most {MAX_UNITS:,}", "Check the lengths.")
    pieces = [
        (sequence, begin, min(begin + unit, length))
        for sequence, length in enumerate(given)
        for begin in range(0, length, unit)
    ]
    total = sum(end - begin for _, begin, end in pieces)
    runs: list[list] = [[] for _ in range(world)]
    before = 0
    for sequence, begin, end in pieces:
        # Each rank gets the pieces whose middle lies in its share of the tokens.
        rank = min((2 * before + end - begin) * world // max(2 * total, 1), world - 1)
        before += end - begin
        of_rank = runs[rank]
        if of_rank and of_rank[-1][0] == sequence and of_rank[-1][2] == begin:
            of_rank[-1] = (sequence, of_rank[-1][1], end)
        else:
            of_rank.append((sequence, begin, end))
    return Layout(lengths, runs)


BY_NAME = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped, "packed": packed}


def check_name(layout) -> None:
    if layout not in BY_NAME:
        refuse(
            f"layout {layout!r} is not known",
            f"there are {', '.join(BY_NAME)}",
            "Choose one, or make a ringattn.Layout.",
        )


def make_layout(layout, lengths: Sequence[int], world: int) -> Layout:
    """Returns a Layout as it is, or makes the layout of that name."""
    if isinstance(layout, Layout):
        if layout.lengths != tuple(lengths) or layout.world != world:
            refuse(f"the layout is one of lengths {list(layout.lengths)[:8]} over {layout.world} ranks",
                   f"the job has {list(lengths)[:8]} over {world}", "Make it of the job's lengths and world.")  # fmt: skip
        return layout
    check_name(layout)
    return BY_NAME[layout](lengths, world)


def positions(layout: Layout, rank: int) -> np.ndarray:
    """The index of each row of a rank in its sequence, which is the row's RoPE position.

    Args:
        layout: a Layout.
        rank: from 0 on.

    Returns:
        int64 [tokens of the rank].

    Raises:
        UsageError: layout is not a Layout, or has no such rank.

    Example:
        >>> ringattn.positions(ringattn.zigzag([8], 2), 0).tolist()
        [0, 1, 6, 7]
    """
    _check_layout(layout)
    return layout.token_indices(rank)[1]


def _rows(array, layout: Layout) -> int:
    """Number of token axes: 1 for packed arrays [tokens, …], 2 for [batch, tokens, …] with sequences of equal
    length."""
    total = sum(layout.lengths)
    if array.ndim and array.shape[0] == total:
        return 1
    if (
        len(set(layout.lengths)) == 1
        and array.ndim > 1
        and tuple(array.shape[:2]) == (len(layout.lengths), layout.lengths[0])
    ):
        return 2
    refuse(f"an array of shape {tuple(array.shape)} has other tokens than the layout", f"its lengths are {list(layout.lengths)}",
           "Pass [tokens, …] with all sequences packed, or [batch, tokens, …].")  # fmt: skip


def shard(array, layout: Layout, rank: int):
    """A copy of a rank's rows of a whole array.

    Args:
        array: [tokens, …] or [batch, tokens, …], a NumPy array, a PyTorch tensor or a Compressed.
        layout: a Layout of the array's sequences.
        rank: from 0 on.

    Returns:
        [tokens of the rank, …]. From [batch, tokens, …], [batch, tokens of the rank, …] if the rank has the same number of
        tokens of each sequence. From a Compressed, the rank's rows of its streams, with all tables.

    Raises:
        UsageError: the array does not have the tokens of the layout, or layout is not a Layout.

    Example:
        >>> ringattn.shard(np.arange(8), ringattn.zigzag([8], 2), 1).tolist()
        [2, 3, 4, 5]
    """
    _check_layout(layout)
    if isinstance(array, Compressed):
        streams = {name: shard(stream, layout, rank) for name, stream in array.streams.items()}
        shape = *next(iter(streams.values())).shape[:-2], *array.shape[-2:]
        return array.with_streams(streams, shape)
    check_array("array", array, differentiable=True)
    batched = _rows(array, layout) == 2
    flat = array.reshape(-1, *array.shape[2:]) if batched else array
    tokens = layout.token_indices(rank)[0]
    if is_torch(flat):
        import torch  # noqa: PLC0415, only where the array is one of its tensors

        rows = flat[torch.from_numpy(tokens).to(flat.device)]
    else:
        rows = flat[tokens]
    if batched and _equal_counts(layout, rank):
        return rows.reshape(len(layout.lengths), -1, *rows.shape[1:])
    return rows


def _equal_counts(layout: Layout, rank: int) -> bool:
    counts = dict.fromkeys(range(len(layout.lengths)), 0)
    for s, b, e in layout.runs[rank]:
        counts[s] += e - b
    return len(set(counts.values())) == 1


def unshard(shards: Sequence, layout: Layout):
    """Joins the ranks' rows to the whole array.

    Args:
        shards: shards[r] has the rows of rank r, as shard() returns them.
        layout: their Layout.

    Returns:
        [tokens, …], all sequences packed.

    Raises:
        UsageError: there is not one shard for each rank, a shard does not have the rank's number of rows, or layout is not a
            Layout.

    Example:
        >>> layout = ringattn.zigzag([8], 2)
        >>> ringattn.unshard([ringattn.shard(np.arange(8), layout, rank) for rank in range(2)], layout).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    _check_layout(layout)
    if not hasattr(shards, "__len__") or getattr(shards, "ndim", 1) == 0:
        refuse(f"shards are {type(shards).__name__}", "there is one of each rank", "Pass a list.")
    if len(shards) != layout.world:
        refuse(f"there are {len(shards)} shards", f"the layout has {layout.world} ranks", "Pass one of each rank.")
    flat = []
    for rank, rows in enumerate(shards):
        wanted = layout.tokens(rank)
        check_array(f"shard {rank}", rows, differentiable=True)
        if rows.ndim > 1 and rows.shape[0] != wanted:
            rows = rows.reshape(math.prod(rows.shape[:2]), *rows.shape[2:])
        if rows.ndim == 0 or rows.shape[0] != wanted:
            refuse(f"rank {rank} has {rows.shape[0] if rows.ndim else 'no'} rows", f"the layout gives it {wanted}",
                   "Pass them in order of rank.")  # fmt: skip
        flat.append(rows)
    order = np.argsort(np.concatenate([layout.token_indices(rank)[0] for rank in range(layout.world)]))
    if is_torch(flat[0]):
        import torch  # noqa: PLC0415, only where the shards are its tensors

        return torch.cat(flat)[torch.from_numpy(order).to(flat[0].device)]
    return np.concatenate(flat)[order]
