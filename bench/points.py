# SPDX-License-Identifier: Apache-2.0
"""Points of benchmarks out of files of lines: of `ringattn bench --jsonl` and bench/peers (schema "ringattn.bench/2"), of
reports of `ringattn run` (a line each, or a file as it was written), and of the program that measures FlashAttention-3.
Other lines are left out, and counted.

What the same tool measured several times at the same job counts as it was measured last: of the files that have it the
last one, in the order given, and of that file the last line. What FlashAttention-3 measured as built in several ways
(assembled by several versions of ptxas) in one file counts as the fastest of them did it."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aliases import modern

SCHEMA = "ringattn.bench/2"
REPORT = 1  # the schema of a report of `ringattn run`
OURS = "ringattn"
# What `ringattn run` took where its command names nothing else, when the lines of runs were kept that name no job.
RUN_DEFAULTS = {"--heads": "8", "--kv-heads": "2", "--head-dim": "128", "--dtype": "bf16", "--mask": "causal"}


class BadLine(Exception):
    """A file that can't be read as lines; the text says where and why."""


@dataclass(frozen=True)
class Job:
    """What makes points comparable, with the number of ranks."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str
    source: str

    @property
    def seq(self) -> int:
        return self.tokens // self.batch

    @property
    def kind(self) -> str:
        """Everything but the length: "bf16 32/8 x 128 causal"."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        text = f"{self.dtype} {self.heads}/{self.kv_heads} x {dims} {self.mask}"
        return f"{text}, {self.source}" if self.source else text

    @property
    def flops(self) -> float | None:
        """By the field's convention, as ours and the peers count; None for a mask that is neither causal nor full."""
        pairs = {"causal": self.seq * (self.seq + 1) / 2, "full": float(self.seq) ** 2}.get(self.mask)
        return None if pairs is None else 2.0 * self.batch * pairs * self.heads * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class Point:
    tool: str
    kernel: str
    transport: str
    mode: str  # "whole"; "run": a whole job that ran once; "compute": ours without communication
    world: int
    block: int  # asked for; 0: chosen by the plan
    job: Job
    median_ms: float | None  # None: see error
    tflops: float | None  # of a rank
    error: str | None
    layout: str = ""  # of ours; empty: nothing says
    stripe: int = 0  # asked for; 0: chosen from the kernel's tiles
    overlap: bool = True
    build: str = ""  # of several of the same kernel in one file, the fastest counts

    @property
    def ours(self) -> bool:
        return self.tool == OURS and self.mode in ("whole", "run")

    @property
    def form(self) -> str:
        """How the job was cut, where that isn't the default: ", block 4096, zigzag, no overlap"."""
        text = f", block {self.block}" if self.block else ""
        default = "contiguous" if self.job.mask.startswith("window ") and not self.stripe else "striped"
        if self.layout not in ("", default):
            text += f", {self.layout}"
        if self.stripe:
            text += f", stripe {self.stripe}"
        return text if self.overlap else text + ", no overlap"

    @property
    def name(self) -> str:
        """Who measured: "ringattn sm80_attention, p2p", "pytorch sdpa cudnn"."""
        text = f"{self.tool} {self.kernel}".rstrip()
        if self.world > 1:
            text += f", {self.transport}"
        return text + self.form + {"compute": ", compute only", "run": ", one run"}.get(self.mode, "")

    @property
    def key(self) -> tuple:
        """Points that differ in more stand side by side; what tells them apart is in their names."""
        return (self.name, self.world, self.job)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def as_count(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is no whole number, at least {least}")
    return value


def as_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def as_figure(value: Any) -> float:
    # A NaN would pass every gate.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no figure")
    return value


def asked(line: dict, flag: str) -> str | None:
    """What the command of a line says for a flag, the last time."""
    words = [as_text(word) for word in line.get("argv") or []]
    said = [after for word, after in zip(words, words[1:]) if word == flag]
    said += [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]
    return said[-1] if said else None


def parse(line: dict) -> Point:
    job = line["job"]
    mask = as_text(job["mask"])
    if "form" in job:  # of latents, which have the dims of the keys and values that they are expanded to
        mask += f", latents, {as_text(job['form'])}"
    found = Job(
        tokens=as_count(job["tokens"], 0),
        batch=as_count(job["batch"], 1),
        **{name: as_count(job[name], 1) for name in ("heads", "kv_heads", "head_dim", "head_dim_v")},
        dtype=as_text(job["dtype"]),
        mask=mask,
        source=as_text(job.get("source", "")),
    )
    ms, tflops, error = line["ms"], line["tflops_per_rank"], line.get("error")
    return Point(
        as_text(line["tool"]["name"]),
        as_text(line["kernel"]),
        as_text(line["transport"]),
        as_text(line.get("mode", "whole")),
        as_count(line["world"], 1),
        as_count(line.get("block", 0), 0),
        found,
        None if ms is None else as_figure(ms["median"]),
        None if tflops is None else as_figure(tflops),
        None if error is None else as_text(error),
        as_text(line.get("layout", "")),
        as_count(line.get("stripe", 0), 0) if asked(line, "--stripe") else 0,
        as_switch(line.get("overlap", True)),
    )


def check_rate(stated: float, job: Job, ms: float, world: int) -> None:
    """The line's figure is the one that its own job and time make, so the job is what was read into the line."""
    if job.flops is not None and not math.isclose(stated, job.flops / ms / world * 1e-9, rel_tol=2e-3):
        raise ValueError(f"{stated:g} TFLOP/s, where its job and time make {job.flops / ms / world * 1e-9:g}")


def differs(point: Point, line: dict) -> bool:
    """Whether a line's job is not the one that was timed: it has no --query-offset, but the figures and the command do."""
    job = point.job
    if job.source:  # of a file, with lengths and offsets of its own
        return False
    if job.flops is None:
        return asked(line, "--query-offset") is not None
    if point.tflops is None or not point.median_ms:
        return False
    try:
        check_rate(point.tflops, job, point.median_ms, point.world)
    except ValueError:
        return True
    return False


def parse_flash_attention_3(line: dict) -> Point:
    """A line of the program that measures FlashAttention-3, in bf16. It counts seq^2 / 2 pairs under a causal mask, where
    ours and the other peers count seq * (seq + 1) / 2: the rate is that of its time."""
    seq, batch = as_count(line["seq"], 1), as_count(line["batch"], 1)
    dims = {ours: as_count(line[theirs], 1) for ours, theirs in (("head_dim", "dim"), ("head_dim_v", "dim_v"))}
    heads = {name: as_count(line[name], 1) for name in ("heads", "kv_heads")}
    mask = "causal" if as_count(line["causal"], 0) else "full"
    job = Job(seq * batch, batch, **heads, **dims, dtype=as_text(line.get("dtype", "bf16")), mask=mask, source="")
    ms = as_figure(line["median_ms"])
    check_rate(as_figure(line["tflops"]), job, ms, 1)
    build = as_text(line["ptxas"])
    return Point(as_text(line["peer"]), "", "self", "whole", 1, 0, job, ms, job.flops / ms * 1e-9, None, build=build)


def parse_report(line: dict) -> Point | str:
    """A report of `ringattn run`, or why it is no point."""
    found, time = line["job"], line["time_ms"]
    if time is None or found is None:
        return "of runs that were not timed"
    if line.get("op", "attention") != "attention":
        return f"of runs of {as_text(line['op'])}"
    # A format that is the job's dtype is none: keys and values are as they are.
    if line["config"].get("cache-format") not in (None, "", found.get("dtype")) or line["config"].get("block-mask"):
        return "of runs over compressed keys or lists, which the report's job does not name"
    tokens, median, config = as_count(found["q_tokens"], 0), as_figure(time["median"]), line["config"]
    if not tokens or not median:
        return "of runs of nothing"
    if config.get("input") or config.get("query-offset") is not None:
        return "of runs whose input or offset bench does not have"
    batch = as_count(found["sequences"], 1)
    if found["softcap"] or found["sinks"] or found["k_tokens"] != tokens or tokens % batch:
        return "of runs of jobs that bench does not have (soft-cap, sinks, other keys than queries)"
    counts = {name: as_count(found[name], 1) for name in ("heads", "kv_heads", "head_dim", "head_dim_v")}
    job = Job(tokens, batch, **counts, dtype=as_text(found["dtype"]), mask=as_text(found["mask"]), source="")
    world, transport = as_count(line["world"]["ranks"], 1), as_text(line["world"]["transport"])
    tflops = as_figure(line["tflops_per_rank"])
    # The report has the tokens of all sequences, not each one's: only the rate tells whether they differ.
    if job.flops is None and batch > 1:
        return "of runs of sequences whose lengths can't be told under a window"
    try:
        check_rate(tflops, job, median, world)
    except ValueError:
        if batch == 1:
            raise
        return "of runs of sequences that differ in length"
    block = as_count(config.get("block") or 0, 0)
    form = {
        "layout": as_text((line.get("plan") or {}).get("layout", "")),
        "stripe": as_count(config.get("stripe") or 0, 0),
        "overlap": as_text(config.get("overlap", "on")) != "off",
    }
    return Point(OURS, as_text(line["kernel"]), transport, "run", world, block, job, median, tflops, None, **form)


def parse_kept_run(line: dict) -> Point:
    """What was kept of such a report: the job is what the command names, and the program's defaults."""
    words = as_text(line["command"]).split()
    named = {**RUN_DEFAULTS, **{flag: value for flag, value in zip(words, words[1:]) if flag in RUN_DEFAULTS}}
    heads, kv_heads, dim = (as_count(int(named[flag]), 1) for flag in ("--heads", "--kv-heads", "--head-dim"))
    tokens, world, ms = as_count(line["tokens"], 1), as_count(line["ranks"], 1), as_figure(line["time_ms"])
    job = Job(tokens, 1, heads, kv_heads, dim, dim, named["--dtype"], named["--mask"], "")
    tflops = as_figure(line["tflops_per_rank"])
    check_rate(tflops, job, ms, world)
    return Point(OURS, "", as_text(line["transport"]), "run", world, 0, job, ms, tflops, None)


@dataclass
class File:
    """What became of a file's lines: each is a point, or left out."""

    path: str
    lines: int = 0
    points: dict[tuple, Point] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)  # why: how many lines
    others: Counter[str] = field(default_factory=Counter)  # left out as no points, by what they call themselves

    def note(self) -> str | None:
        parts = [f"{count} {why}" for why, count in self.left_out.most_common()]
        if self.others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.others.most_common())
            parts.insert(0, f"{sum(self.others.values())} of other formats ({kinds})")
        total = sum(self.others.values()) + sum(self.left_out.values())
        return f"{self.path}: {total} of {self.lines} lines left out: {', '.join(parts)}" if parts else None

    def leave_out(self, key: tuple, newer: str) -> None:
        """A point of this file that a newer file has, or a line of this file further down."""
        del self.points[key]
        where = os.path.basename(newer) if os.path.dirname(newer) == os.path.dirname(self.path) else newer
        self.left_out["measured again further down" if newer == self.path else f"measured again in {where}"] += 1

    def take(self, line: dict) -> Point | None:
        """The line's point, or None where it was counted as left out."""
        schema, what = line.get("schema"), line.get("what")
        point: Point | str | None = None
        if schema == SCHEMA and "state_dim" in line.get("job", {}):
            point = "of scans, which are not attention"
        elif schema == SCHEMA and "page_size" in line.get("job", {}):
            point = "of decode steps"
        elif schema == SCHEMA:
            # Sums have errors instead of times, and nothing to compare here.
            point = "of the accuracy of sums, not timed" if "accuracy" in line else parse(line)
        elif schema == REPORT and line.get("command") == "run":
            point = parse_report(line)
        elif schema is None and "peer" in line and "ptxas" in line:
            point = parse_flash_attention_3(line)
        elif schema is None and what == "run":
            point = parse_kept_run(line)
        if schema == SCHEMA and isinstance(point, Point) and differs(point, line):
            point = "of jobs that differ from what their line names"
        if isinstance(point, Point):
            return point
        if point is not None:
            self.left_out[point] += 1
        elif schema == REPORT:
            self.others[f"reports of {line.get('command')}"] += 1
        elif schema is not None:
            self.others[str(schema)] += 1
        else:
            self.others["meta" if line.get("meta") else what if isinstance(what, str) else "unnamed"] += 1
        return None


def read_file(path: str) -> File:
    try:
        with open(path, encoding="utf-8") as opened:
            whole = opened.read()
    except OSError as error:
        raise BadLine(f"{path} can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadLine(f"{path} can't be read (it is no UTF-8 text)") from error
    # As `ringattn run --json` writes its report: one document of several lines.
    lines = [whole] if whole.lstrip().partition("\n")[0].strip() == "{" else whole.split("\n")
    file = File(path)
    last: dict[tuple, dict[str, Point]] = {}  # of each build
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            point = file.take(modern(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise BadLine(f"line {number} of {path} is no whole point ({type(error).__name__}: {error})") from error
        file.lines += 1
        if point is None:
            continue
        builds = last[point.key] = last.pop(point.key, {})  # in the order of their last lines
        if point.build in builds:
            file.left_out["measured again further down"] += 1
        builds[point.build] = point
    for key, builds in last.items():
        file.points[key] = max(builds.values(), key=lambda point: point.tflops or 0.0)
        if len(builds) > 1:
            file.left_out["slower than as another ptxas assembled it"] += len(builds) - 1
    return file


def read_files(paths: Iterable[str]) -> list[File]:
    """What is measured anew replaces: a point stands in the last file that has it. A failure of ours names neither kernel
    nor layout, so whatever is measured of its job later replaces it."""
    files: list[File] = []
    holders: dict[tuple, File] = {}
    failures: dict[tuple, tuple] = {}  # the key of the point that failed last
    for path in paths:
        file = read_file(path)
        for key, point in list(file.points.items()):
            if key in holders:
                holders[key].leave_out(key, path)
            holders[key] = file
            if point.tool != OURS:
                continue
            effort = (point.world, point.transport, point.block, point.mode, point.job)
            failure = failures.pop(effort, key)
            if failure != key:
                holders.pop(failure).leave_out(failure, path)
            if point.error:
                failures[effort] = key
        files.append(file)
    return files


def read(paths: Iterable[str]) -> list[Point]:
    return [point for file in read_files(paths) for point in file.points.values()]


def size(tokens: int) -> str:
    """8192 as 8k, 2097152 as 2m."""
    for shift, letter in ((20, "m"), (10, "k")):
        if tokens and tokens % (1 << shift) == 0:
            return f"{tokens >> shift}{letter}"
    return str(tokens)
