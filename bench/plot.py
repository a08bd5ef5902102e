#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws benchmarks: speed against length, scaling over ranks, error against bytes, what each rank did when.

    bench/plot.py speed bench/results/nvidia-h200-x4/*.jsonl -o speed.svg
    bench/plot.py scaling bench/results/nvidia-h200/*.jsonl -o scaling.svg    # TFLOP/s per rank, relative to one rank
    bench/plot.py compression bench/results/compression.jsonl -o compression.svg  # lines of bench/compression.py
    ringattn run --trace trace.json ... && bench/plot.py timeline trace.json -o timeline.svg

Pictures are SVG, legible on light and on dark pages; nothing but Python is needed. The pictures of the README are drawn by
bench/tables.py, from the results that it shows.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import points
import svg
from aliases import modern
from points import Job, Point


def speed_series(found: list[Point]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """For each kind of job, for each who measured: (length, TFLOP/s per rank), ascending."""
    kinds: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in found:
        if point.tflops is not None and point.job.seq:
            ranks = f", {point.world} ranks" if point.world > 1 else ""
            kinds[point.job.kind][point.name + ranks].append((point.job.seq, point.tflops))
    return {kind: {name: sorted(line) for name, line in sorted(series.items())} for kind, series in sorted(kinds.items())}


def scaling_series(found: list[Point]) -> dict[str, list[tuple[int, float]]]:
    """For each job and tool that was also measured on one rank: (ranks, rate of a rank over the rate of one alone)."""
    worlds: dict[tuple[Job, str, str, str, str], dict[int, float]] = defaultdict(dict)
    alone: dict[tuple[Job, str, str], float] = {}
    for point in found:
        if point.tflops is None or point.mode != "whole":
            continue
        if point.world == 1:
            if not point.form or (point.job, point.tool, point.kernel) not in alone:
                alone[(point.job, point.tool, point.kernel)] = point.tflops
        else:
            worlds[(point.job, point.tool, point.kernel, point.transport, point.form)][point.world] = point.tflops
    series = {}
    for (job, tool, kernel, transport, form), rates in worlds.items():
        base = alone.get((job, tool, kernel))
        if base:
            name = f"{tool} {kernel}, {transport}{form}, {points.size(job.seq)}, {job.kind}"
            series[name] = [(1, 1.0), *sorted((ranks, rate / base) for ranks, rate in rates.items())]
    return dict(sorted(series.items()))


def compression_series(lines: list[dict]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """For each kind of data, for each method: (bytes per token and head, correct bits of O), ascending. A format by
    its words belongs to the method that its first word names."""
    kinds: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.get("what") == "compression":
            kinds[line["data"]][line["method"].split()[0]].append((line["bytes"], max(0.0, -math.log2(line["change_of_o"]))))
    return {kind: {name: sorted(series) for name, series in methods.items()} for kind, methods in kinds.items()}


DATA = {"normal": "Gaussian data", "outliers": "data with outlier channels"}  # of bench/compression.py


def draw_compression(kinds: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    panels = []
    for kind, methods in kinds.items():
        lines = tuple(svg.Line(name, tuple(series)) for name, series in methods.items())
        ticks = tuple((count, str(count)) for count in (16, 32, 64, 128, 256))
        title = f"KV compression, {DATA.get(kind, kind)}"
        subtitle = "accuracy of O: -log2 of its relative RMS error (one bit: half the error; 0: as large as O)"
        x_label = "bytes per token and head (uncompressed: 256)"
        panels.append(svg.Chart(title, subtitle, x_label, ticks, lines, "correct bits of O"))
    told = "; ".join(DATA.get(kind, kind) for kind in kinds)
    return svg.charts(f"Accuracy of O against bytes of the KV cache: {told}", panels)


def timeline_bars(trace: dict) -> tuple[list[str], list[tuple[int, str, float, float]]]:
    """The ranks' names, and (rank, lane, begin, duration) in milliseconds of each bar that lasts."""
    names: dict[int, str] = {}
    bars = []
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["dur"] > 0:
            bars.append((event["pid"], event["cat"], event["ts"] / 1e3, event["dur"] / 1e3))
    return [names[rank] for rank in sorted(names)], bars


def lengths_of(lines: Mapping[str, Sequence[tuple[int, float]]]) -> tuple[tuple[float, str], ...]:
    """Ticks for lengths: all powers of two from the shortest to the longest, and nothing else."""
    lengths = [length for length, _ in chain.from_iterable(lines.values())]
    powers = [1 << power for power in range(max(lengths).bit_length()) if min(lengths) <= 1 << power]
    return tuple((length, points.size(length)) for length in powers or [min(lengths)])


def speed_chart(
    title: str, subtitle: str, lines: Mapping[str, Sequence[tuple[int, float]]], y_label: str = "TFLOP/s"
) -> svg.Chart:
    """Rates against length, the lines in order of importance."""
    drawn = tuple(svg.Line(name, tuple(line)) for name, line in lines.items())
    return svg.Chart(title, subtitle, "sequence length (tokens)", lengths_of(lines), drawn, y_label)


def draw_speed(kinds: dict[str, dict[str, list[tuple[int, float]]]]) -> str:
    def ours_first(lines: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
        return dict(sorted(lines.items(), key=lambda line: not line[0].startswith(points.OURS)))

    panels = [speed_chart(kind, "", ours_first(lines), "TFLOP/s per rank") for kind, lines in kinds.items()]
    return svg.charts("Speed against length: " + "; ".join(kinds), panels)


def draw_scaling(series: dict[str, list[tuple[int, float]]]) -> str:
    ranks = sorted({ranks for line in series.values() for ranks, _ in line})
    lines = tuple(svg.Line(name, tuple(line)) for name, line in series.items())
    title, subtitle = "Scaling efficiency", "TFLOP/s per rank, relative to one rank (1: perfect scaling)"
    chart = svg.Chart(title, subtitle, "ranks", tuple((rank, str(rank)) for rank in ranks), lines, "efficiency")
    return svg.charts(f"{title}: {subtitle}", [chart])


def draw(arguments: argparse.Namespace) -> str | None:
    """The picture, or None after a message of what is missing."""
    if arguments.what == "timeline":
        with open(arguments.files[0], encoding="utf-8") as file:
            ranks, bars = timeline_bars(json.load(file))
        return svg.timeline(ranks, bars) if bars else missing("the trace holds no block that lasts")
    if arguments.what == "compression":
        lines = []
        for name in arguments.files:
            with open(name, encoding="utf-8") as file:
                lines += [modern(json.loads(text)) for text in file if text.strip()]
        kinds = compression_series(lines)
        return draw_compression(kinds) if kinds else missing("the files hold no figures of compression")
    found = points.read(arguments.files)
    if arguments.kind:
        found = [point for point in found if arguments.kind in point.job.kind]
    if arguments.what == "speed":
        kinds = speed_series(found)
        return draw_speed(kinds) if kinds else missing("the files hold no figures")
    series = scaling_series(found)
    return draw_scaling(series) if series else missing("no job was measured on one rank and on several")


def missing(why: str) -> None:
    print(f"error: nothing to draw ({why}).", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "scaling", "compression", "timeline"])
    parser.add_argument("files", nargs="+", help="files of lines; for a timeline one trace")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.svg", help="the picture")
    parser.add_argument("--kind", help='only jobs whose description holds this, such as "x 128 causal"')
    arguments = parser.parse_args()
    if arguments.what == "timeline" and len(arguments.files) != 1:
        parser.error("a timeline is drawn of one trace")
    try:
        picture = draw(arguments)
    except (points.BadLine, OSError) as error:
        print(f"error: {error}.", file=sys.stderr)
        return 3
    except (ValueError, KeyError, TypeError) as error:
        print(f"error: {arguments.files[0]} is no trace of ringattn run ({type(error).__name__}: {error}).", file=sys.stderr)
        return 3
    if picture is None:
        return 3
    try:
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write(picture)
    except OSError as error:
        print(f"error: {arguments.output} can't be written ({error.strerror}).", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
