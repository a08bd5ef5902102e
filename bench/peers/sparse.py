#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention by PyTorch's FlexAttention, compiled, on one GPU; and causal attention by the same kernel without
gaps, which says what a touched tile takes there.

    bench/peers/sparse.py --seq 32k,128k --jsonl results.jsonl
    bench/peers/sparse.py --seq 32k --patterns dense,random-10,window-25
    bench/peers/sparse.py --seq 32k --patterns random-10 --write-masks FOLDER   # for ringattn bench --block-mask
    bench/peers/sparse.py --self-check

A pattern says which blocks of 128 queries x 128 keys are listed, under a causal mask; all heads have one list. "dense" lists
every block up to the diagonal, "random-10" about 10 % of them, anywhere, and "window-10" as many beside the diagonal. The
diagonal and the first block are always listed. A line's "density" is the part that is listed indeed, and "ns_per_tile" the
time by listed blocks and query heads. The pattern is a function of the block's place, the same everywhere (`listed`).

--write-masks writes the lists of one length as files that ringattn reads, so that both are measured over the same ones; it
needs neither PyTorch nor a GPU. What doesn't compile in --compile-seconds is left out with a line that says so.
"""

from __future__ import annotations

import json
import math
import pathlib
import signal
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common

SCHEMA = "ringattn.sparse/1"
BLOCK = 128
KINDS = ("random", "window")
PATTERNS = "dense,random-10,random-25,random-50,window-10,window-25,window-50"


@dataclass(frozen=True)
class Pattern:
    kind: str
    part: float  # of the blocks up to the diagonal

    @property
    def name(self) -> str:
        return self.kind if self.kind == "dense" else f"{self.kind}-{round(100 * self.part)}"


def parse_pattern(text: str) -> Pattern:
    """Raises ValueError."""
    if text == "dense":
        return Pattern("dense", 1.0)
    kind, _, percent = text.partition("-")
    if kind not in KINDS or not percent.isdigit() or not 1 <= int(percent) <= 99:
        raise ValueError(f'"{text}" is no pattern such as dense, random-10 or window-25')
    return Pattern(kind, int(percent) / 100)


def scatter(row: int, column: int) -> float:
    """A number in [0, 1) that two places hardly share."""
    mixed = (row * 0x9E3779B1 + column * 0x85EBCA77 + 0xC2B2AE3D) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ mixed >> shift) * factor) & 0xFFFFFFFF
    return (mixed ^ mixed >> 16) / 2**32


def mask_row(pattern: Pattern, row: int, rows: int) -> list[int]:
    """The blocks of keys, ascending, that a block of queries lists."""
    if pattern.kind == "dense":
        return list(range(row + 1))
    if pattern.kind == "window":
        # As wide that the band over all rows is the part of the triangle.
        width = max(1, round(rows * (1 - math.sqrt(1 - pattern.part))))
        return sorted({0, *range(max(0, row - width + 1), row + 1)})
    return [column for column in range(row + 1) if column in (0, row) or scatter(row, column) < pattern.part]


def block_mask_rows(pattern: Pattern, seq: int) -> list[list[int]]:
    rows = seq // BLOCK
    return [mask_row(pattern, row, rows) for row in range(rows)]


def write_mask(path: pathlib.Path, lists: list[list[int]]) -> None:
    """The lists as ringattn's --block-mask reads them: block_mask, U8 [1, rows, rows], in a safetensors file."""
    rows = len(lists)
    mask = bytearray(rows * rows)
    for row, columns in enumerate(lists):
        for column in columns:
            mask[row * rows + column] = 1
    tensor = {"dtype": "U8", "shape": [1, rows, rows], "data_offsets": [0, rows * rows]}
    blocks = {"query_block": str(BLOCK), "key_block": str(BLOCK)}
    header = json.dumps({"__metadata__": blocks, "block_mask": tensor}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + mask)


def causal(_: Any, __: Any, query: Any, key: Any) -> Any:
    """Of the blocks on the diagonal. One function, so that nothing is compiled anew for each pattern."""
    return query >= key


def block_mask(torch: Any, lists: list[list[int]], device: Any) -> Any:
    """FlexAttention's own form: of each row the blocks that need a mask, and those that don't."""
    from torch.nn.attention.flex_attention import BlockMask

    rows = len(lists)

    def tables(chosen: Callable[[int, int], bool]) -> tuple[Any, Any]:
        counts = torch.zeros(1, 1, rows, dtype=torch.int32)
        indices = torch.zeros(1, 1, rows, rows, dtype=torch.int32)
        for row, columns in enumerate(lists):
            kept = [column for column in columns if chosen(row, column)]
            counts[0, 0, row] = len(kept)
            indices[0, 0, row, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        return counts.to(device), indices.to(device)

    masked = tables(lambda row, column: row == column)
    whole = tables(lambda row, column: row != column)
    return BlockMask.from_kv_blocks(*masked, *whole, BLOCK_SIZE=BLOCK, mask_mod=causal)


def inputs(world: common.World, shape: common.Shape, seed: int) -> list[Any]:
    """q, k, v: [batch, heads, tokens, dim]."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [common.random_rows(world, shape, shape.seq, count, shape.head_dim, seed + at) for at, count in enumerate(heads)]


class Deadline:
    """Raises TimeoutError in whatever Python runs after so many seconds."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._ring)
        signal.alarm(self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)

    def _ring(self, _: int, __: types.FrameType | None) -> None:
        raise TimeoutError(f"it did not compile in {self.seconds} s")


def measure(
    world: common.World, attend: Callable[[], object], shape: common.Shape, samples: int | None, compile_seconds: int
) -> dict[str, Any]:
    """The measured members of a line; of what can't be compiled or run, why."""
    try:
        with Deadline(compile_seconds):
            attend()
            if world.on_gpu:
                world.torch.cuda.synchronize()
    except Exception as error:  # a compiler raises what it likes
        return {"error": common.reason(error)}
    return common.measured(world, shape, samples, attend)


def line(world: common.World, pattern: Pattern, shape: common.Shape, tiles: int, found: dict[str, Any]) -> dict[str, Any]:
    """`tiles`: blocks that a head's list has. Rates by the pairs of whole lists make no sense here and are left out."""
    rows = shape.seq // BLOCK
    told = {name: value for name, value in found.items() if name in ("error", "samples", "ms", "memory_peak_bytes")}
    ms = (found.get("ms") or {}).get("median")
    return {
        "schema": SCHEMA,
        "tool": {"name": "flex attention", "version": world.torch.__version__},
        "argv": sys.argv,
        "git": common.git_revision(),
        "devices": world.devices(),
        "kernel": "triton",
        "job": shape.as_json(),
        "pattern": pattern.name,
        "block": BLOCK,
        "tiles": tiles,
        "density": tiles / (rows * (rows + 1) / 2),
        "ms": None,
        **told,
        "ns_per_tile": ms and ms * 1e6 / (tiles * shape.heads * shape.batch),
    }


def self_check(world: common.World) -> int:
    """FlexAttention has our lists; where there is a GPU it follows them, too, compared with the same lists as a plain mask.
    Only its compiled form does: the other one looks at the mask alone."""
    from torch.nn.attention.flex_attention import flex_attention

    torch = world.torch
    shape = common.Shape(6 * BLOCK, 1, 4, 2, 64, 64, "bf16" if world.on_gpu else "fp32", "causal")
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True) if world.on_gpu else flex_attention
    q, k, v = inputs(world, shape, 1)
    good = True
    for pattern in map(parse_pattern, ("dense", "random-25", "window-25")):
        lists = block_mask_rows(pattern, shape.seq)
        mask = block_mask(torch, lists, world.device)
        wanted = torch.zeros(len(lists), len(lists), dtype=torch.bool, device=world.device)
        for row, columns in enumerate(lists):
            wanted[row, columns] = True
        wrong = (mask.to_dense()[0, 0].bool() != wanted).sum()
        good &= common.judge(world, f"block mask, {pattern.name}", float(wrong), shape.dtype)
        if pattern.kind != "dense" and not world.on_gpu:
            continue
        visible = wanted.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1).tril()
        scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(shape.head_dim)
        exact = scores.masked_fill(~visible, -math.inf).softmax(3) @ v.double().repeat_interleave(2, 1)
        found = attend(q, k, v, block_mask=mask, enable_gqa=True)
        error = (found.double() - exact).abs().max()
        good &= common.judge(world, f"flex attention, {pattern.name}", float(error), shape.dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    common.add_job_flags(parser, "32k,128k")
    parser.add_argument("--patterns", default=PATTERNS, help="[%(default)s]")
    parser.add_argument("--write-masks", metavar="FOLDER", help="write PATTERN.safetensors for each pattern there, and stop")
    parser.add_argument("--compile-seconds", type=int, default=120, help="of each shape, at most [%(default)s]")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or 1
    try:
        patterns = [parse_pattern(text) for text in arguments.patterns.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if arguments.mask != "causal" or any(seq % BLOCK for seq in arguments.seq):
        parser.error(f"the patterns are causal, over whole blocks of {BLOCK} tokens")
    if arguments.write_masks:
        if len(arguments.seq) != 1:
            parser.error("--write-masks takes one length, whose masks the folder has")
        folder = pathlib.Path(arguments.write_masks)
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in patterns:
            write_mask(folder / f"{pattern.name}.safetensors", block_mask_rows(pattern, arguments.seq[0]))
        return 0
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=False)
    torch.set_grad_enabled(False)
    if arguments.self_check:
        return self_check(world)
    from torch.nn.attention.flex_attention import flex_attention

    # Without fullgraph, what can't be compiled would quietly run as a plain computation over all scores.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    with common.open_lines(arguments.jsonl) as file:
        for shape in common.shapes(arguments):
            q, k, v = inputs(world, shape, arguments.seed)
            for pattern in patterns:
                lists = block_mask_rows(pattern, shape.seq)
                mask = block_mask(torch, lists, world.device)
                found = measure(
                    world,
                    lambda: compiled(q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads),
                    shape,
                    arguments.samples,
                    arguments.compile_seconds,
                )
                content = line(world, pattern, shape, sum(map(len, lists)), found)
                print(json.dumps(content), file=file, flush=True)
                told = content.get("error") or f"{content['ns_per_tile']:.1f} ns a tile of a head"
                print(f"# {pattern.name}, {shape.seq}, density {content['density']:.3f}: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
