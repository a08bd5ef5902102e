#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ringattn and PyTorch's scaled_dot_product_attention in turn on the same cores, without communication.

    PYTHONPATH=python bench/peers/sdpa_cpu.py --threads 2 --seq 2k-32k*4 --jsonl results.jsonl
    taskset -c 0 bench/peers/sdpa_cpu.py --threads 1 --head-dim 64,128 --heads 8 --kv-heads 2 --mask causal,full

Each line has medians of the rounds: GFLOP/s of wall time and of processor time, and the ratio ringattn / PyTorch of each
round, which neighbors on a busy host change least.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from typing import Any

import common


def line(torch: Any, ringattn: Any, seq: int, mask: str, head_dim: int, args: argparse.Namespace) -> dict[str, Any]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(7)
    q, k, v = (torch.randn(1, heads, seq, head_dim, dtype=dtype) for heads in (args.heads, args.kv_heads, args.kv_heads))
    rows = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    causal = mask == "causal"
    calls = {
        "ringattn": lambda _: ringattn.attention(*rows, mask=mask, threads=args.threads),
        "pytorch": lambda _: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=args.heads != args.kv_heads
        ),
    }
    ours, theirs = calls["ringattn"](0)[0], calls["pytorch"](0).transpose(1, 2)  # warm-up
    error = (ours.float() - theirs.float()).abs().max().item()
    if not error < 0.05:
        sys.exit(f"ringattn and PyTorch differ by {error}")
    times = common.take_turns(calls, args.rounds)
    flops = 4.0 * args.heads * head_dim * (seq * (seq + 1) / 2 if causal else seq * seq)
    result: dict[str, Any] = {
        "what": "sdpa_cpu",
        "dtype": args.dtype,
        "mask": mask,
        "seq": seq,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": head_dim,
        "threads": args.threads,
        "rounds": args.rounds,
    }
    for name, pairs in times.items():
        result[f"{name}_gflops"] = round(flops / statistics.median(pair[0] for pair in pairs) * 1e-9, 1)
        result[f"{name}_gflops_per_cpu_second"] = round(flops / statistics.median(pair[1] for pair in pairs) * 1e-9, 1)
    for key, which in (("ratio", 0), ("cpu_time_ratio", 1)):
        ratios = [theirs[which] / ours[which] for ours, theirs in zip(times["ringattn"], times["pytorch"])]
        result[key] = round(statistics.median(ratios), 3)
    return result


def parse_masks(text: str) -> list[str]:
    masks = text.split(",")
    if set(masks) - {"causal", "full"}:
        raise argparse.ArgumentTypeError(f'"{text}" is neither causal nor full nor both, with a comma between them')
    return masks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=common.parse_sizes, metavar="LIST", default="2k,8k")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=common.parse_sizes, metavar="LIST", default="128")
    parser.add_argument("--mask", type=parse_masks, metavar="LIST", default="causal")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    common.add_cpu_flags(parser, rounds=5)
    args = parser.parse_args()
    if args.self_check:
        args.rounds = 1
    return common.on_cpu(
        args,
        lambda torch, ringattn: line(torch, ringattn, 300, args.mask[0], args.head_dim[0], args),
        lambda torch, ringattn: (
            line(torch, ringattn, *shape, args) for shape in itertools.product(args.seq, args.mask, args.head_dim)
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
