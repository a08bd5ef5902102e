#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of benchmarks, and gates.

    bench/tables.py                        # writes the tables and pictures of README.md and docs/
    bench/tables.py --check                # exit code 1 if one does not follow from the results
    bench/tables.py --select nvidia-h200   # from now on shows what bench/run.sh --readme measured last on this GPU

    bench/tables.py compare bench/results/nvidia-h200/*.jsonl             # ringattn and every peer, with the ratio
    bench/tables.py compare --need "flash_attention_2=1.0" FILES          # exit code 1 where ringattn is slower
    bench/tables.py gate OLD/attention_gpu_bench NEW/attention_gpu_bench  # exit code 1 where the new build is slower
    bench/tables.py plot speed FILES -o speed.svg                         # or scaling, or timeline TRACE

bench/results/shown.json names the results that the pages show. On a page, a table stands between <!-- table:NAME --> and
<!-- /table:NAME -->. Its heading and the text below it are written by hand, except for the device in the heading;
everything from the line that begins with "Commit", or from the first row, is written by this program. Pictures need
matplotlib."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import pathlib
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

import cpu_tables
import result_lines
from result_lines import CUDNN, FLASH, FLASH_MLA, OURS, ROOT, SPARSE, SSM, BadLine, Curve, Group, Job, Line, Point
from result_lines import Step, StepTime, best_steps, flag_value, is_missing, medians, reports, size, step_share, timed_lines

MAIN = "bf16 32/8 x 128 causal"
ZIGZAG, FLEX = "zigzag ring", "FlexAttention"
NAMES = {
    ("pytorch sdpa", "cudnn"): CUDNN,
    ("pytorch sdpa", "flash_attention_2"): FLASH,
    ("flash_attention_3", ""): "FlashAttention-3",
}
ON_ONE_GPU = (OURS, "FlashAttention-3", CUDNN, FLASH)
# The groups of the README's figures.
README_GROUPS = {"one-gpu": "one GPU", "scaling": "several GPUs", "two-million": "2,097,152 tokens"}
# The README's choice of jobs and lengths.
README_JOBS = (
    *((MAIN, length << 10) for length in (1, 32, 128)),
    ("bf16 32/8 x 128 full", 32 << 10),
    ("bf16 32/32 x 64 causal", 32 << 10),
    ("bf16 8/8 x 256 causal", 32 << 10),
    ("bf16 128/128 x 192/128 causal", 8 << 10),
)
SSM_SHAPES = {
    "ssd": "Mamba-2",
    "ssd-gated": "Mamba-2, gated",
    "selective": "Mamba-1",
    "update": "Mamba-2, decode step",
    "selective-update": "Mamba-1, decode step",
    "conv1d": "conv1d",
}


# ---- Text of cells

def columns(rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table that is also readable as text; the first columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(row: list[str]) -> str:
        cells = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * width if at < left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])


def joined(words: Iterable[str]) -> str:
    """a, b and c"""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def code(words: Iterable[str]) -> str:
    return joined(f"`{word}`" for word in words)


def gpus(world: int) -> str:
    return "1 GPU" if world == 1 else f"{world} GPUs"


def world_name(world: int, transport: str) -> str:
    return gpus(world) + (f", {transport}" if world > 1 else "")


def digest(value: str | None) -> str:
    return f"`{value[:8]}…`" if value else "—"


def quotient(value: float | None, by: float | None, digits: int = 2) -> str:
    return f"{value / by:.{digits}f}" if value and by else "—"


def share(ours: StepTime | None, theirs: StepTime | None, form: str = "{:.2f}") -> str:
    value = step_share(ours, theirs)
    return form.format(value) if value else "—"


def milliseconds(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1e4 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.2f} ms"


def byte_count(count: int) -> str:
    """143.2 MiB, 2.2 GiB; — for none"""
    return "—" if not count else f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def microseconds(time: StepTime | None) -> str:
    return time.text if time else "—"


def rates(cells: list[Point | None]) -> list[str]:
    """The fastest is bold."""
    best = f"{max((point.tflops or 0.0 for point in cells if point), default=0.0):.0f}"
    texts = [f"{point.tflops:.0f}" if point and point.tflops else "—" for point in cells]
    return [f"**{text}**" if text == best else text for text in texts]


# ---- Attention on GPUs

def described(job: Job) -> str:
    return f"{result_lines.dims(job)}, {job.heads}/{job.kv_heads} heads, {job.mask}"


def who(point: Point) -> str:
    return OURS + point.form if point.tool == OURS else NAMES.get((point.tool, point.kernel), point.name)


def timed(group: Group) -> list[Point]:
    return [point for point in group.points if point.tflops and point.mode != "compute"]


def on_one_gpu(group: Group) -> dict[tuple[str, int, str], Point]:
    return {(p.job.kind, p.job.seq, who(p)): p for p in timed(group) if p.world == 1}


def measured_names(group: Group) -> list[str]:
    there = {name for _, _, name in on_one_gpu(group)}
    return [name for name in ON_ONE_GPU if name in there]


def speed(group: Group) -> str:
    found, names = on_one_gpu(group), measured_names(group)
    rows = [["head_dim, heads, mask", "tokens", *names]]
    for kind, length in README_JOBS:
        cells = [found.get((kind, length, name)) for name in names]
        if cells[0]:
            rows.append([described(cells[0].job), size(length), *rates(cells)])
    return columns(rows)


def length_rows(found: dict[tuple[str, int, str], Point], kind: str, names: list[str], lengths: list[int]) -> list[list[str]]:
    """A row for each name, with a rate for each length."""
    by_length = [rates([found.get((kind, length, name)) for name in names]) for length in lengths]
    return [[name, *cells] for name, cells in zip(names, zip(*by_length))]


def speed_main(group: Group) -> str:
    """The shape for which peers were measured, at every length."""
    found, names = on_one_gpu(group), measured_names(group)
    lengths = sorted({length for kind, length, name in found if kind == MAIN and name in names})
    return columns([["TFLOP/s", *map(size, lengths)], *length_rows(found, MAIN, names, lengths)])


def speed_shapes(group: Group) -> str:
    """Every other shape, and other settings of ringattn."""
    found = {key: point for key, point in on_one_gpu(group).items() if key[0] != MAIN or key[2] not in ON_ONE_GPU}
    lengths = sorted({length for _, length, _ in found})
    jobs = {kind: point.job for (kind, _, _), point in found.items()}
    rows = [["head_dim, heads, mask", "who", *map(size, lengths)]]
    for kind, job in sorted(jobs.items(), key=lambda of: (of[1].mask, of[1].head_dim, of[1].kv_heads)):
        there = {name for of, _, name in found if of == kind}
        names = [name for name in ON_ONE_GPU if name in there] + sorted(there - set(ON_ONE_GPU))
        rows += [[described(job), *row] for row in length_rows(found, kind, names, lengths)]
    return columns(rows, left=2)


def scaling_points(group: Group, longest: Group) -> list[Point]:
    """Whole jobs of the main shape from 32k tokens on. Jobs that ran once are used only if nothing else was measured."""
    found = [p for one in (longest, group) for p in timed(one) if p.job.kind == MAIN and not p.form]
    found = [p for p in found if p.job.seq >= 32 << 10 and (p.world > 1 or p.tool == OURS)]
    return list({(p.tool, p.kernel, p.world, p.transport, p.job.seq): p for p in found}.values())


def scaling_name(point: Point, transports: bool) -> str:
    if point.tool == ZIGZAG:  # bench/peers/zigzag_ring.py
        parts = f", {point.kernel}, {point.transport}".replace(", cudnn", ", cuDNN") if transports else ""
        return f"{ZIGZAG} (own re-implementation{parts}), {gpus(point.world)}"
    if point.tool != OURS:
        return f"{point.name}, {gpus(point.world)}" if transports else f"{point.tool}, {gpus(point.world)}"
    return f"ringattn, {world_name(point.world, point.transport) if transports else gpus(point.world)}"


def scaling_curves(found: list[Point], transports: bool) -> dict[str, Curve]:
    """ringattn first, by the number of GPUs."""
    curves: dict[str, Curve] = {}
    for point in sorted(found, key=lambda p: (p.tool != OURS, p.world, p.transport != "p2p", p.name, p.job.seq)):
        curves.setdefault(scaling_name(point, transports), []).append((point.job.seq, point.tflops or 0.0))
    return curves


def scaling(group: Group, longest: Group) -> str:
    curves = scaling_curves(scaling_points(group, longest), transports=True)
    alone = (p for p in group.points if p.mode == "compute" and p.tflops and p.job.kind == MAIN)
    for point in sorted(alone, key=lambda p: (p.world, p.transport != "p2p", p.job.seq)):
        name = f"— compute only, {gpus(point.world)}, {point.transport}"
        curves.setdefault(name, []).append((point.job.seq, point.tflops or 0.0))
    lengths = sorted({length for curve in curves.values() for length, _ in curve})
    rows = [["TFLOP/s per GPU", *map(size, lengths)]]
    for name, curve in curves.items():
        by_length = dict(curve)
        rows.append([name, *(f"{by_length[length]:.0f}" if length in by_length else "—" for length in lengths)])
    return columns(rows)


def two_million(group: Group) -> str:
    rows = [["2,097,152 tokens", "time", "TFLOP/s per GPU", "memory per GPU (planned)", "exposed comm", "digest of O"]]
    for line in sorted(reports(group.lines, "run"), key=lambda line: (line["world"]["ranks"], line["world"]["transport"])):
        memory, planned = line["memory_peak_bytes"] / 2**30, line["plan"]["memory_per_rank"] / 2**30
        cells = [f"{line['time_ms']['median'] / 1e3:.1f} s", f"{line['tflops_per_rank']:.0f}"]
        cells += [f"{memory:.1f} GiB ({planned:.1f})", f"{line['exposed_comm_ms']:.1f} ms", digest(line["digest"]["out"])]
        rows.append([gpus(line["world"]["ranks"]), *cells])
    return columns(rows)


def layers(group: Group) -> str:
    rows = [["32 layers in sequence", "time per layer", "compute only", "overhead", "host time per call"]]
    # If two files measured the same job, the later one counts.
    chosen = {(line["ranks"], line["tokens"], line["transport"] != "p2p"): line for line in group.lines}
    for _, line in sorted(chosen.items()):
        name = f"{gpus(line['ranks'])}, {size(line['tokens'])}" + (f", {line['transport']}" if line["ranks"] > 1 else "")
        lost = f"{100 * line['lost']:.1f} %" if line["lost"] > 0 else "none"
        rows.append([name, f"{line['ms_a_layer']:.3f} ms", f"{line['compute_ms']:.3f} ms", lost, f"{line['host_us']:.0f} µs"])
    return columns(rows)


def sums(group: Group) -> str:
    found = {}
    for line in group.lines:
        name = OURS if line["tool"]["name"] == OURS else NAMES["pytorch sdpa", line["kernel"]]
        found[f"{line['job']['dtype']}, {name}", line["job"]["tokens"]] = line["accuracy"]["bias"]
    lengths = sorted({length for _, length in found})
    rows = [["mean of (O − exact) / exact", *(f"{size(length)} keys" for length in lengths)]]
    for name in dict.fromkeys(name for name, _ in found):
        rows.append([name, *(f"{found[name, length]:.1e}".replace("-", "−") for length in lengths)])
    return columns(rows)


# ---- Decode steps, masks, compression, SSM

def step_shape(step: Step) -> list[str]:
    return [f"{step.heads}/{step.kv_heads} of {step.head_dim}", f"{step.batch} x {size(step.keys)}"]


def decode(group: Group) -> str:
    found = best_steps(group.steps)
    tools = (OURS, CUDNN, FLASH)
    rows = [["heads, head_dim", "sequences x keys", *(f"{name}, µs" for name in tools), "ringattn / cuDNN"]]
    for step in sorted({step for _, step in found}, key=lambda step: (step.goal is None, step)):
        ours, cudnn, flash = (found.get((name, step)) for name in tools)
        rows.append([*step_shape(step), *map(microseconds, (ours, cudnn, flash)), share(ours, cudnn)])
    return columns(rows, left=2)


def pages(group: Group) -> str:
    found = best_steps(group.steps)
    dense = {step for name, step in found if name == OURS and not step.page_size and step.rows == 1}
    sizes = sorted({step.page_size for _, step in found if step.page_size})
    rows = [["heads, head_dim", "sequences x keys", "dense, µs", *(f"pages of {page}" for page in sizes)]]
    for step in sorted(dense):
        whole = found[OURS, step]
        paged = [found.get((OURS, dataclasses.replace(step, page_size=page))) for page in sizes]
        if any(paged):
            rows.append([*step_shape(step), microseconds(whole), *(share(one, whole, "{:.3f} x") for one in paged)])
    return columns(rows, left=2)


def sparse(group: Group) -> str:
    """Medians of all rounds."""
    times: list[tuple[tuple[str, int, str], float]] = []
    density: dict[tuple[int, str], float] = {}
    for line in group.lines:
        if not line.get("ms"):
            continue
        name, seq, mask = OURS, line["job"]["seq"], flag_value(line, "--block-mask")
        pattern = pathlib.PurePath(mask).stem if mask else "dense"
        if line["schema"] == SPARSE:
            name, pattern = FLEX, line["pattern"]
            density[seq, pattern] = line["density"]
        times.append(((name, seq, pattern), line["ms"]["median"]))
    found = medians(times)
    rows = [["mask", "tokens", "density", f"{OURS}, ms", f"{FLEX}, ms", f"{FLEX} / ringattn", "speedup over all"]]
    for seq, pattern in sorted({key[1:] for key in found}, key=lambda key: (key[0], key[1] != "dense", key[1])):
        ours, theirs = found.get((OURS, seq, pattern)), found.get((FLEX, seq, pattern))
        cells = [f"{100 * density[seq, pattern]:.1f} %" if (seq, pattern) in density else "—"]
        cells += [f"{ms:.2f}" if ms else "—" for ms in (ours, theirs)]
        cells += [quotient(theirs, ours), quotient(found.get((OURS, seq, "dense")), ours)]
        rows.append(["all" if pattern == "dense" else pattern, size(seq), *cells])
    return columns(rows)


def with_ratio(times: dict[str, float], form: str, digits: int) -> str:
    """A time, and its ratio to the time of bf16."""
    if form not in times:
        return "—"
    text = f"{times[form]:.{digits if times[form] < 99.95 else 0}f}"
    return f"{text} ({times[form] / times['bf16']:.2f} x)" if form != "bf16" and "bf16" in times else text


def compressed(group: Group) -> str:
    """One table each for decode steps, prefill and compression."""
    forms = ("bf16", "fp8", "int8", "int4")
    steps: dict[Step, dict[str, float]] = defaultdict(dict)
    for (_, form, step), time in group.steps.items():
        if time.us and (form or "bf16") in forms:
            steps[step][form or "bf16"] = time.us
    rows = [["decode step, µs", *forms]]
    for step, times in sorted(steps.items()):
        rows.append([f"{step.batch} x {size(step.keys)}", *(with_ratio(times, form, 1) for form in forms)])
    tables = [rows]
    prefill: dict[int, dict[str, float]] = defaultdict(dict)
    times = medians(((line["job"]["seq"], flag_value(line, "--cache-format") or "bf16"), line["ms"]["median"])
                    for line in timed_lines(group.lines))  # fmt: skip
    for (seq, form), ms in times.items():
        prefill[seq][form] = ms
    rows = [["prefill, ms", "bf16", "fp8", "int4"]]
    for seq, times in sorted(prefill.items()):
        rows.append([f"1 x {size(seq)}", *(with_ratio(times, form, 2) for form in ("bf16", "fp8", "int4"))])
    tables.append(rows)
    lines = [line for line in group.lines if line.get("schema") == "ringattn.compress/1" and line["what"] != "copy"]
    rate, share = (medians(((line["format"], line["what"]), line[name]) for line in lines) for name in ("gb_per_s", "of_copy"))
    rows = [["128k tokens, 8 heads", "compress, GB/s", "of memcpy bandwidth", "decompress, GB/s", "of memcpy bandwidth"]]
    for form in dict.fromkeys(line["format"] for line in lines):
        keys = [(form, "compress"), (form, "decompress")]
        cells = [[f"{rate[key]:.0f}", f"{share[key]:.2f}"] if key in rate else ["—", "—"] for key in keys]
        rows.append([form, *cells[0], *cells[1]])
    tables.append(rows)
    return "\n\n".join(columns(rows) for rows in tables if len(rows) > 1)


def latents(group: Group) -> str:
    """ringattn by its default kernel, and by the one with KV splits of 1,024 keys."""
    found = best_steps(group.steps)
    kernels = {"sm90_mla": "", "sm90_mla_split1k": "sm90_mla_split1k"}  # and the forms of their times
    kernels = {name: form for name, form in kernels.items() if any(key[:2] == (OURS, form) for key in group.steps)}
    rows = [["heads, queries", "sequences x tokens", *(f"{name}, µs" for name in (*kernels, FLASH_MLA))]]
    rows[0] += [f"{name} / {FLASH_MLA}" for name in kernels]
    for step in sorted({step for _, step in found}, key=lambda step: (-step.heads, step.rows, step)):
        theirs = found.get((FLASH_MLA, step))
        ours = [group.steps.get((OURS, form, step)) for form in kernels.values()]
        cells = [*map(microseconds, (*ours, theirs)), *(share(one, theirs) for one in ours)]
        rows.append([f"{step.heads}, {step.rows}", f"{step.batch} x {size(step.keys)}", *cells])
    return columns(rows, left=2)


def scans(group: Group) -> str:
    """The median of each shape and tool, in the order of the lines."""
    lines = [line for line in group.lines if line.get("schema") == SSM and not is_missing(line)]
    times = medians(((line["shape"], line["tool"]["name"]), line["ms"]) for line in lines if line["ms"])
    asked = {(line["shape"], line["tool"]["name"]): line for line in reversed(lines)}
    others = sorted({tool for _, tool in asked} - {OURS})
    names = [f"{'PyTorch' if tool == 'pytorch' else tool}, ms" for tool in (OURS, *others)]
    rows = [["op", "sequences x tokens", *names, "fastest peer / ringattn", "GB/s"]]
    for shape in dict.fromkeys(line["shape"] for line in lines):
        ours = times.get((shape, OURS))
        if not ours:
            continue
        line = asked[shape, OURS]
        cells = [f"{times[shape, tool]:.3g}" if (shape, tool) in times else "can't" if (shape, tool) in asked else "—"
                 for tool in (OURS, *others)]  # fmt: skip
        best = min((times[shape, tool] for tool in others if (shape, tool) in times), default=None)
        cells += [quotient(best, ours), f"{line['bytes'] / ours * 1e-6:.0f}"]
        rows.append([SSM_SHAPES[shape.rpartition("-")[0]], f"{line['sequences']} x {size(line['tokens'])}", *cells])
    return columns(rows, left=2)


def compression_lines() -> list[Line]:
    return result_lines.read_file(str(result_lines.RESULTS / "compression.jsonl")).lines


def compression() -> str:
    """A row for each format, with the error of O on each kind of data."""
    found: dict[tuple[str, str], dict[str, Line]] = defaultdict(dict)
    for line in compression_lines():
        stored = line["k"] if line["k"] == line["v"] else f"{line['k']}, {line['v']}"
        kept, tokens = line.get("kept", 1), line.get("tokens", 1)
        if kept < tokens:
            stored = f"{kept} of {tokens} tokens" + ("" if stored == "plain" else f", {stored}")
        found[line["method"], stored][line["data"]] = line
    rows = [["method", "stored k, v", "bytes per token and head", "removed", "error of O, Gaussian data", "with outlier channels",
             "compress, ns", "decompress, ns"]]  # fmt: skip
    for (method, stored), data in found.items():
        cells = [f"{data[kind]['change_of_o']:.4f}" if kind in data else "—" for kind in ("normal", "outliers")]
        one = next(iter(data.values()))
        times = [min(line[what] for line in data.values()) for what in ("compress_ns", "decompress_ns")]
        cells += [f"{time:,.0f}" if time > 0 else "—" for time in times]
        rows.append([f"`{method}`", stored, f"{one['bytes']:.4g}", f"{one['removed']:.3f}", *cells])
    return columns(rows)


# ---- MLA, SSM and decode steps on several ranks

@dataclasses.dataclass
class RankTime:
    ms: float
    tflops: float
    exposed_comm_ms: float
    digest: str | None = None

    @property
    def exposed(self) -> str:
        return f"{100 * self.exposed_comm_ms / self.ms:.1f} %"


def bench_time(line: Line) -> RankTime:
    return RankTime(line["ms"]["median"], line["tflops_per_rank"], line.get("exposed_comm_ms") or 0.0, line.get("digest"))


def checked(group: Group) -> str:
    """Sentences about rows that were compared with fp64; empty if there are none."""
    text = ""
    for line in reports(group.lines, "verify"):
        found = line["accuracy"]
        share = found["out"]["greatest_error"] / found["out"]["allowed"]
        verdict = "passed" if line["verdict"] == "pass" else "FAILED"
        tokens = size(line["job"].get("q_tokens") or line["job"]["tokens"])
        rows = f"{found['rows']} rows of {tokens} tokens of {line['job']['heads']} heads"
        text += f"\n\n{rows}, compared with fp64: {verdict}, the greatest error is {share:.2f} of the allowed error."
    return text


def latent_ring(group: Group) -> str:
    """The latents that all ranks together received, and the size of their keys and values."""
    rows = [["tokens", "GPUs", "time", "TFLOP/s per GPU", "latents moved", "keys and values instead", "digest of O"]]
    for line in sorted(reports(group.lines, "run"), key=lambda line: (line["job"]["q_tokens"], line["world"]["ranks"])):
        ms, plan = line["time_ms"]["median"], line["plan"]
        time = f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1e3:#.3g} s"
        moved = [byte_count(plan[name]) for name in ("bytes_moved", "bytes_moved_expanded")]
        cells = [time, f"{line['tflops_per_rank']:.0f}", *moved]
        rows.append([f"{line['job']['q_tokens']:,}", str(line["world"]["ranks"]), *cells, digest(line["digest"]["out"])])
    return columns(rows)


def latent_prefill(group: Group) -> str:
    """Adds the digest of `run` to each length that `bench` has measured, too."""
    latents, compute, plain = ({} for _ in range(3))  # RankTime by tokens and ranks
    for line in timed_lines(group.lines):
        kind = compute if line["mode"] == "compute" else latents if line["job"].get("op") == "mla" else plain
        kind[line["job"]["seq"], line["world"]] = bench_time(line)
    for line in reports(group.lines, "run"):
        key = (line["job"]["q_tokens"], line["world"]["ranks"])
        run = RankTime(line["time_ms"]["median"], line["tflops_per_rank"], line["exposed_comm_ms"])
        latents.setdefault(key, run).digest = line["digest"]["out"]
    heads = ["time", "TFLOP/s per GPU", "compute only", "plain", "plain time / this", "exposed comm", "digest of O"]
    rows = [["tokens", "on", *heads]]
    for key, this in sorted(latents.items(), key=lambda item: item[0]):
        rate = [f"{times[key].tflops:.0f}" if key in times else "—" for times in (latents, compute, plain)]
        ratio = quotient(plain[key].ms if key in plain else None, this.ms, 3)
        rows.append([size(key[0]), gpus(key[1]), milliseconds(this.ms), *rate, ratio, this.exposed, digest(this.digest)])
    return columns(rows, left=2) + checked(group)


def by_ranks(group: Group, op: str) -> list[tuple[int, int, str, RankTime, str]]:
    """Tokens, ranks, transport, time, and the speedup over one rank."""
    found = {(line["job"]["seq"], line["world"], line["transport"]): bench_time(line)
             for line in timed_lines(group.lines) if line["job"].get("op") == op}
    one = {seq: time.ms for (seq, world, _), time in reversed(found.items()) if world == 1}
    return [(*key, time, f"{one[key[0]] / time.ms:.2f} x" if key[0] in one else "—")
            for key, time in sorted(found.items(), key=lambda item: (*item[0][:2], item[0][2] != "p2p"))]


def scan_ranks(group: Group) -> str:
    rows = [["tokens", "on", "time", "speedup", "exposed comm", "digest of y"]]
    for tokens, world, transport, time, speedup in by_ranks(group, "ssd"):
        cells = [milliseconds(time.ms), speedup, time.exposed, digest(time.digest)]
        rows.append([size(tokens), world_name(world, transport), *cells])
    return columns(rows, left=2) + checked(group)


def decode_ranks(group: Group) -> str:
    rows = [["keys", "on", "decode step", "speedup", "digest of O"]]
    for keys, world, transport, time, speedup in by_ranks(group, "decode"):
        rows.append([size(keys), world_name(world, transport), f"{time.ms * 1e3:.0f} µs", speedup, digest(time.digest)])
    return columns(rows, left=2)


def compressed_ring(group: Group) -> str:
    """The rows in the order of measuring; the first one is not quantized."""
    runs = reports(group.lines, "run")
    rows = [["stored as", "bytes moved", "of bf16", "time", "exposed comm", "digest of O"]]
    for line in runs:
        moved, ms = line["plan"]["bytes_moved"], line["time_ms"]["median"]
        share = f"{moved / runs[0]['plan']['bytes_moved']:.3f}"
        cells = [f"{moved / 1e6:.1f} MB", share, f"{ms / 1e3:.2f} s", f"{100 * line['exposed_comm_ms'] / ms:.0f} %"]
        rows.append([line["config"]["cache-format"], *cells, digest(line["digest"]["out"])])
    return columns(rows)


# ---- Pictures

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#000000",
           "#b5651d", "#6a3d9a", "#33a02c")  # fmt: skip
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = "osD^vXP*<>hp"
LANES = {"compute": "#0072b2", "wait": "#d55e00", "transfer": "#7f7f7f"}
DATA = {"normal": "Gaussian data", "outliers": "data with outlier channels"}  # of bench/compression.py


@dataclasses.dataclass
class Chart:
    title: str
    subtitle: str
    x_label: str
    y_label: str
    ticks: list[tuple[float, str]]  # of the logarithmic x axis
    curves: dict[str, Curve]  # in order of importance


def figure_of(width: float, height: float) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, and the same figures give the same bytes.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": OURS, "axes.spines.top": False,
                                "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"})  # fmt: skip
    return Figure(figsize=(width, height), layout="constrained")


def as_svg(figure: Any, description: str) -> str:
    """Adds a description for readers who cannot see the picture, and inverts brightness on dark pages."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    dark = "@media (prefers-color-scheme:dark){#figure_1{filter:invert(.93) hue-rotate(180deg)}}"
    text = re.sub(" +$", "", buffer.getvalue(), flags=re.MULTILINE).replace("<svg ", '<svg role="img" ', 1)
    return text.replace(" <metadata>", f" <desc>{escape(description)}</desc>\n <style>{dark}</style>\n <metadata>", 1)


def draw(description: str, charts: list[Chart]) -> str:
    """One chart below the other."""
    figure = figure_of(8.8, 4.6 * len(charts))
    for axis, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts):
        for at, (name, curve) in enumerate(chart.curves.items()):
            colour, dash, marker = (looks[at % len(looks)] for looks in (COLOURS, DASHES, MARKERS))
            look = {"color": colour, "linestyle": dash, "marker": marker}
            axis.plot(*zip(*curve), label=name, linewidth=2.6 if name.startswith(OURS) else 1.6, markersize=5, **look)
        axis.set_xscale("log", base=2)
        axis.set_xticks([place for place, _ in chart.ticks], [text for _, text in chart.ticks])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel(chart.x_label)
        axis.set_ylabel(chart.y_label)
        axis.set_title(chart.title, loc="left", fontweight="bold", pad=24 if chart.subtitle else 8)
        axis.text(0, 1.03, chart.subtitle, transform=axis.transAxes, fontsize=9, color="#555555")
        place = {"loc": "lower right"} if len(chart.curves) < 6 else {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axis.legend(frameon=False, fontsize=9, **place)
    return as_svg(figure, description)


def speed_chart(title: str, subtitle: str, curves: dict[str, Curve], y_label: str = "TFLOP/s") -> Chart:
    lengths = [int(length) for curve in curves.values() for length, _ in curve]
    powers = [1 << power for power in range(max(lengths).bit_length()) if min(lengths) <= 1 << power] or lengths[:1]
    ticks = [(length, size(length)) for length in powers]
    return Chart(title, subtitle, "sequence length (tokens)", y_label, ticks, curves)


def speed_picture(group: Group) -> str:
    curves: dict[str, Curve] = {name: [] for name in measured_names(group)}
    for (kind, length, name), point in sorted(on_one_gpu(group).items()):
        if kind == MAIN and name in curves:
            curves[name].append((length, point.tflops or 0.0))
    title = f"Causal attention on one {group.device}"
    subtitle = f"bf16, 32 query heads, 8 K/V heads, head_dim 128, commit {joined(group.commits)}"
    return draw(f"{title}: TFLOP/s against sequence length. {subtitle}.", [speed_chart(title, subtitle, curves)])


def scaling_picture(group: Group, longest: Group) -> str:
    found = [p for p in scaling_points(group, longest) if p.tool == ZIGZAG or (p.tool == OURS and p.transport != "nccl")]
    title = f"Scaling: TFLOP/s per GPU, {group.device}"
    subtitle = "causal attention, bf16; with perfect scaling all lines lie on the line of 1 GPU"
    chart = speed_chart(title, subtitle, scaling_curves(found, transports=False), "TFLOP/s per GPU")
    return draw(f"{title}, against sequence length. {subtitle}.", [chart])


def compression_picture() -> str:
    kinds = result_lines.compression_curves(compression_lines())
    subtitle = "accuracy of O: −log2 of its relative RMS error (one bit: half the error; 0: as large as O)"
    x_label = "bytes per token and head (uncompressed: 256)"
    ticks = [(count, str(count)) for count in (16, 32, 64, 128, 256)]
    charts = [Chart(f"KV compression, {DATA[kind]}", subtitle, x_label, "correct bits of O", ticks, curves)
              for kind, curves in kinds.items()]  # fmt: skip
    return draw(f"Accuracy of O against bytes of the KV cache: {'; '.join(map(DATA.get, kinds))}", charts)


def draw_timeline(ranks: list[str], bars: list[tuple[int, str, float, float]]) -> str:
    lanes = [lane for lane in LANES if lane in {name for _, name, _, _ in bars}]
    figure = figure_of(8.8, 1.2 + 0.3 * len(ranks) * len(lanes))
    axis = figure.subplots()
    for at, lane in enumerate(lanes):
        for rank in range(len(ranks)):
            spans = [(begin, duration) for of, name, begin, duration in bars if (of, name) == (rank, lane)]
            axis.broken_barh(spans, (rank * (len(lanes) + 1) + at, 0.9), color=LANES[lane], label=None if rank else lane)
    axis.set_yticks([rank * (len(lanes) + 1) + len(lanes) / 2 for rank in range(len(ranks))], ranks)
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return as_svg(figure, f"What {len(ranks)} ranks did when")


def plot(arguments: argparse.Namespace) -> int:
    if arguments.what == "timeline":
        try:
            ranks, bars = result_lines.timeline_bars(json.loads(pathlib.Path(arguments.files[0]).read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise BadLine(f"{arguments.files[0]} is not a trace of ringattn run ({type(error).__name__}: {error})") from error
        picture, why = draw_timeline(ranks, bars) if bars else "", "the trace holds no bar that lasts"
    else:
        found = [p for p in result_lines.points_of(result_lines.read_files(arguments.files)) if arguments.kind in p.job.kind]
        if arguments.what == "speed":
            kinds, why = result_lines.speed_curves(found), "the files hold no figures"
            charts = [speed_chart(kind, "", curves, "TFLOP/s per rank") for kind, curves in kinds.items()]
        else:
            curves, why = result_lines.scaling_curves(found), "no job was measured on one rank and on several"
            ticks = [(ranks, str(ranks)) for ranks in sorted({ranks for curve in curves.values() for ranks, _ in curve})]
            subtitle = "TFLOP/s per rank, relative to one rank (1: perfect scaling)"
            charts = [Chart("Scaling efficiency", subtitle, "ranks", "efficiency", ticks, curves)] if curves else []
        picture = draw("; ".join(chart.title for chart in charts), charts) if charts else ""
    if not picture:
        raise BadLine(f"nothing to draw ({why})")
    pathlib.Path(arguments.output).write_text(picture, encoding="utf-8")
    return 0


# ---- compare

def pair_cells(pair: result_lines.Pair) -> list[str]:
    job, theirs = pair.ours.job, pair.theirs
    cells = [job.kind, size(job.seq) + (f" x {job.batch}" if job.batch > 1 else ""), str(pair.ours.world)]
    cells += [pair.ours.name, pair.ours.text, *([theirs.name, theirs.text] if theirs else ["no peer", "—"])]
    cells.append("—" if pair.ratio is None else f"{pair.ratio:.3f}")
    return [cell.replace("|", "\\|") for cell in cells]


def parse_need(text: str) -> tuple[str, float]:
    name, _, least = text.rpartition("=")
    try:
        return name, result_lines.as_figure(float(least))
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not "PEER=RATIO"') from None


def compare(arguments: argparse.Namespace) -> int:
    files = result_lines.read_files(arguments.files)
    times = result_lines.steps_of(files)
    pairs = result_lines.pair(files, arguments.forms)
    if not pairs:
        raise BadLine(f"no line is of {OURS} (there are {result_lines.contents(files)}); add a file of ringattn bench")
    heads = ["job", "length", "ranks", "ours", "TFLOP/s or µs", "theirs", "TFLOP/s or µs", "ours/theirs"]
    print(columns([heads, *map(pair_cells, pairs)], left=2))
    shown = {point for row in pairs for point in (row.ours, row.theirs)}
    for file in files:
        alone = sum(point not in shown for point in file.points.values())
        if alone:
            file.left_out["of peers or of compute only, with none of ours beside them"] += alone
        if note := file.note():
            print(f"# {note}", file=sys.stderr)
    if any("measured again" in why for file in files for why in file.left_out):
        print("# the last file, in the order given, and its last line count where a job was measured again", file=sys.stderr)
    for time in times.values():
        if time.us is None:
            print(f"# {time.who}, {time.form or 'auto'}, {time.job.name}: {time.error}", file=sys.stderr)
    wrong = [text for name, least in arguments.need for text in result_lines.misses(pairs, name, least)]
    wrong += result_lines.missed_goals(times) if arguments.goals else []
    for text in wrong:
        print(f"too slow: {text}", file=sys.stderr)
    return 1 if wrong else 0


# ---- gate

def gate(arguments: argparse.Namespace) -> int:
    """Each round measures each head_dim with the old build and then with the new one, so that the card is equally warm for both.
    The medians over the rounds are compared."""
    rates: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    kept = []
    for number in range(arguments.rounds):
        for head_dim in arguments.head_dims.split(","):
            for build, program in (("old", arguments.old), ("new", arguments.new)):
                done = subprocess.run([program, "gate", "sm90_attention", head_dim], capture_output=True, text=True)
                if done.returncode != 0:
                    raise BadLine(f"{program} failed ({done.stderr.strip()}); build it for this GPU")
                for line in map(json.loads, done.stdout.splitlines()):
                    kept.append({"build": build, "round": number, **line})
                    point = tuple(line[key] for key in ("heads", "kv_heads", "head_dim", "head_dim_v", "mask", "seq"))
                    rates[point][build].append(line["tflops"])
    if arguments.output:
        pathlib.Path(arguments.output).write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    ratios = []
    for (heads, kv_heads, dim, dim_v, mask, seq), builds in rates.items():
        old, new = (statistics.median(builds[build]) for build in ("old", "new"))
        ratios.append(new / old)
        dims = str(dim) if dim == dim_v else f"{dim}/{dim_v}"
        verdict = "" if new / old >= arguments.least else "  slower"
        print(f"{dims:>8} {heads:>3}/{kv_heads:<3} {mask:<7} {seq:>7}  {old:6.1f} -> {new:6.1f}  {new / old:.3f}{verdict}")
    slower, mean = sum(ratio < arguments.least for ratio in ratios), statistics.geometric_mean(ratios)
    print(f"{len(ratios)} points, {slower} below {arguments.least}; geometric mean {mean:.4f}, {arguments.mean} is needed")
    return 1 if slower or mean < arguments.mean else 0


# ---- Pages

def measured(*groups: Group) -> str:
    every = dict.fromkeys(commit for group in groups for commit in group.commits)
    gpu = f"{groups[0].device}, bf16"
    if len(every) == 1:
        dates = joined(dict.fromkeys(date for group in groups for date in group.dates))
        return f"All figures here were measured at commit `{next(iter(every))}` ({gpu}, {dates})."
    parts = joined(f"{code(group.commits)} ({what})" for group, what in zip(groups, README_GROUPS.values()))
    return f"The figures ({gpu}) were measured at several commits: {parts}."


Place = tuple[Any, ...]  # a function that returns text, and the names of the groups that it takes
PAGES: dict[str, dict[str, Place]] = {  # the places of each page; the first group is named above the table
    "README.md": {
        "measured": (measured, *README_GROUPS),
        "speed": (speed, "one-gpu"),
        "cpu": (lambda group: columns(cpu_tables.readme_rows(group)), "cpu"),
        "two-million": (two_million, "two-million"),
    },
    "docs/compression.md": {"accuracy": (compression,)},
    "docs/mla.md": {"latent-ring": (latent_ring, "latent-ring")},
    "docs/results.md": {
        "sums": (sums, "sums"),
        "speed": (speed_main, "one-gpu"),
        "shapes": (speed_shapes, "one-gpu"),
        "scaling": (scaling, "scaling", "two-million"),
        "two-million": (two_million, "two-million"),
        "layers": (layers, "layers"),
        "cpu": (lambda group: columns(cpu_tables.rows(group)), "cpu"),
        "decode": (decode, "decode"),
        "pages": (pages, "pages"),
        "sparse": (sparse, "sparse"),
        "compressed": (compressed, "compressed"),
        "latents": (latents, "latents"),
        "scans": (scans, "scans"),
        "compressed-ring": (compressed_ring, "compressed-ring"),
        "decode-ranks": (decode_ranks, "decode-ranks"),
        "latent-prefill": (latent_prefill, "latent-prefill"),
        "scan-ranks": (scan_ranks, "scan-ranks"),
    },
}
PICTURES: dict[str, Place] = {
    "docs/pictures/speed.svg": (speed_picture, "one-gpu"),
    "docs/pictures/scaling.svg": (scaling_picture, "scaling", "two-million"),
    "docs/pictures/compression.svg": (compression_picture,),
}


def origin(group: Group) -> str:
    """The commits, device and files of a table. Each line of the files has its own command."""
    files = joined(f"[{name.removesuffix('.jsonl')}](../bench/results/{name})" for name in group.names)
    plural, device = "s" if len(group.commits) > 1 else "", f", {group.device}" if group.device else ""
    peers = f" Compared with: {'; '.join(group.peers)}." if group.peers else ""
    return f"Commit{plural} {code(group.commits)}{device}. Raw results: {files}.{peers}"


def make(place: Place, groups: dict[str, Group]) -> str:
    function, *names = place
    return function(*(groups[name] for name in names))


def fill(page: str, text: str, groups: dict[str, Group]) -> str:
    found, tables = re.findall(r"^<!-- table:(\S+) -->$", text, re.MULTILINE), PAGES[page]
    if sorted(found) != sorted(tables):
        raise BadLine(f"{page} has places for {', '.join(found) or 'no tables'}, where there are {', '.join(tables)}")
    for name, place in tables.items():
        begin, end = f"<!-- table:{name} -->\n", f"<!-- /table:{name} -->\n"
        before, _, rest = text.partition(begin)
        inside, closed, after = rest.partition(end)
        if not closed:
            raise BadLine(f"{page} has no {end.strip()} after {begin.strip()}")
        table = make(place, groups)
        if inside.startswith("### "):  # the heading and the text below it are the page's
            group = groups[place[1]]
            kept = re.split(r"^(?:Commits? |\|)", inside, maxsplit=1, flags=re.MULTILINE)[0]
            heading, _, about = kept.partition("\n")
            title = heading.rpartition(", ")[0]
            table = f"{title}, {group.short_device}\n{about}{origin(group)}\n\n{table}"
        text = f"{before}{begin}{table}\n{end}{after}"
    return text


def current(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""


def pictures(groups: dict[str, Group], check: bool) -> dict[str, str]:
    """The pictures by their paths. Other versions of matplotlib write other bytes, so only this version's are checked."""
    try:
        import matplotlib
    except ImportError as error:
        if not check:
            raise BadLine(f"pictures need matplotlib ({error}); pip install matplotlib") from error
        print("# the pictures are not checked (matplotlib is not installed)", file=sys.stderr)
        return {}
    drawn = {path: re.search(r"Matplotlib v([\w.]+),", current(path)) for path in PICTURES}
    others = [path for path, version in drawn.items() if check and version and version[1] != matplotlib.__version__]
    for path in others:
        print(f"# {path} is not checked (matplotlib {drawn[path][1]} drew it, here is {matplotlib.__version__})", file=sys.stderr)
    return {path: make(place, groups) for path, place in PICTURES.items() if path not in others}


def write(arguments: argparse.Namespace) -> int:
    selection = result_lines.read_selection()
    if arguments.select:
        selection = result_lines.select(arguments.select, selection)
    groups = {name: Group(files) for name, files in selection.items()}
    files = {page: fill(page, current(page), groups) for page in PAGES} | pictures(groups, arguments.check)
    if arguments.select:
        (result_lines.RESULTS / "shown.json").write_text(json.dumps(selection, indent=2) + "\n", encoding="utf-8")
    changed = {path: text for path, text in files.items() if text != current(path)}
    for path, text in changed.items():
        if arguments.check:
            print(f"{path} doesn't follow from bench/results/shown.json: bench/tables.py writes it", file=sys.stderr)
        else:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    several = dict.fromkeys(commit for name in README_GROUPS for commit in groups[name].commits)
    if len(several) > 1:
        print(f"# the README's figures are of {len(several)} commits: {', '.join(several)}", file=sys.stderr)
    return 1 if arguments.check and changed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file would change")
    what.add_argument("--select", metavar="GPU", help="a folder of bench/results, and those of several (GPU-x4)")
    parser.set_defaults(act=write)
    commands = parser.add_subparsers(metavar="compare | gate | plot")
    command = commands.add_parser("compare", help="ringattn and each peer at the same job, and the ratio of their speeds")
    command.add_argument("files", nargs="+", help="result files of ringattn and of peers, in any order")
    command.add_argument("--forms", action="store_true", help="each form of each decode step, too")
    command.add_argument("--need", metavar="PEER=RATIO", type=parse_need, action="append", default=[],
                         help="exit code 1 below this ratio to a peer")  # fmt: skip
    command.add_argument("--goals", action="store_true", help="exit code 1 where a decode step misses its goal")
    command.set_defaults(act=compare)
    command = commands.add_parser("gate", help="two builds in turn on one card: is the new one slower?")
    command.add_argument("old", help="attention_gpu_bench of the old build")
    command.add_argument("new", help="attention_gpu_bench of the new build")
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--head-dims", default="128,64,256,192,96")
    command.add_argument("--least", type=float, default=0.99, help="the smallest new / old of a point that passes [0.99]")
    command.add_argument("--mean", type=float, default=0.995, help="the smallest geometric mean that passes [0.995]")
    command.add_argument("--output", help="a file for every line of both builds, with its build and round")
    command.set_defaults(act=gate)
    command = commands.add_parser("plot", help="a picture (SVG) of any results")
    command.add_argument("what", choices=["speed", "scaling", "timeline"])
    command.add_argument("files", nargs="+", help="result files; for a timeline one trace of ringattn run --trace")
    command.add_argument("-o", "--output", required=True, metavar="FILE.svg")
    command.add_argument("--kind", default="", help='only jobs whose description holds this, such as "x 128 causal"')
    command.set_defaults(act=plot)
    arguments = parser.parse_args()
    if arguments.act is plot and arguments.what == "timeline" and len(arguments.files) != 1:
        parser.error("a timeline is drawn of one trace")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    try:
        return arguments.act(arguments)
    except (BadLine, OSError, KeyError) as error:
        print(f"error: {error}.", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
