#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The effect of key/value compression on O: every method at several ratios, on two kinds of data.

    bench/compression.py build/bin/ringattn > bench/results/compression.jsonl
    bench/tables.py    # writes its table and its picture

A line is one `ringattn compress --report`: the bytes of a token and head, and the change of O on sampled rows by fp64 of both
caches, of all queries, or, where tokens are taken out, of the last 256. Times are those of one thread, of REPEATS runs the
shortest, which other work on the machine disturbs least. `normal` are normal values. `outliers` are normal
values too, but 4 channels of each key head are 12 times as large and have a mean besides, and the first token of every
sequence draws about half of the attention, as in models. Needs NumPy and safetensors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy
import safetensors.numpy

TOKENS, HEADS, KV_HEADS, DIM = 4096, 8, 2, 128
LAST = 256  # queries at the end of the cache: eviction must keep what later queries need
RUNS = [("fp8", None), ("fp8", 0.5), ("fp8 tensor", None), ("int8", None), ("int4", None), ("int4", 0.7)]
RUNS += [("lowrank", ratio) for ratio in (0.25, 0.5, 0.75)]
RUNS += [("vq", ratio) for ratio in (0.75, 0.87, 0.93)]
RUNS += [("hybrid", ratio) for ratio in (0.3, 0.4, 0.5, 0.55)]
EVICTIONS = [(method, ratio) for method in ("streaming", "knorm", "snapkv", "expected") for ratio in (0.25, 0.5, 0.75)]
EVICTIONS += [("snapkv+fp8", 0.5)]
REPEATS = 5


def normal_data(seed: int) -> dict[str, numpy.ndarray]:
    normal = numpy.random.default_rng(seed).standard_normal
    return {name: normal((TOKENS, heads, DIM)) for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}


def outlier_data(seed: int) -> dict[str, numpy.ndarray]:
    data = normal_data(seed)
    for head in range(KV_HEADS):
        channels = numpy.random.default_rng(seed + 1 + head).choice(DIM, 4, replace=False)
        data["k"][:, head, channels] = 12 * data["k"][:, head, channels] + 6
        # Scores stay about 1, because queries of models are small in channels in which keys are large.
        data["q"][:, head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS, channels] /= 12
    direction = numpy.ones(DIM) / numpy.sqrt(DIM)
    data["q"] += 2 * direction
    data["k"][0] = direction * numpy.log(TOKENS) * numpy.sqrt(DIM) / 2
    data["v"][0] *= 0.1
    return data


def compressed(words: list[str]) -> dict:
    """The report of a run."""
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def made(report: dict) -> float:
    """Seconds until the smaller cache was there, and before it is written."""
    return report["evict_seconds"] + sum(report[key]["compress_seconds"] for key in "kv")


def read(report: dict) -> float:
    return sum(report[key]["decompress_seconds"] for key in "kv")


def least(reports: list[dict], seconds: Callable[[dict], float]) -> float:
    return min(map(seconds, reports))


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    tool = sys.argv[1]
    git = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout.split("git ")[1].split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (("normal", normal_data(7)), ("outliers", outlier_data(7))):
            cache, small = os.path.join(folder, name), os.path.join(folder, "small")
            tensors = {key: rows.astype(numpy.float16) for key, rows in data.items()}
            safetensors.numpy.save_file(tensors, cache)
            safetensors.numpy.save_file({**tensors, "q": tensors["q"][-LAST:].copy()}, cache + "_last")
            for method, ratio in RUNS + EVICTIONS:
                words = [tool, "compress", "--method", method, "--output", small, "--force"]
                words += ["--input", cache + ("_last" if (method, ratio) in EVICTIONS else "")]
                words += ["--threads", "1", "--json", "-"] + (["--ratio", str(ratio)] if ratio is not None else [])
                report = compressed([*words, "--report", "--rows", "256"])
                reports = [report] + [compressed(words) for _ in range(REPEATS - 1)]
                plain = report["bytes_before"]
                stored = report["bytes_after"] - sum(report[key]["table_bytes"] for key in "kv")
                line = {"what": "compression", "data": name, "method": method, "ratio": ratio}
                line |= {"k": report["k"]["format"], "v": report["v"]["format"]}
                line |= {"tokens": report["tokens"], "kept": report["kept_tokens"]}
                line |= {"bytes": stored / (2 * TOKENS * KV_HEADS), "plain_bytes": plain / (2 * TOKENS * KV_HEADS)}
                line |= {"removed": 1 - stored / plain, "table_bytes": report["bytes_after"] - stored}
                line |= {"energy_kept": [report["k"]["energy_kept"], report["v"]["energy_kept"]]}
                line |= {"change_of_o": report["out"]["relative_error"], "greatest": report["out"]["greatest"]}
                line |= {"greatest_lse": report["out"]["greatest_lse"], "rows": report["out"]["rows"]}
                each = 1e9 / (2 * TOKENS * KV_HEADS)
                line |= {"compress_ns": least(reports, made) * each, "decompress_ns": least(reports, read) * each}
                line |= {"device": report["quantized_on"], "threads": report["threads"], "git": git}
                print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
