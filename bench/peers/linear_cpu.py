#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ringattn's linear layers and batched GEMM, and PyTorch's, in turn on the same cores.

    PYTHONPATH=python bench/peers/linear_cpu.py --threads 2 --rows 1,64,1024 --jsonl results.jsonl
    taskset -c 0 bench/peers/linear_cpu.py --threads 1 --weights int8 --in-features 4096 --out-features 14336
    bench/peers/linear_cpu.py --heads 16 --in-features 512 --out-features 128 --rows 4096

Each line has the best and the median time of the rounds, and the median of the ratios PyTorch / ringattn of each round,
which neighbors on a busy host change least. Calls go round --copies weights, so that none stays in a core's caches.
INT8 layers quantize x in each call; PyTorch multiplies by bf16 weights then. Heads: a matrix for each head (torch.bmm).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import common


def calls_of(torch: Any, ringattn: Any, rows: int, args: argparse.Namespace) -> dict[str, Callable[[int], Any]]:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(7)
    shape = (args.out_features, args.in_features)
    if args.heads > 1:
        x = torch.randn(rows, args.heads, args.in_features, dtype=dtype)
        matrices = [torch.randn(args.heads, *shape, dtype=dtype) / args.in_features**0.5 for _ in range(args.copies)]
        by_head = x.transpose(0, 1).contiguous()
        return {
            "ringattn": lambda i: ringattn.batched_gemm(x, matrices[i], threads=args.threads),
            "pytorch": lambda i: torch.bmm(by_head, matrices[i].transpose(1, 2)).transpose(0, 1),
        }
    x = torch.randn(rows, args.in_features, dtype=dtype)
    weights = [torch.randn(*shape, dtype=dtype) / args.in_features**0.5 for _ in range(args.copies)]
    theirs = lambda i: torch.nn.functional.linear(x, weights[i])  # noqa: E731
    if args.weights == "float":
        return {"ringattn": lambda i: ringattn.linear(x, weights[i], threads=args.threads), "pytorch": theirs}
    quantized = [ringattn.quantize_weight(weight, args.weights) for weight in weights]
    ours = lambda i: ringattn.linear(x, quantized[i].weight, scales=quantized[i].scales, threads=args.threads)  # noqa: E731
    return {"ringattn": ours, "pytorch": theirs}


def line(torch: Any, ringattn: Any, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    calls = calls_of(torch, ringattn, rows, args)
    ours, theirs = calls["ringattn"](0).float(), calls["pytorch"](0).float()  # warm-up
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < {"float": 0.01, "int8": 0.03, "int4": 0.2}[args.weights]:
        sys.exit(f"ringattn and PyTorch differ by {error}")
    turns = {name: lambda turn, call=call: call(turn % args.copies) for name, call in calls.items()}
    times = common.take_turns(turns, args.rounds)
    flops = 2.0 * rows * args.heads * args.in_features * args.out_features
    names = ("dtype", "weights", "heads", "in_features", "out_features", "copies", "rounds")
    result: dict[str, Any] = {"what": "linear_cpu", "rows": rows, "threads": args.threads} | {k: getattr(args, k) for k in names}
    wall = {name: [pair[0] for pair in pairs] for name, pairs in times.items()}
    for name, seconds in wall.items():
        result[f"{name}_best_ms"] = round(min(seconds) * 1e3, 4)
        result[f"{name}_best_cpu_ms"] = round(min(pair[1] for pair in times[name]) * 1e3, 4)
        result[f"{name}_ms"] = round(statistics.median(seconds) * 1e3, 4)
        result[f"{name}_best_gflops"] = round(flops / min(seconds) * 1e-9, 1)
    result["best_ratio"] = round(min(wall["pytorch"]) / min(wall["ringattn"]), 3)
    result["ratio"] = round(statistics.median(b / a for a, b in zip(wall["ringattn"], wall["pytorch"])), 3)
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
    common.add_cpu_flags(parser, rounds=9)
    args = parser.parse_args()

    def self_check(torch: Any, ringattn: Any) -> None:
        args.rounds, args.in_features, args.out_features = 1, 320, 96
        line(torch, ringattn, 70, args)
        args.heads = 3
        line(torch, ringattn, 70, args)

    return common.on_cpu(args, self_check, lambda torch, ringattn: (line(torch, ringattn, rows, args) for rows in args.rows))


if __name__ == "__main__":
    sys.exit(main())
