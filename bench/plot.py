#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws benchmarks: speed against length, scaling over ranks, what each rank did when.

    bench/plot.py speed bench/results/nvidia-h200-x4/*.jsonl -o speed.svg
    bench/plot.py scaling bench/results/nvidia-h200/*.jsonl -o scaling.svg    # TFLOP/s of a rank, over that of one rank
    ringattn run --trace trace.json ... && bench/plot.py timeline trace.json -o timeline.svg

The ending of -o chooses the format: svg, png, pdf.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from typing import Any

import points
from points import Job, Point

COLOURS = {"fold": "#2a7f62", "wait": "#c03d3e", "transfer": "#7ea3cc"}  # of a timeline's lanes


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        print(f"error: matplotlib isn't installed ({error}). Try pip install matplotlib.", file=sys.stderr)
        sys.exit(4)
    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot


def speed_series(found: list[Point]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """For each kind of job, for each who measured: (length, TFLOP/s of a rank), ascending."""
    kinds: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for point in found:
        if point.tflops is not None:
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


def draw_speed(pyplot: Any, kinds: dict[str, dict[str, list[tuple[int, float]]]]) -> Any:
    figure, all_axes = pyplot.subplots(len(kinds), 1, figsize=(9, 4.5 * len(kinds)), squeeze=False)
    for axes, (kind, series) in zip(all_axes[:, 0], kinds.items()):
        for name, line in series.items():
            ours = name.startswith(points.OURS)
            axes.plot(*zip(*line), marker="o", linewidth=2.2 if ours else 1.2, linestyle="-" if ours else "--", label=name)
        ticks = sorted({seq for line in series.values() for seq, _ in line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [points.size(seq) for seq in ticks])
        axes.set_ylim(bottom=0)
        axes.set(title=kind, xlabel="tokens of a sequence", ylabel="TFLOP/s of a rank")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def draw_scaling(pyplot: Any, series: dict[str, list[tuple[int, float]]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name, line in series.items():
        axes.plot(*zip(*line), marker="o", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(sorted({ranks for line in series.values() for ranks, _ in line}))
    axes.set_ylim(0, 1.1)
    axes.set(xlabel="ranks", ylabel="TFLOP/s of a rank, over one rank alone")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def draw_timeline(pyplot: Any, ranks: list[str], bars: list[tuple[int, str, float, float]]) -> Any:
    lanes = list(COLOURS)
    figure, axes = pyplot.subplots(figsize=(11, 1 + 0.7 * len(ranks)))
    for rank, lane, begin, duration in bars:
        row = rank + 0.28 * lanes.index(lane)
        axes.barh(row, duration, left=begin, height=0.24, color=COLOURS[lane], edgecolor="white", linewidth=0.3)
    axes.set_yticks([rank + 0.28 for rank in range(len(ranks))], ranks)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend([pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[lane]) for lane in lanes], lanes, ncols=3, fontsize=8)
    return figure


def draw(arguments: argparse.Namespace) -> Any:
    """The figure, or a message of what is missing."""
    if arguments.what == "timeline":
        with open(arguments.files[0], encoding="utf-8") as file:
            ranks, bars = timeline_bars(json.load(file))
        return draw_timeline(import_pyplot(), ranks, bars) if bars else "the trace holds no block that lasts"
    found = points.read(arguments.files)
    if arguments.kind:
        found = [point for point in found if arguments.kind in point.job.kind]
    if arguments.what == "speed":
        kinds = speed_series(found)
        return draw_speed(import_pyplot(), kinds) if kinds else "the files hold no figures"
    series = scaling_series(found)
    return draw_scaling(import_pyplot(), series) if series else "no job was measured on one rank and on several"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "scaling", "timeline"])
    parser.add_argument("files", nargs="+", help="files of lines; for a timeline one trace")
    parser.add_argument("-o", "--output", required=True, help="the picture")
    parser.add_argument("--kind", help='only jobs whose description holds this, such as "x 128 causal"')
    arguments = parser.parse_args()
    if arguments.what == "timeline" and len(arguments.files) != 1:
        parser.error("a timeline is drawn of one trace")
    try:
        figure = draw(arguments)
    except (points.BadLine, OSError) as error:
        print(f"error: {error}.", file=sys.stderr)
        return 3
    except (ValueError, KeyError, TypeError) as error:
        print(f"error: {arguments.files[0]} is no trace of ringattn run ({type(error).__name__}: {error}).", file=sys.stderr)
        return 3
    if isinstance(figure, str):
        print(f"error: nothing to draw ({figure}).", file=sys.stderr)
        return 3
    figure.tight_layout()
    try:
        figure.savefig(arguments.output, dpi=150)
    except (OSError, ValueError) as error:
        print(f"error: {arguments.output} can't be written ({error}).", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
