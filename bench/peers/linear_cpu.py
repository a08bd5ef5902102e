#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ringattn's linear layers and batched GEMM, and PyTorch's, in turn on the same cores.

    OMP_NUM_THREADS=2 PYTHONPATH=python bench/peers/linear_cpu.py --rows 1,64,1024 --jsonl results.jsonl
    OMP_NUM_THREADS=1 taskset -c 0 bench/peers/linear_cpu.py --weights int8 --in-features 4096 --out-features 14336
    bench/peers/linear_cpu.py --heads 16 --in-features 512 --out-features 128 --rows 4096

Each line has the best and the median time of the rounds, and the median of the ratios PyTorch / ringattn of each round,
which neighbors on a busy host change least. Calls go round --copies weights, so that none stays in a core's caches.
INT8 layers quantize x in each call; PyTorch multiplies by bf16 weights then. Heads: a matrix for each head (torch.bmm).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import common


def calls_of(torch: Any, ringattn: Any, rows: int, args: argparse.Namespace, threads: int) -> dict[str, Callable[[int], Any]]:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(7)
    shape = (args.out_features, args.in_features)
    if args.heads > 1:
        x = torch.randn(rows, args.heads, args.in_features, dtype=dtype)
        matrices = [torch.randn(args.heads, *shape, dtype=dtype) / args.in_features**0.5 for _ in range(args.copies)]
        by_head = x.transpose(0, 1).contiguous()
        return {
            "ringattn": lambda i: ringattn.batched_gemm(x, matrices[i], threads=threads),
            "pytorch": lambda i: torch.bmm(by_head, matrices[i].transpose(1, 2)).transpose(0, 1),
        }
    x = torch.randn(rows, args.in_features, dtype=dtype)
    weights = [torch.randn(*shape, dtype=dtype) / args.in_features**0.5 for _ in range(args.copies)]
    theirs = lambda i: torch.nn.functional.linear(x, weights[i])  # noqa: E731
    if args.weights == "float":
        return {"ringattn": lambda i: ringattn.linear(x, weights[i], threads=threads), "pytorch": theirs}
    quantized = [ringattn.quantize_weight(weight, args.weights) for weight in weights]
    ours = lambda i: ringattn.linear(x, quantized[i].weight, scales=quantized[i].scales, threads=threads)  # noqa: E731
    return {"ringattn": ours, "pytorch": theirs}


def line(torch: Any, ringattn: Any, rows: int, args: argparse.Namespace, threads: int) -> dict[str, Any]:
    calls = calls_of(torch, ringattn, rows, args, threads)
    ours, theirs = calls["ringattn"](0).float(), calls["pytorch"](0).float()  # warm-up
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < {"float": 0.01, "int8": 0.03, "int4": 0.2}[args.weights]:
        sys.exit(f"ringattn and PyTorch differ by {error}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    processor_times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.rounds):
        for name, call in calls.items():
            begin, processor = time.perf_counter(), time.process_time()
            call(turn % args.copies)
            times[name].append(time.perf_counter() - begin)
            processor_times[name].append(time.process_time() - processor)
    flops = 2.0 * rows * args.heads * args.in_features * args.out_features
    names = ("dtype", "weights", "heads", "in_features", "out_features", "copies", "rounds")
    result: dict[str, Any] = {"what": "linear_cpu", "rows": rows, "threads": threads} | {k: getattr(args, k) for k in names}
    for name, seconds in times.items():
        result[f"{name}_best_ms"] = round(min(seconds) * 1e3, 4)
        result[f"{name}_best_cpu_ms"] = round(min(processor_times[name]) * 1e3, 4)
        result[f"{name}_ms"] = round(statistics.median(seconds) * 1e3, 4)
        result[f"{name}_best_gflops"] = round(flops / min(seconds) * 1e-9, 1)
    result["best_ratio"] = round(min(times["pytorch"]) / min(times["ringattn"]), 3)
    result["ratio"] = round(statistics.median(b / a for a, b in zip(times["ringattn"], times["pytorch"])), 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=common.parse_sizes, metavar="LIST", default="1,64,1024")
    parser.add_argument("--in-features", type=int, default=4096)
    parser.add_argument("--out-features", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--weights", choices=["float", "int8", "int4"], default="float")
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--git", default="unknown", help="commit of the library")
    parser.add_argument("--jsonl")
    parser.add_argument("--self-check", action="store_true", help="only compare the results of a small shape")
    args = parser.parse_args()

    try:
        import ringattn
        import torch
    except (ImportError, OSError) as error:
        print(f"skipped: needs PyTorch and ringattn ({error})")
        return common.SKIPPED

    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    torch.set_num_threads(threads)
    if args.self_check:
        args.rounds, args.in_features, args.out_features = 1, 320, 96
        line(torch, ringattn, 70, args, threads)
        args.heads = 3
        line(torch, ringattn, 70, args, threads)
        return 0
    for rows in args.rows:
        result = line(torch, ringattn, rows, args, threads)
        result |= {"torch": torch.__version__, "git": args.git, "command": " ".join(sys.argv)}
        print(json.dumps(result), flush=True)
        if args.jsonl:
            with open(args.jsonl, "a") as file:
                file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
