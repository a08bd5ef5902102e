#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ringattn and PyTorch's scaled_dot_product_attention in turn on the same cores, without communication.

    PYTHONPATH=python bench/peers/sdpa_cpu.py --threads 2 --seq 2k-32k*4 --jsonl results.jsonl
    taskset -c 0 bench/peers/sdpa_cpu.py --threads 1 --head-dim 64 --heads 8 --kv-heads 2 --mask full

Each line has medians of the rounds: GFLOP/s of wall time and of processor time, and the ratio ringattn / PyTorch of each
round, which neighbors on a busy host change least.
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


def measure(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of wall and of processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - processor


def line(torch: Any, ringattn: Any, seq: int, args: argparse.Namespace, threads: int) -> dict[str, Any]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, heads, seq, args.head_dim, dtype=dtype) for heads in (args.heads, args.kv_heads, args.kv_heads))
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    causal = args.mask == "causal"
    calls = {
        "ringattn": lambda: ringattn.attention(*rows, mask=args.mask, threads=threads),
        "pytorch": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=args.heads != args.kv_heads
        ),
    }
    ours, theirs = calls["ringattn"]()[0], calls["pytorch"]().transpose(1, 2)  # warm-up
    error = (ours.float() - theirs.float()).abs().max().item()
    if not error < 0.05:
        sys.exit(f"ringattn and PyTorch differ by {error}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            times[name].append(measure(call))
    flops = 4.0 * args.heads * args.head_dim * (seq * (seq + 1) / 2 if causal else seq * seq)
    result: dict[str, Any] = {
        "what": "sdpa_cpu",
        "dtype": args.dtype,
        "mask": args.mask,
        "seq": seq,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "threads": threads,
        "rounds": args.rounds,
    }
    for name, pairs in times.items():
        result[f"{name}_gflops"] = round(flops / statistics.median(pair[0] for pair in pairs) * 1e-9, 1)
        result[f"{name}_gflops_per_cpu_second"] = round(flops / statistics.median(pair[1] for pair in pairs) * 1e-9, 1)
    for key, which in (("ratio", 0), ("cpu_time_ratio", 1)):
        ratios = [theirs[which] / ours[which] for ours, theirs in zip(times["ringattn"], times["pytorch"])]
        result[key] = round(statistics.median(ratios), 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=common.parse_sizes, metavar="LIST", default="2k,8k")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mask", choices=["causal", "full"], default="causal")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    parser.add_argument("--rounds", type=int, default=5)
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

    threads = args.threads
    torch.set_num_threads(threads)
    if args.self_check:
        args.rounds = 1
        line(torch, ringattn, 300, args, threads)
        return 0
    for seq in args.seq:
        result = line(torch, ringattn, seq, args, threads)
        result |= {"torch": torch.__version__, "git": args.git, "command": " ".join(sys.argv)}
        print(json.dumps(result), flush=True)
        if args.jsonl:
            with open(args.jsonl, "a") as file:
                file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
