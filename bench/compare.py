#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our figures beside theirs: each of our points with every peer's at the same job on as many ranks, and the ratio.

    bench/compare.py bench/results/nvidia-h200-x4/*.jsonl
    bench/compare.py --markdown ours.jsonl peers.jsonl > table.md
    bench/compare.py --need "pytorch sdpa flash_attention_2=1.0" *.jsonl      # code 1 where we are slower than that peer

A ratio above 1 is ours being faster. "compute only" is our own computation without transfers: the ratio to it is the part
of the time in which ranks compute. "one run" is a job that `ringattn run` ran once. What was measured several times is
shown as it was measured last: of the files that have it the last one, in the order given, and of that file the last line;
FlashAttention-3 by the faster of its assemblers in that file. A line on stderr for each file says which of its lines are
left out, and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass

import points
from points import File, Point


@dataclass(frozen=True)
class Row:
    ours: Point
    theirs: Point | None

    @property
    def ratio(self) -> float | None:
        if self.theirs is None or not self.theirs.tflops:
            return None
        return (self.ours.tflops or 0.0) / self.theirs.tflops  # what we can't do and they can misses every need

    def cells(self) -> list[str]:
        job = self.ours.job
        batch = f" x {job.batch}" if job.batch > 1 else ""
        cells = [job.kind, points.size(job.seq) + batch, str(self.ours.world), self.ours.name, rate(self.ours)]
        if self.theirs is None:
            return [*cells, "no peer", "-", "-"]
        return [*cells, self.theirs.name, rate(self.theirs), "-" if self.ratio is None else f"{self.ratio:.3f}"]


HEAD = ["job", "length", "ranks", "ours", "TFLOP/s", "theirs", "TFLOP/s", "ours/theirs"]


def rate(point: Point) -> str:
    """Three digits that mean something, on a GPU and on a CPU."""
    if point.tflops is None:
        return f"can't ({point.error})" if point.error else "-"
    return f"{point.tflops:.1f}" if point.tflops >= 10 else f"{point.tflops:.4f}"


def pair(found: list[Point]) -> list[Row]:
    rows = []
    ours = [point for point in found if point.ours]
    for mine in sorted(ours, key=lambda point: (point.job.kind, point.world, point.job.seq, point.name)):
        same = [p for p in found if not p.ours and p.world == mine.world and p.job == mine.job]
        # A compute-only run is compared with the whole run of the same transport, blocks and layout.
        compute_only = dataclasses.replace(mine, mode="compute").key if mine.mode == "whole" else None
        same = [p for p in same if p.mode == "whole" or p.key == compute_only]
        for theirs in sorted(same, key=lambda point: point.name):
            rows.append(Row(mine, theirs))
        if not same:
            rows.append(Row(mine, None))
    return rows


def as_text(rows: list[Row]) -> str:
    cells = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def as_markdown(rows: list[Row]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def parse_need(text: str) -> tuple[str, float]:
    name, _, least = text.rpartition("=")
    try:
        return name, points.as_figure(float(least))
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is no "PEER=RATIO"') from None


def misses(rows: list[Row], name: str, least: float) -> list[str]:
    """What `--need` finds wrong; a peer that nobody measured is wrong too."""
    seen = [row for row in rows if row.theirs is not None and name in row.theirs.name and row.ratio is not None]
    if not seen:
        return [f"no point has a peer named {name}"]
    return [
        f"{row.ours.job.kind}, {points.size(row.ours.job.seq)} on {row.ours.world}: "
        f"{row.ratio:.3f} of {row.theirs.name}, at least {least:g} is needed"
        for row in seen
        if row.ratio < least
    ]


def leave_out_unpaired(files: list[File], rows: list[Row]) -> None:
    shown = {point for row in rows for point in (row.ours, row.theirs)}
    for file in files:
        alone = sum(point not in shown for point in file.points.values())
        if alone:
            file.left_out["of peers or of compute only, with none of ours beside them"] += alone


def contents(files: list[File]) -> str:
    """What files hold that have nothing of ours."""
    kinds = Counter(f"points of {point.tool}" for file in files for point in file.points.values())
    for file in files:
        kinds.update(file.others)
        kinds.update(file.left_out)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no lines"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files of lines, ours and peers' in any order")
    parser.add_argument("--markdown", action="store_true", help="a table for a page, instead of one for a terminal")
    parser.add_argument(
        "--need", metavar="PEER=RATIO", type=parse_need, action="append", default=[], help="fail below this ratio to a peer"
    )
    arguments = parser.parse_args()
    try:
        files = points.read_files(arguments.files)
    except points.BadLine as error:
        print(f"error: {error}.", file=sys.stderr)
        return 3
    rows = pair([point for file in files for point in file.points.values()])
    if not rows:
        why = f"no tool is named {points.OURS}; there are {contents(files)}"
        print(f"error: no line is ours ({why}). Add a file of ringattn bench.", file=sys.stderr)
        return 3
    print(as_markdown(rows) if arguments.markdown else as_text(rows))
    leave_out_unpaired(files, rows)
    for note in filter(None, (file.note() for file in files)):
        print(f"# {note}", file=sys.stderr)
    if any("measured again" in why for file in files for why in file.left_out):
        print("# what was measured again is shown as the last file has it, in the order given, in its last line", file=sys.stderr)
    wrong = [text for name, least in arguments.need for text in misses(rows, name, least)]
    for text in wrong:
        print(f"too slow: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
