# SPDX-License-Identifier: Apache-2.0
"""Reads result lines: of `ringattn bench --jsonl`, bench/peers and the programs of bench/, reports of `ringattn run` (one
per line, or a file as it was written), and lines of the older program that measured FlashAttention-3. Other lines are
left out and counted.

An attention job that one tool measured several times counts as it was measured last: the last file that has it, in the
order given, and the last line in that file. FlashAttention-3 counts as its fastest build (ptxas version) in a file. A
decode step counts as the median of its readings in a file; with several files, the last one that has it counts, but
ringattn's time stays with the peers that it was measured in turn with.

bench/results/shown.json names the files of each group of figures that the pages show."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aliases import modern

BENCH, DECODE, SSM, SPARSE = "ringattn.bench/2", "ringattn.decode/1", "ringattn.ssm/1", "ringattn.sparse/1"
REPORT = 1  # the schema of a report of `ringattn run`
OURS = "ringattn"
# The defaults of `ringattn run` when its reports were kept as lines without a job.
RUN_DEFAULTS = {"--heads": "8", "--kv-heads": "2", "--head-dim": "128", "--dtype": "bf16", "--mask": "causal"}
ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"

Line = dict[str, Any]
Curve = list[tuple[float, float]]


class BadLine(Exception):
    """A file that can't be read as result lines; the text says where and why."""


# ---- Values of a line

def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def as_count(value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is not a whole number, at least {least}")
    return value


def as_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def as_figure(value: Any) -> float:
    # A NaN would pass every gate.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a finite figure")
    return value


def counts(line: Line, *names: str) -> dict[str, int]:
    return {name: as_count(line[name]) for name in names}


def flag_value(line: Line, flag: str) -> str | None:
    """The value of a flag in a line's command. If it is given several times, the last one counts."""
    words = [as_text(word) for word in line.get("argv") or []]
    values = [after for word, after in zip(words, words[1:]) if word == flag]
    values += [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def size(tokens: int) -> str:
    """8192 as 8k, 2097152 as 2m."""
    for shift, letter in ((20, "m"), (10, "k")):
        if tokens and tokens % (1 << shift) == 0:
            return f"{tokens >> shift}{letter}"
    return str(tokens)


def dims(job: Any) -> str:
    """128, or 192/128 if V has another head dim."""
    return f"{job.head_dim}" if job.head_dim == job.head_dim_v else f"{job.head_dim}/{job.head_dim_v}"


def reports(lines: Iterable[Line], command: str) -> list[Line]:
    return [line for line in lines if line.get("schema") == REPORT and line.get("command") == command]


def timed_lines(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.get("schema") == BENCH and line.get("ms")]


def medians(values: Iterable[tuple[Hashable, float]]) -> dict[Any, float]:
    found = defaultdict(list)
    for key, value in values:
        found[key].append(value)
    return {key: statistics.median(several) for key, several in found.items()}


def is_missing(line: Line) -> bool:
    """Whether the line is from a peer that was not installed, and therefore not measured."""
    return str(line.get("error", "")).startswith("No module named")


# ---- Attention

@dataclass(frozen=True)
class Job:
    """Points with the same job and number of ranks can be compared."""

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str
    source: str = ""

    @property
    def seq(self) -> int:
        return self.tokens // self.batch

    @property
    def kind(self) -> str:
        """Everything but the length: "bf16 32/8 x 128 causal"."""
        text = f"{self.dtype} {self.heads}/{self.kv_heads} x {dims(self)} {self.mask}"
        return f"{text}, {self.source}" if self.source else text

    @property
    def flops(self) -> float | None:
        """FLOPs as ringattn and the peers count them; None for a mask that is neither causal nor full."""
        pairs = {"causal": self.seq * (self.seq + 1) / 2, "full": float(self.seq) ** 2}.get(self.mask)
        return None if pairs is None else 2.0 * self.batch * pairs * self.heads * (self.head_dim + self.head_dim_v)


@dataclass(frozen=True)
class Point:
    """A speed of attention."""

    tool: str
    kernel: str
    transport: str
    mode: str  # "whole"; "run": a whole job that ran once; "compute": ringattn without communication
    world: int
    block: int  # as requested; 0: chosen by the plan
    job: Job
    median_ms: float | None  # None: see error
    tflops: float | None  # per rank
    error: str | None
    layout: str = ""  # of ringattn; empty: not stated
    stripe: int = 0  # as requested; 0: chosen from the kernel's tiles
    overlap: bool = True
    build: str = ""  # the ptxas version of FlashAttention-3

    @property
    def ours(self) -> bool:
        return self.tool == OURS and self.mode in ("whole", "run")

    @property
    def speed(self) -> float | None:
        return self.tflops

    @property
    def text(self) -> str:
        if self.tflops is None:
            return f"can't ({self.error})" if self.error else "—"
        return f"{self.tflops:.1f}" if self.tflops >= 10 else f"{self.tflops:.4f}"

    @property
    def form(self) -> str:
        """The settings that differ from the default: ", block 4096, zigzag, no overlap"."""
        text = f", block {self.block}" if self.block else ""
        default = "contiguous" if self.job.mask.startswith("window ") and not self.stripe else "striped"
        if self.layout not in ("", default):
            text += f", {self.layout}"
        if self.stripe:
            text += f", stripe {self.stripe}"
        return text if self.overlap else text + ", no overlap"

    @property
    def name(self) -> str:
        """"ringattn sm80_attention, p2p", "pytorch sdpa cudnn"."""
        text = f"{self.tool} {self.kernel}".rstrip()
        if self.world > 1:
            text += f", {self.transport}"
        return text + self.form + {"compute": ", compute only", "run": ", one run"}.get(self.mode, "")

    @property
    def key(self) -> tuple:
        """A newer point with the same key replaces this one."""
        return (self.name, self.world, self.job)


def job_of(found: Line, tokens: int, batch: int, mask: str, source: str = "") -> Job:
    shape = counts(found, "heads", "kv_heads", "head_dim", "head_dim_v")
    return Job(tokens, batch, **shape, dtype=as_text(found["dtype"]), mask=mask, source=source)


def rate_agrees(stated: float, job: Job, ms: float, world: int) -> bool:
    """Whether the line's rate follows from its job and time, which shows that this job was timed."""
    return job.flops is None or math.isclose(stated, job.flops / ms / world * 1e-9, rel_tol=2e-3)


def need_rate(stated: float, job: Job, ms: float, world: int) -> None:
    if not rate_agrees(stated, job, ms, world):
        raise ValueError(f"{stated:g} TFLOP/s, where its job and time make {job.flops / ms / world * 1e-9:g}")


def parse_bench(line: Line) -> Point | str:
    """A line of `ringattn bench` or of a peer as a point, or the reason why it is not a speed of attention."""
    found = line["job"]
    for member, why in (("state_dim", "of scans, which are not attention"), ("page_size", "of decode steps")):
        if member in found:
            return why
    op = as_text(found.get("op", "attention"))
    if op not in ("attention", "mla"):
        return f"of {op}"
    if "accuracy" in line:
        return "of the accuracy of sums, not timed"
    mask = as_text(found["mask"])
    if "form" in found:  # latents; the job has the dims of the expanded keys and values
        mask += f", latents, {as_text(found['form'])}"
    job = job_of(found, as_count(found["tokens"], 0), as_count(found["batch"]), mask, as_text(found.get("source", "")))
    ms, tflops, error = line["ms"], line["tflops_per_rank"], line.get("error")
    point = Point(
        as_text(line["tool"]["name"]),
        as_text(line["kernel"]),
        as_text(line["transport"]),
        as_text(line.get("mode", "whole")),
        as_count(line["world"]),
        as_count(line.get("block", 0), 0),
        job,
        None if ms is None else as_figure(ms["median"]),
        None if tflops is None else as_figure(tflops),
        None if error is None else as_text(error),
        as_text(line.get("layout", "")),
        as_count(line.get("stripe", 0), 0) if flag_value(line, "--stripe") else 0,
        as_switch(line.get("overlap", True)),
    )
    if job.source:  # a file has lengths and offsets of its own
        return point
    # A line does not have its --query-offset, but the command and the rate show it.
    offset = flag_value(line, "--query-offset") is not None if job.flops is None else (
        point.tflops is not None and point.median_ms and not rate_agrees(point.tflops, job, point.median_ms, point.world))
    return "of jobs that differ from what their line names" if offset else point


def parse_flash_attention_3(line: Line) -> Point:
    """A line of the older program that measured FlashAttention-3 in bf16. It counts seq^2 / 2 pairs under a causal mask,
    and the others seq * (seq + 1) / 2, so the rate is computed from the time."""
    seq, batch = as_count(line["seq"]), as_count(line["batch"])
    shape = {**line, "head_dim": line["dim"], "head_dim_v": line["dim_v"], "dtype": line.get("dtype", "bf16")}
    job = job_of(shape, seq * batch, batch, "causal" if as_count(line["causal"], 0) else "full")
    ms = as_figure(line["median_ms"])
    need_rate(as_figure(line["tflops"]), job, ms, 1)
    tool, build = as_text(line["peer"]), as_text(line["ptxas"])
    return Point(tool, "", "self", "whole", 1, 0, job, ms, job.flops / ms * 1e-9, None, build=build)


def parse_report(line: Line) -> Point | str:
    """A report of `ringattn run`, or the reason why it is not a point."""
    found, time, config = line["job"], line["time_ms"], line["config"]
    if time is None or found is None:
        return "of runs that were not timed"
    if line.get("op", "attention") != "attention":
        return f"of runs of {as_text(line['op'])}"
    # A cache format that is the job's dtype leaves keys and values as they are.
    if config.get("cache-format") not in (None, "", found.get("dtype")) or config.get("block-mask"):
        return "of runs with a quantized cache or a block mask, which the report's job does not name"
    tokens, median = as_count(found["q_tokens"], 0), as_figure(time["median"])
    if not tokens or not median:
        return "of empty runs"
    if config.get("input") or config.get("query-offset") is not None:
        return "of runs whose input or offset bench does not have"
    batch = as_count(found["sequences"])
    if found["softcap"] or found["sinks"] or found["k_tokens"] != tokens or tokens % batch:
        return "of runs of jobs that bench does not have (soft-cap, sinks, other keys than queries)"
    job = job_of(found, tokens, batch, as_text(found["mask"]))
    world, transport = as_count(line["world"]["ranks"]), as_text(line["world"]["transport"])
    tflops = as_figure(line["tflops_per_rank"])
    # The report has only the total number of tokens of all sequences, so only the rate shows whether their lengths differ.
    if job.flops is None and batch > 1:
        return "of runs of sequences whose lengths can't be told under a window"
    if batch > 1 and not rate_agrees(tflops, job, median, world):
        return "of runs of sequences that differ in length"
    need_rate(tflops, job, median, world)
    block = as_count(config.get("block") or 0, 0)
    form = {
        "layout": as_text((line.get("plan") or {}).get("layout", "")),
        "stripe": as_count(config.get("stripe") or 0, 0),
        "overlap": as_text(config.get("overlap", "on")) != "off",
    }
    return Point(OURS, as_text(line["kernel"]), transport, "run", world, block, job, median, tflops, None, **form)


def parse_kept_run(line: Line) -> Point:
    """A report that was kept without its job, which follows from the command and the program's defaults."""
    words = as_text(line["command"]).split()
    named = {**RUN_DEFAULTS, **{flag: value for flag, value in zip(words, words[1:]) if flag in RUN_DEFAULTS}}
    heads, kv_heads, dim = (as_count(int(named[flag])) for flag in ("--heads", "--kv-heads", "--head-dim"))
    tokens, world, ms = as_count(line["tokens"]), as_count(line["ranks"]), as_figure(line["time_ms"])
    job = Job(tokens, 1, heads, kv_heads, dim, dim, named["--dtype"], named["--mask"])
    tflops = as_figure(line["tflops_per_rank"])
    need_rate(tflops, job, ms, world)
    return Point(OURS, "", as_text(line["transport"]), "run", world, 0, job, ms, tflops, None)


# ---- Decode steps

FAR_BEYOND_CACHE = 512 << 20  # bytes that are read between two uses of a cache, at least
CUDNN, FLASH, FLASH_MLA = "cuDNN", "FlashAttention-2", "FlashMLA"
STEP_PEERS = {"cudnn": CUDNN, "flash_attention_2": FLASH, "flash_mla": FLASH_MLA, "math": "math"}
CHOSEN = ("sm90_attention", "sm90_mla")  # the kernels that are chosen by default; any other is a form of its own
# The time that a bf16 step with 32/8 heads of 128 may take, relative to cuDNN's time, by sequences and keys.
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
    """Times of the same step can be compared."""

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
        text = f"{self.dtype}, {self.heads}/{self.kv_heads} heads of {dims(self)}"
        text += f", {self.rows} rows" if self.rows > 1 else ""
        return text + (f", pages of {self.page_size}" if self.page_size else "")

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.batch} x {size(self.keys)}"

    @property
    def key_bytes(self) -> int:
        """K and V of one key of all heads."""
        return self.kv_heads * (self.head_dim + self.head_dim_v) * {"bf16": 2, "fp16": 2}[self.dtype]

    @property
    def seq(self) -> int:
        return self.keys

    @property
    def cache_bytes(self) -> int:
        """One cache, in whole pages."""
        page = self.page_size or 1
        return self.batch * -(-self.keys // page) * page * self.key_bytes

    @property
    def goal(self) -> float | None:
        return GOALS.get((self.batch, self.keys)) if self.kind == "bf16, 32/8 heads of 128" else None


@dataclass(frozen=True)
class StepTime:
    who: str
    form: str  # of ringattn: empty where it chose kernel and form itself
    job: Step
    us: float | None  # None: see error
    error: str

    world = 1

    @property
    def speed(self) -> float | None:
        return 1 / self.us if self.us else None

    @property
    def text(self) -> str:
        """Microseconds, with three significant digits."""
        if self.us is None:
            return "can't"
        return f"{self.us:.1f}" if self.us < 99.95 else f"{self.us:.0f}"

    @property
    def name(self) -> str:
        return f"{self.who}, {self.form}" if self.form else self.who


StepTimes = dict[tuple[str, str, Step], StepTime]  # by who, form and step


def parse_step(line: Line) -> StepTime:
    job = line["job"]
    numbers = counts(job, "batch", "keys", "rows", "heads", "kv_heads", "head_dim", "head_dim_v")
    step = Step(**numbers, page_size=as_count(job["page_size"], 0), dtype=as_text(job["dtype"]))
    tool, kernel, form = as_text(line["tool"]["name"]), as_text(line["kernel"]), as_text(line["form"])
    caches, launches = as_count(line["caches"]), as_count(line["launches"])
    if caches * step.cache_bytes < FAR_BEYOND_CACHE or launches % caches:
        raise ValueError(f"{launches} launches over {caches} caches find parts of them in the L2 cache")
    us = None if line["us"] is None else as_figure(line["us"]["median"])
    error = "" if us is not None else as_text(line["error"])
    if tool != OURS:
        return StepTime(STEP_PEERS[kernel], form, step, us, error)
    return StepTime(tool, form if kernel in CHOSEN else f"{kernel}, {form}" if form else kernel, step, us, error)


def typical(readings: list[StepTime]) -> StepTime:
    """The median; failures are ignored unless all failed."""
    timed = [reading for reading in readings if reading.us is not None]
    if not timed:
        return readings[-1]
    return dataclasses.replace(timed[-1], us=statistics.median(reading.us for reading in timed))


def step_times(readings: Iterable[StepTime]) -> StepTimes:
    found: dict[tuple[str, str, Step], list[StepTime]] = {}
    for reading in readings:
        found.setdefault((reading.who, reading.form, reading.job), []).append(reading)
    return {key: typical(several) for key, several in found.items()}


def with_peers(times: StepTimes) -> set[Step]:
    """The steps that have a time of ringattn and one of a peer."""
    ours, theirs = ({step for who, _, step in times if (who == OURS) == mine} for mine in (True, False))
    return ours & theirs


def newer_steps(found: StepTimes, newer: StepTimes) -> StepTimes:
    """A newer file replaces all variants of a peer's step, and each variant of ringattn's, unless only the older file measured
    ringattn in turn with peers."""
    stays = with_peers(found) - with_peers(newer)
    again = {(who, step) for who, _, step in newer if who != OURS}
    kept = {key: one for key, one in found.items() if (key[0], key[2]) not in again}
    return kept | {key: one for key, one in newer.items() if key not in kept or key[2] not in stays}


def best_steps(times: StepTimes) -> dict[tuple[str, Step], StepTime]:
    """By tool and step: the variant that ringattn chose, and the fastest variant of each peer."""
    best: dict[tuple[str, Step], StepTime] = {}
    for (who, form, step), time in times.items():
        if who == OURS:
            if not form:
                best[who, step] = time
            continue
        before = best.get((who, step))
        if before is None or before.us is None or (time.us is not None and time.us < before.us):
            best[who, step] = time
    return best


def step_share(ours: StepTime | None, theirs: StepTime | None) -> float | None:
    """ringattn's time divided by the peer's: below 1 ringattn is faster."""
    return ours.us / theirs.us if ours and theirs and ours.us and theirs.us else None


# ---- Files

@dataclass
class File:
    """How a file's lines were read: as points, as times of decode steps, or left out."""

    path: str
    lines: list[Line] = field(default_factory=list)
    points: dict[tuple, Point] = field(default_factory=dict)
    steps: list[StepTime] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # reason: number of lines
    others: Counter[str] = field(default_factory=Counter)  # left out for their format: number of lines

    def note(self) -> str | None:
        parts = [f"{count} {why}" for why, count in self.left_out.most_common()]
        if self.others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.others.most_common())
            parts.insert(0, f"{sum(self.others.values())} of other formats ({kinds})")
        total = sum(self.others.values()) + sum(self.left_out.values())
        return f"{self.path}: {total} of {len(self.lines)} lines left out: {', '.join(parts)}" if parts else None

    def replace_point(self, key: tuple, newer: str) -> None:
        """A newer file has the point, or a line further down in this file."""
        del self.points[key]
        where = os.path.basename(newer) if os.path.dirname(newer) == os.path.dirname(self.path) else newer
        self.left_out["measured again further down" if newer == self.path else f"measured again in {where}"] += 1

    def take(self, line: Line) -> Point | None:
        """The line's point; None if the line is a decode step or is left out."""
        self.lines.append(line)
        schema, what = line.get("schema"), line.get("what")
        point: Point | str
        if schema == DECODE:
            self.steps.append(parse_step(line))
            return None
        if schema == BENCH:
            point = parse_bench(line)
        elif schema == REPORT and line.get("command") == "run":
            point = parse_report(line)
        elif schema is None and "peer" in line and "ptxas" in line:
            point = parse_flash_attention_3(line)
        elif schema is None and what == "run":
            point = parse_kept_run(line)
        else:
            unnamed = "meta" if line.get("meta") else what if isinstance(what, str) else "unnamed"
            other = f"reports of {line.get('command')}" if schema == REPORT else unnamed if schema is None else str(schema)
            self.others[other] += 1
            return None
        if isinstance(point, Point):
            return point
        self.left_out[point] += 1
        return None


def read_file(path: str) -> File:
    try:
        whole = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise BadLine(f"{path} can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadLine(f"{path} can't be read (it is not UTF-8 text)") from error
    # `ringattn run --json` writes its report as one document of several lines.
    texts = [whole] if whole.lstrip().partition("\n")[0].strip() == "{" else whole.split("\n")
    file = File(path)
    last: dict[tuple, dict[str, Point]] = {}  # by key and build
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            point = file.take(modern(json.loads(text)))
        except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise BadLine(f"line {number} of {path} is not a whole result ({type(error).__name__}: {error})") from error
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


def read_files(paths: Iterable[str | pathlib.Path]) -> list[File]:
    """The last file that has a point counts. A failure of ringattn has neither kernel nor layout, so any later measurement of
    its job replaces it."""
    files: list[File] = []
    holders: dict[tuple, File] = {}
    failures: dict[tuple, tuple] = {}  # the key of the point that failed last
    for path in map(str, paths):
        file = read_file(path)
        for key, point in list(file.points.items()):
            if key in holders:
                holders[key].replace_point(key, path)
            holders[key] = file
            if point.tool != OURS:
                continue
            effort = (point.world, point.transport, point.block, point.mode, point.job)
            failure = failures.pop(effort, key)
            if failure != key:
                holders.pop(failure).replace_point(failure, path)
            if point.error:
                failures[effort] = key
        files.append(file)
    return files


def points_of(files: Iterable[File]) -> list[Point]:
    return [point for file in files for point in file.points.values()]


def steps_of(files: Iterable[File]) -> StepTimes:
    found: StepTimes = {}
    for file in files:
        found = newer_steps(found, step_times(file.steps))
    return found


# ---- Pairs of a result of ringattn and one of a peer

Result = Point | StepTime


@dataclasses.dataclass(frozen=True)
class Pair:
    """A result of ringattn, and a peer's result for the same job on the same number of ranks."""

    ours: Result
    theirs: Result | None

    @property
    def ratio(self) -> float | None:
        """Above 1 ringattn is faster. 0 for a job that only the peer can do, which then misses every goal."""
        return (self.ours.speed or 0.0) / self.theirs.speed if self.theirs and self.theirs.speed else None


def pair_points(found: list[Point]) -> list[Pair]:
    pairs = []
    for mine in (point for point in found if point.ours):
        same = [p for p in found if not p.ours and p.world == mine.world and p.job == mine.job]
        # A compute-only run is compared with the whole run of the same transport, blocks and layout.
        compute_only = dataclasses.replace(mine, mode="compute").key if mine.mode == "whole" else None
        pairs += [Pair(mine, p) for p in same if p.mode == "whole" or p.key == compute_only] or [Pair(mine, None)]
    return pairs


def pair_steps(times: StepTimes, forms: bool) -> list[Pair]:
    """Each variant, or only the variant that ringattn chose and the fastest one of each peer. A paged cache is also compared
    with the dense one."""
    shown = list(times.values() if forms else best_steps(times).values())
    pairs = []
    for mine in (time for time in shown if time.who == OURS):
        dense = dataclasses.replace(mine.job, page_size=0)
        same = [time for time in shown if time.who != OURS and time.job == mine.job]
        if mine.job.page_size:
            same += [time for time in shown if (time.who, time.form, time.job) == (OURS, mine.form, dense)]
        pairs += [Pair(mine, theirs) for theirs in same] or [Pair(mine, None)]
    return pairs


def pair(files: list[File], forms: bool = False) -> list[Pair]:
    """Attention, and then decode steps, each in the order of their jobs."""
    def place(row: Pair) -> tuple:
        ours, job = row.ours, row.ours.job
        batch = job.batch if isinstance(ours, StepTime) else 0
        return (job.kind, ours.world, batch, job.seq, ours.name, row.theirs.name if row.theirs else "")

    return sorted(pair_points(points_of(files)), key=place) + sorted(pair_steps(steps_of(files), forms), key=place)


def misses(pairs: list[Pair], peer: str, least: float) -> list[str]:
    """A peer that was not measured also counts as a miss."""
    seen = [row for row in pairs if row.theirs and peer in row.theirs.name and row.ratio is not None]
    return [f"{row.ours.job.kind}, {size(row.ours.job.seq)} on {row.ours.world}: {row.ratio:.3f} of {row.theirs.name}, "
            f"at least {least:g} is needed" for row in seen if row.ratio < least] if seen else [
                f"no point has a peer named {peer}"]  # fmt: skip


def missed_goals(times: StepTimes) -> list[str]:
    best = best_steps(times)
    wanted = [step for name, step in best if name == CUDNN and step.goal and best[name, step].us is not None]
    found = [] if wanted else [f"no step with a goal was measured for {CUDNN}"]
    for step in sorted(wanted):
        share = step_share(best.get((OURS, step)), best[CUDNN, step])
        if share is None or share > step.goal:
            text = "ringattn was not measured" if share is None else f"{share:.3f} of the time of {CUDNN}"
            found.append(f"{step.name}: {text}, at most {step.goal:.3f} is wanted")
    return found


def contents(files: list[File]) -> str:
    """Describes files without results of ringattn."""
    kinds = Counter(f"points of {point.tool}" for file in files for point in file.points.values())
    for file in files:
        kinds.update(file.others)
        kinds.update(file.left_out)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no lines"


# ---- Curves and bars of pictures

def speed_curves(found: Iterable[Point]) -> dict[str, dict[str, Curve]]:
    """For each kind of job and each tool, ringattn first: (length, TFLOP/s per rank), ascending."""
    kinds: dict[str, dict[str, Curve]] = defaultdict(lambda: defaultdict(list))
    for point in sorted(found, key=lambda point: (not point.name.startswith(OURS), point.name, point.world, point.job.seq)):
        if point.tflops is not None and point.job.seq:
            ranks = f", {point.world} ranks" if point.world > 1 else ""
            kinds[point.job.kind][point.name + ranks].append((point.job.seq, point.tflops))
    return dict(sorted(kinds.items()))


def scaling_curves(found: Iterable[Point]) -> dict[str, Curve]:
    """For each job and tool that was also measured on one rank: (ranks, rate of a rank relative to one rank alone)."""
    worlds: dict[tuple[Job, str, str, str, str], Curve] = defaultdict(list)
    alone: dict[tuple[Job, str, str], float] = {}
    for point in found:
        key = (point.job, point.tool, point.kernel)
        if not point.tflops or point.mode != "whole":
            continue
        if point.world > 1:
            worlds[(*key, point.transport, point.form)].append((point.world, point.tflops))
        elif not point.form or key not in alone:
            alone[key] = point.tflops
    curves = {}
    for (job, tool, kernel, transport, form), rates in worlds.items():
        if base := alone.get((job, tool, kernel)):
            name = f"{tool} {kernel}, {transport}{form}, {size(job.seq)}, {job.kind}"
            curves[name] = [(1, 1.0), *sorted((ranks, rate / base) for ranks, rate in rates)]
    return dict(sorted(curves.items()))


def compression_curves(lines: Iterable[Line]) -> dict[str, dict[str, Curve]]:
    """For each kind of data and each method: (bytes per token and head, correct bits of O), ascending. The first word of
    a format names its method."""
    kinds: dict[str, dict[str, Curve]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        kinds[line["data"]][line["method"].split()[0]].append((line["bytes"], max(0.0, -math.log2(line["change_of_o"]))))
    return {kind: {name: sorted(curve) for name, curve in methods.items()} for kind, methods in kinds.items()}


def timeline_bars(trace: Line) -> tuple[list[str], list[tuple[int, str, float, float]]]:
    """The ranks' names, and (rank, lane, begin, duration) in milliseconds of each bar that lasts."""
    names: dict[int, str] = {}
    bars = []
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["dur"] > 0:
            bars.append((event["pid"], event["cat"], event["ts"] / 1e3, event["dur"] / 1e3))
    return [names[rank] for rank in sorted(names)], bars


# ---- Groups of figures that the pages show

# For each group of bench/run.sh --readme: the required part, and all parts that belong to it. If two files measured the
# same job, the later one counts.
PARTS = {
    "one-gpu": ("one-gpu", ("one-gpu-shapes", "one-gpu")),
    "scaling": ("scaling", ("ring-p2p", "ring-nccl", "ring-peers", "scaling")),
    "two-million": ("two-million", ("two-million",)),
    "decode": ("decode-peers", ("decode-peers",)),
    "pages": ("decode", ("decode",)),
    "sparse": ("sparse-peers", ("sparse-peers",)),
    "latents": ("latents-peers", ("latents-peers",)),
    "scans": ("scans-peers", ("scans-peers",)),
    "compressed": ("compressed", ("compressed",)),
    "compressed-ring": ("compressed-ring", ("compressed-ring",)),
    "latent-ring": ("latent-two-million", ("latent-ring", "latent-two-million", "latent-oracle")),
    "latent-prefill": ("latent-ring", ("latent-ring", "latent-two-million", "latent-oracle")),
    "scan-ranks": ("scan-ranks", ("scan-oracle", "scan-ranks")),
    "decode-ranks": ("decode-ranks", ("decode-ranks",)),
}
# Peers that are separate packages; the other peers are part of PyTorch.
PACKAGES = {
    "flash_attention_3": "FlashAttention-3",
    "flash_attn": "FlashAttention-2",
    "flash_mla": "FlashMLA",
    "mamba_ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
}


def commit_of(line: Line) -> str:
    """Seven digits of the commit, and "-dirty" if the checkout had changes."""
    tool = line.get("tool") or {}
    full = line.get("git") or line.get("beside") or tool.get("git") or "unknown"
    digits, _, changes = full.partition("-")
    return digits[:7] + ("-dirty" if changes or tool.get("dirty") else "")


class Group:
    """The figures of some files of bench/results."""

    def __init__(self, names: Iterable[str], results: pathlib.Path = RESULTS):
        self.names = tuple(names)
        files = read_files(results / name for name in self.names)
        self.lines = tuple(line for file in files for line in file.lines)
        self.points = points_of(files)
        self.steps = step_times(reading for file in files for reading in file.steps)

    @property
    def commits(self) -> tuple[str, ...]:
        """The builds that were measured, in the order of the files."""
        return tuple(dict.fromkeys(map(commit_of, self.lines)))

    @property
    def dates(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pathlib.PurePath(name).name[: len("2026-01-01")] for name in self.names))

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers and their versions."""
        found = {}
        for line in self.lines:
            tool = line.get("tool") or {}
            if line.get("schema") in (BENCH, DECODE, SPARSE, SSM) and tool["name"] != OURS and not is_missing(line):
                found[f"{PACKAGES.get(tool['name'], 'PyTorch')} {tool['version']}"] = None
            elif "peer" in line and "source" in line:
                found[line["source"]] = None
        return tuple(found)

    @property
    def device(self) -> str:
        """"NVIDIA H200"; empty where no line names a GPU."""
        for line in self.lines:
            devices = line.get("devices") or (line.get("world") or {}).get("devices") if "schema" in line else None
            for device in devices or []:
                return re.sub(r"^GPU \d+: | \(sm_\d+\)$", "", device)
        return ""

    @property
    def short_device(self) -> str:
        """For headings: "H200", "CPU"."""
        found = re.match(r"NVIDIA (\w+)", self.device) or re.match(r"nvidia-(\w+)", self.names[0])
        return found[1].upper() if found else "CPU"


def read_selection(results: pathlib.Path = RESULTS) -> dict[str, list[str]]:
    path = results / "shown.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadLine(f"{path.name} can't be read ({error})") from error


def newest(gpu: str, part: str, results: pathlib.Path) -> tuple[str, str] | None:
    """Folder and date of a part's newest file; of several hosts on one day, the one with the most GPUs."""
    found = []
    for path in results.glob(f"{gpu}*/*-{part}.jsonl"):
        folder, date = path.parent.name, path.name.removesuffix(f"-{part}.jsonl")
        several = re.fullmatch(re.escape(gpu) + r"(?:-x(\d+))?", folder)
        if several and re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            found.append((date, int(several[1] or 1), folder))
    if not found:
        return None
    date, _, folder = max(found)
    return folder, date


def select(gpu: str, selection: dict[str, list[str]], results: pathlib.Path = RESULTS) -> dict[str, list[str]]:
    """The selection with a GPU's newest results; a group has one commit."""
    chosen = dict(selection)
    for group, (needed, parts) in PARTS.items():
        found = newest(gpu, needed, results)
        if found is None:
            continue
        folder, date = found
        commits = set(Group([f"{folder}/{date}-{needed}.jsonl"], results).commits)
        files = [f"{folder}/{date}-{part}.jsonl" for part in parts]
        present = [name for name in files if (results / name).exists()]
        chosen[group] = [name for name in present if set(Group([name], results).commits) <= commits]
    return chosen
