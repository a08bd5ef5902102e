#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the times that `ringattn plan` estimates on this host's CPUs with measured ones, and two ranks with one.

    bench/cpu_hosts.py estimates --threads 1,2,16 > estimates.jsonl
    bench/cpu_hosts.py ranks --threads 16 --rounds 6 > ranks.jsonl

`estimates` measures the machine with `info --measure` for each number of threads, and then each job. The time of a job is the
median of `bench`, and the estimate is that of `plan --machine`. The last line says how many ratios are within 15 %.
`ranks` runs one rank, and two under mpirun with half as many threads each, in turn. A line has the medians of one round, and
the last one the median of the rounds' ratios of speeds (two ranks / one)."""
from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WITHIN = 0.15

# Jobs of `estimates`, and the minimum number of threads for each, so that none takes long.
GQA = "--heads 8 --kv-heads 2"
LINEAR = "--op linear --in-features 4096 --out-features 4096"
JOBS = [
    (f"{GQA} --seq 2k", 1),
    (f"{GQA} --seq 8k", 2),
    (f"{GQA} --seq 16k", 16),
    (f"{GQA} --seq 32k", 16),
    (f"{GQA} --seq 4k --mask full", 1),
    (f"{GQA} --seq 4k --head-dim 64", 1),
    (f"{GQA} --seq 4k --head-dim 256", 1),
    ("--heads 1 --kv-heads 1 --seq 8k", 1),
    (f"{GQA} --seq 2k --dtype fp32", 1),
    (f"{GQA} --seq 8k --dtype fp32", 16),
    (f"{GQA} --seq 2k --dtype fp32 --mask full", 2),
    ("--op decode --heads 32 --kv-heads 8 --seq 128k", 1),
    (f"{LINEAR} --seq 64", 1),
    (f"{LINEAR} --seq 1k", 1),
    (f"{LINEAR} --seq 1k --dtype fp32", 2),
    ("--op ssd --heads 8 --seq 8k", 1),
    ("--op ssd --heads 8 --seq 64k", 16),
    ("--op ssd --heads 24 --seq 2k", 1),
    ("--op ssd --heads 24 --seq 8k", 1),
    ("--op ssd --heads 80 --seq 8k", 16),
    ("--op ssd --heads 8 --seq 8k --dtype fp32", 1),
    ("--op ssd --heads 24 --seq 8k --dtype fp32", 2),
    ("--op ssd --heads 80 --seq 8k --dtype fp32", 16),
    ("--op selective_scan --heads 512 --seq 2k", 1),
    ("--op selective_scan --heads 1536 --seq 2k", 1),
    ("--op selective_scan --heads 5120 --seq 2k", 16),
    ("--op linear_attention --heads 16 --seq 8k", 1),
    ("--op linear_attention --heads 16 --seq 2k --decay dim", 1),
    ("--op gated_delta --heads 16 --seq 2k", 1),
    ("--op gated_delta --heads 16 --seq 8k", 16),
    ("--op conv1d --heads 4096 --seq 8k", 1),
    (f"--op attention_backward {GQA} --seq 2k", 2),
    ("--op ssd_backward --heads 24 --seq 2k", 1),
    ("--op ssd_backward --heads 80 --seq 8k", 16),
]

RANK_JOB = "--heads 8 --kv-heads 8 --head-dim 128 --mask causal"
MPIRUN = ["mpirun", "--bind-to", "none", "-np", "2"]


class Program:
    """ringattn, with the flags that all runs have in common."""

    def __init__(self, path: str, timeout: float) -> None:
        self.path = path
        self.timeout = timeout
        self.environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def run(self, words: list[str], launcher: list[str] | None = None) -> str:
        command = [*(launcher or []), self.path, *words]
        return subprocess.run(command, env=self.environment, check=True, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.DEVNULL, timeout=self.timeout).stdout

    def bench(self, words: list[str], launcher: list[str] | None = None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder, "lines.jsonl")
            self.run(["bench", "--backend", "cpu", "--synthetic", "1", "--quiet", *words, "--jsonl", str(lines)], launcher)
            line: dict[str, Any] = json.loads(lines.read_text().splitlines()[0])
            return line

    def measure(self, threads: int, path: Path) -> dict[str, Any]:
        self.run(["info", "--measure", "--backend", "cpu", "--threads", str(threads), "--machine", str(path), "--force"])
        machine: dict[str, Any] = json.loads(path.read_text())
        return machine

    def estimate(self, words: list[str], machine: Path) -> float:
        plan = json.loads(self.run(["plan", "--backend", "cpu", "--synthetic", "1", "--world", "1", "--quiet", *words,
                                    "--machine", str(machine), "--json", "-"]))
        return float(plan["rows"][0]["estimated_ms"])


def write(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def jobs_of(threads: int, only: str) -> list[str]:
    return [job for job, least in JOBS if threads >= least and only in job]


def estimates(program: Program, arguments: argparse.Namespace) -> None:
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for threads in arguments.threads:
            machine = Path(folder, f"machine-{threads}.json")
            write({"what": "cpu_machine", "threads": threads, "machine": program.measure(threads, machine)})
            for job in jobs_of(threads, arguments.only):
                words = [*job.split(), "--threads", str(threads)]
                measured = program.bench([*words, "--samples", str(arguments.samples)])
                estimated = program.estimate(words, machine)
                ratio = estimated / measured["ms"]["median"]
                ratios.append(ratio)
                write({"what": "cpu_estimate", "job": job, "threads": threads, "kernel": measured["kernel"],
                       "ms": {key: rounded(value) for key, value in measured["ms"].items()},
                       "estimated_ms": rounded(estimated), "ratio": round(ratio, 3), "git": measured["git"],
                       "devices": measured["devices"], "command": shlex.join(measured["argv"])})
    within = sum(abs(ratio - 1.0) <= WITHIN for ratio in ratios)
    write({"what": "cpu_estimates", "jobs": len(ratios), "within_15_percent": within,
           "least_ratio": round(min(ratios), 3), "greatest_ratio": round(max(ratios), 3)})


def ranks(program: Program, arguments: argparse.Namespace) -> None:
    ways: dict[str, tuple[int, list[str] | None]] = {"1 rank": (1, None), "2 ranks": (2, MPIRUN)}
    for threads in arguments.threads:
        for dtype in arguments.dtypes:
            ratios = []
            for number in range(arguments.rounds):
                times = {}
                for name in sorted(ways, reverse=number % 2 == 1):  # neither is always first
                    world, launcher = ways[name]
                    words = [*RANK_JOB.split(), "--seq", arguments.seq, "--dtype", dtype, "--threads", str(threads // world),
                             "--samples", str(arguments.samples)]
                    line = program.bench(words, launcher)
                    times[name] = line["ms"]["median"]
                    write({"what": "cpu_ranks", "round": number, "world": world, "threads_per_rank": threads // world,
                           "dtype": dtype, "transport": line["transport"], "blocks": line["blocks"],
                           "ms": {key: rounded(value) for key, value in line["ms"].items()},
                           "exposed_comm_ms": rounded(line["exposed_comm_ms"]),
                           "estimated_ms": rounded(line["estimated_ms"]), "git": line["git"],
                           "devices": line["devices"],
                           "command": shlex.join([*(launcher or []), *line["argv"]])})
                ratios.append(times["1 rank"] / times["2 ranks"])
            write({"what": "cpu_ranks_ratio", "dtype": dtype, "seq": arguments.seq, "threads": threads,
                   "ratios": [round(ratio, 3) for ratio in ratios], "median_ratio": round(statistics.median(ratios), 3)})


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["estimates", "ranks"])
    parser.add_argument("--ringattn", default="build/release/bin/ringattn")
    parser.add_argument("--threads", type=numbers, default=[os.cpu_count() or 1], help="of a job, all ranks together")
    parser.add_argument("--samples", type=int, default=5, help="of each job and round")
    parser.add_argument("--only", default="", help="estimates: jobs whose flags contain this text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seq", default="32k", help="ranks: tokens")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bf16", "fp32"])
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one run")
    arguments = parser.parse_args()
    if arguments.what == "ranks" and any(threads < 2 or threads % 2 for threads in arguments.threads):
        parser.error("two ranks share the threads: give even numbers")
    if arguments.what == "estimates" and not any(jobs_of(threads, arguments.only) for threads in arguments.threads):
        parser.error(f"no job with these threads has \"{arguments.only}\" in its flags")
    program = Program(arguments.ringattn, arguments.timeout)
    try:
        (estimates if arguments.what == "estimates" else ranks)(program, arguments)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"error: a run failed ({error}).", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
