# SPDX-License-Identifier: Apache-2.0
"""Points of benchmarks out of files of lines (schema "ringattn.bench/1"), as `ringattn bench --jsonl` and bench/peers
write them. Lines of other schemas are left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SCHEMA = "ringattn.bench/1"
OURS = "ringattn"


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


@dataclass(frozen=True)
class Point:
    tool: str
    kernel: str
    transport: str
    mode: str  # "whole", or "folds": ours without transfers
    world: int
    block: int  # asked for; 0: chosen by the plan
    job: Job
    median_ms: float | None  # None: see error
    tflops: float | None  # of a rank
    error: str | None

    @property
    def ours(self) -> bool:
        return self.tool == OURS and self.mode == "whole"

    @property
    def name(self) -> str:
        """Who measured: "ringattn sm80_fold, p2p", "pytorch sdpa cudnn"."""
        text = f"{self.tool} {self.kernel}"
        if self.world > 1:
            text += f", {self.transport}"
        if self.block:
            text += f", block {self.block}"
        return text + (", folds alone" if self.mode == "folds" else "")


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def as_count(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{value!r} is no whole number, at least {least}")
    return value


def as_figure(value: Any) -> float:
    # A NaN would pass every gate.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no figure")
    return value


def parse(line: dict) -> Point:
    job = line["job"]
    found = Job(
        tokens=as_count(job["tokens"], 0),
        batch=as_count(job["batch"], 1),
        **{name: as_count(job[name], 1) for name in ("heads", "kv_heads", "head_dim", "head_dim_v")},
        dtype=as_text(job["dtype"]),
        mask=as_text(job["mask"]),
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
    )


def read(paths: Iterable[str]) -> list[Point]:
    """Of points that were measured several times by the same, the last one counts: what is measured anew replaces."""
    last: dict[tuple, Point] = {}
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().split("\n")
        except OSError as error:
            raise BadLine(f"{path} can't be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise BadLine(f"{path} can't be read (it is no UTF-8 text)") from error
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                # Sums have errors instead of times, and nothing to compare here.
                if line.get("schema") != SCHEMA or "accuracy" in line:
                    continue
                point = parse(line)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadLine(f"line {number} of {path} is no whole point ({type(error).__name__}: {error})") from error
            last[(point.name, point.world, point.job)] = point
    return list(last.values())


def size(tokens: int) -> str:
    """8192 as 8k, 2097152 as 2m."""
    for shift, letter in ((20, "m"), (10, "k")):
        if tokens and tokens % (1 << shift) == 0:
            return f"{tokens >> shift}{letter}"
    return str(tokens)
