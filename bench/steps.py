#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding steps out of files of lines (schema "ringattn.decode/1", of decode_gpu_bench and bench/peers/decode.py): ours beside
the peers, in microseconds.

    bench/steps.py bench/results/nvidia-h200/*-decode*.jsonl
    bench/steps.py --need cuDNN=1.0 lines.jsonl       # code 1 where we take longer than that part of a peer's time
    bench/steps.py --goals lines.jsonl                # code 1 where we miss the part of cuDNN's time that we want to keep to

What was measured several times in one file, in turn with others, counts as the median of these readings. Of several files that
have a point the last one counts; but ours stays with the peers that it took turns with. Of the forms that a peer was asked in,
the fastest counts. Ours is the one that chose its form and its kernel itself; --forms shows the forced ones, too."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import points
from aliases import modern

SCHEMA = "ringattn.decode/1"
FAR_BEYOND_CACHE = 512 << 20  # bytes read between two uses of a cache, at least
CUDNN, FLASH, FLASH_MLA = "cuDNN", "FlashAttention-2", "FlashMLA"
USUAL = ("sm90_attention", "sm90_mla")  # ours that are chosen where none is named; by others, steps have forms of their own
NAMES = {"cudnn": CUDNN, "flash_attention_2": FLASH, "flash_mla": FLASH_MLA, "math": "math"}
PEERS = (CUDNN, FLASH)
# The part of cuDNN's time that a step of bf16, 32/8 heads of 128 must keep to, by sequences and keys.
GOALS = {
    (1, 1 << 10): 6.5 / 7.8,
    (1, 4 << 10): 9.5 / 11.8,
    (1, 16 << 10): 21 / 23.8,
    (1, 64 << 10): 67 / 69.4,
    (1, 128 << 10): 127 / 129,
    (1, 1 << 20): 955 / 946,
    (32, 1 << 10): 39 / 40.1,
    (32, 4 << 10): 1.0,
    (32, 16 << 10): 1.0,
}


@dataclass(frozen=True, order=True)
class Step:
    """What makes points comparable."""

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    rows: int
    page_size: int  # 0: a dense cache
    batch: int
    keys: int

    @property
    def kind(self) -> str:
        """Everything but the batch and the keys: "bf16, 32/8 heads of 128, 4 rows, pages of 64"."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        text = f"{self.dtype}, {self.heads}/{self.kv_heads} heads of {dims}"
        text += f", {self.rows} rows" if self.rows > 1 else ""
        return text + (f", pages of {self.page_size}" if self.page_size else "")

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.batch} x {points.size(self.keys)}"

    @property
    def key_bytes(self) -> int:
        """K and V of one key of all heads."""
        return self.kv_heads * (self.head_dim + self.head_dim_v) * {"bf16": 2, "fp16": 2}[self.dtype]

    @property
    def read_bytes(self) -> int:
        """K and V that a step reads."""
        return self.batch * self.keys * self.key_bytes

    @property
    def cache_bytes(self) -> int:
        """Of one cache: in whole pages."""
        page = self.page_size or 1
        return self.batch * -(-self.keys // page) * page * self.key_bytes

    @property
    def goal(self) -> float | None:
        reach = self.kind == "bf16, 32/8 heads of 128"
        return GOALS.get((self.batch, self.keys)) if reach else None


@dataclass(frozen=True)
class Reading:
    who: str
    form: str
    step: Step
    us: float | None  # None: see error
    error: str


Readings = dict[tuple[str, str, Step], Reading]  # by who, form and step


def parse(line: dict[str, Any]) -> Reading:
    job = line["job"]
    numbers = {name: points.as_count(job[name], 1) for name in ("batch", "keys", "rows", "heads", "kv_heads")}
    numbers |= {name: points.as_count(job[name], 1) for name in ("head_dim", "head_dim_v")}
    step = Step(**numbers, page_size=points.as_count(job["page_size"], 0), dtype=points.as_text(job["dtype"]))
    tool, kernel = points.as_text(line["tool"]["name"]), points.as_text(line["kernel"])
    caches, launches = points.as_count(line["caches"], 1), points.as_count(line["launches"], 1)
    if caches * step.cache_bytes < FAR_BEYOND_CACHE or launches % caches:
        raise ValueError(f"{launches} launches over {caches} caches find parts of them in the L2 cache")
    us = None if line["us"] is None else points.as_figure(line["us"]["median"])
    error = "" if us is not None else points.as_text(line["error"])
    form = points.as_text(line["form"])
    if tool != points.OURS:
        return Reading(NAMES[kernel], form, step, us, error)
    return Reading(tool, form if kernel in USUAL else f"{kernel}, {form}" if form else kernel, step, us, error)


def read_lines(lines: Iterable[dict[str, Any]]) -> Readings:
    """One reading of each who, form and step: the median of its lines; lines of other schemas are left out."""
    found: dict[tuple[str, str, Step], list[Reading]] = {}
    for line in lines:
        if line.get("schema") == SCHEMA:
            reading = parse(line)
            found.setdefault((reading.who, reading.form, reading.step), []).append(reading)
    return {key: typical(several) for key, several in found.items()}


def typical(several: list[Reading]) -> Reading:
    times = [reading.us for reading in several if reading.us is not None]
    if not times:
        return several[-1]
    last = next(reading for reading in reversed(several) if reading.us is not None)
    return Reading(last.who, last.form, last.step, statistics.median(times), "")


def read_file(path: str) -> Readings:
    try:
        with open(path, encoding="utf-8") as file:
            texts = file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise points.BadLine(f"{path} can't be read ({error})") from error
    lines = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            lines.append(modern(json.loads(text)))
            read_lines(lines[-1:])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise points.BadLine(f"line {number} of {path} is no whole step ({type(error).__name__}: {error})") from error
    return read_lines(lines)


def read(paths: Iterable[str]) -> Readings:
    """Of all files. A peer's step stands as the last file with it has it, with all forms there, and ours so in each form; but
    where ours was measured in turn with peers, it stays until another file has both."""
    found: Readings = {}
    for path in paths:
        newer = read_file(path)
        stays = with_peers(found) - with_peers(newer)
        again = {(who, step) for who, _, step in newer if who != points.OURS}
        kept = {key: one for key, one in found.items() if (key[0], key[2]) not in again}
        found = kept | {key: one for key, one in newer.items() if key not in kept or key[2] not in stays}
    return found


def with_peers(readings: Readings) -> set[Step]:
    """The steps that have both ours and a peer's."""
    ours, theirs = ({step for who, _, step in readings if (who == points.OURS) == mine} for mine in (True, False))
    return ours & theirs


def table(readings: Readings) -> dict[tuple[str, Step], Reading]:
    """By who and step: ours in the form that it chose, and the fastest of each peer's."""
    shown: dict[tuple[str, Step], Reading] = {}
    for (who, form, step), reading in readings.items():
        if who == points.OURS:
            if not form:
                shown[who, step] = reading
            continue
        best = shown.get((who, step))
        if best is None or best.us is None or (reading.us is not None and reading.us < best.us):
            shown[who, step] = reading
    return shown


def ratio(shown: dict[tuple[str, Step], Reading], who: str, step: Step) -> float | None:
    """Our time as a part of theirs."""
    return ours_of_theirs(shown.get((points.OURS, step)), shown.get((who, step)))


def ours_of_theirs(ours: Reading | None, theirs: Reading | None) -> float | None:
    """Below 1 we are faster."""
    if not ours or not theirs or not ours.us or not theirs.us:
        return None
    return ours.us / theirs.us


def figure(reading: Reading | None) -> str:
    """Three digits that mean something."""
    if reading is None:
        return "—"
    if reading.us is None:
        return "can't"
    return f"{reading.us:.1f}" if reading.us < 99.95 else f"{reading.us:.0f}"


def as_text(readings: Readings, forms: bool) -> str:
    shown = table(readings)
    cells = [["step", points.OURS, *PEERS, *(f"/ {peer}" for peer in PEERS), "goal", "/ dense", "GB/s"]]
    for step in sorted({step for _, step in shown}):
        ours = shown.get((points.OURS, step))
        goal = f"{step.goal:.3f}" if step.goal else "—"
        parts = [ratio(shown, peer, step) for peer in PEERS]
        rate = f"{step.read_bytes / ours.us * 1e-3:.0f}" if ours and ours.us else "—"
        whole = shown.get((points.OURS, dataclasses.replace(step, page_size=0))) if step.page_size else None
        parts.append(ours.us / whole.us if ours and ours.us and whole and whole.us else None)
        told = [f"{part:.3f}" if part else "—" for part in parts]
        told.insert(-1, goal)
        cells.append([step.name, figure(ours), *(figure(shown.get((peer, step))) for peer in PEERS), *told, rate])
    if forms:
        for (who, form, step), reading in sorted(readings.items(), key=lambda item: (item[0][2], item[0][:2])):
            cells.append([f"{step.name}: {who}, {form or 'auto'}", figure(reading), *[""] * 7])
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def parse_need(text: str) -> tuple[str, float]:
    name, _, most = text.rpartition("=")
    try:
        if name not in PEERS:
            raise ValueError(name)
        return name, points.as_figure(float(most))
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is no "PEER=RATIO", the peer {" or ".join(PEERS)}') from None


def misses(shown: dict[tuple[str, Step], Reading], peer: str, most: float | None) -> list[str]:
    """Where ours takes more than `most` of a peer's time, or without it more than the goal; no such point is a miss, too."""
    wanted = {step: step.goal if most is None else most for who, step in shown if who == peer}
    wanted = {step: limit for step, limit in wanted.items() if limit is not None and shown[peer, step].us is not None}
    if not wanted:
        return [f"no step that counts was measured for {peer}"]
    found = []
    for step, limit in sorted(wanted.items()):
        part = ratio(shown, peer, step)
        if part is None or part > limit:
            told = "ours was not measured" if part is None else f"{part:.3f} of the time of {peer}"
            found.append(f"{step.name}: {told}, at most {limit:.3f} is wanted")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files of lines, ours and peers' in any order")
    parser.add_argument("--forms", action="store_true", help="each form of each step, too")
    parser.add_argument("--need", metavar="PEER=RATIO", type=parse_need, action="append", default=[])
    parser.add_argument("--goals", action="store_true")
    arguments = parser.parse_args()
    try:
        readings = read(arguments.files)
    except points.BadLine as error:
        print(f"error: {error}.", file=sys.stderr)
        return 3
    if not readings:
        print(f"error: no line has the schema {SCHEMA}. Add a file of bench/run.sh decode.", file=sys.stderr)
        return 3
    print(as_text(readings, arguments.forms))
    for reading in readings.values():
        if reading.us is None:
            print(f"# {reading.who}, {reading.form or 'auto'}, {reading.step.name}: {reading.error}", file=sys.stderr)
    shown = table(readings)
    wrong = [text for peer, most in arguments.need for text in misses(shown, peer, most)]
    if arguments.goals:
        wrong += misses(shown, CUDNN, None)
    for text in wrong:
        print(f"too slow: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
