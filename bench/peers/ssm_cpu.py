#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ringattn's Mamba-2 and selective scan on CPU cores, and PyTorch's, in turn on the same cores.

    PYTHONPATH=python bench/peers/ssm_cpu.py --threads 2 --seq 8k --heads 24,80 --jsonl results.jsonl
    bench/peers/ssm_cpu.py --op selective_scan --heads 1536 --seq 2k --threads 2

PyTorch has no op for either. SSD is the chunk scheme of Mamba-2's paper (ssd_minimal) by torch.einsum and torch.matmul in the
dtype, with decays and states between chunks in fp32; the selective scan is the loop over tokens in fp32, vectorized over
channels and states. Neither has D, z or a softplus of dt, so ringattn has none either. A line has the best and the median time
of the rounds, and the median of the ratios PyTorch / ringattn of each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import common

CHUNK = 64


def ssd_chunks(torch: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    """x [tokens, heads, dim], dt [tokens, heads], a [heads], b and c [tokens, state]; tokens are whole chunks."""
    tokens, heads, dim = x.shape
    chunks = tokens // CHUNK
    b, c = (rows.view(chunks, CHUNK, -1) for rows in (b, c))
    sums = (dt.float() * a).view(chunks, CHUNK, heads).permute(0, 2, 1).cumsum(-1)  # [chunks, heads, CHUNK]
    scaled = (x.float() * dt.float()[..., None]).to(x.dtype).view(chunks, CHUNK, heads, dim).transpose(1, 2)
    mask = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decays = (sums[..., :, None] - sums[..., None, :]).masked_fill(~mask, float("-inf")).exp().to(x.dtype)
    within = ((c @ b.transpose(1, 2))[:, None] * decays) @ scaled
    to_end = (sums[..., -1:] - sums).exp().to(x.dtype)
    local = torch.einsum("kjn,khj,khjp->khnp", b, to_end, scaled).float()
    state, before = torch.zeros_like(local[0]), []
    for chunk, decay in zip(local, sums[..., -1].exp(), strict=True):
        before.append(state.to(x.dtype))
        state = state * decay[:, None, None] + chunk
    between = (c[:, None] @ torch.stack(before)) * sums.exp().to(x.dtype)[..., None]
    return (within + between).transpose(1, 2).reshape(tokens, heads, dim)


def selective_scan_loop(torch: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    """x and dt [tokens, channels], a [channels, state], b and c [tokens, state]."""
    x, dt, b, c = (rows.float() for rows in (x, dt, b, c))
    state, y = torch.zeros_like(a), torch.empty_like(x)
    for token in range(len(x)):
        state = torch.exp(dt[token][:, None] * a) * state + (dt[token] * x[token])[:, None] * b[token]
        y[token] = state @ c[token]
    return y


def line(torch: Any, ringattn: Any, seq: int, heads: int, args: argparse.Namespace) -> dict[str, Any]:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(7)
    ssd = args.op == "ssd"
    state_dim = args.state_dim or (128 if ssd else 16)
    x = torch.randn(seq, heads, *([args.head_dim] if ssd else []), dtype=dtype)
    dt = (torch.rand(seq, heads) * 0.1).to(dtype)
    a = -1 - 15 * torch.rand(heads, *([] if ssd else [state_dim]))
    b, c = (torch.randn(seq, state_dim, dtype=dtype) / state_dim**0.5 for _ in range(2))
    out = torch.empty_like(x)
    ours = ringattn.ssd if ssd else ringattn.selective_scan
    theirs = ssd_chunks if ssd else selective_scan_loop
    calls = {
        "ringattn": lambda turn: ours(x, dt, a, b[:, None], c[:, None], out=out, threads=args.threads),
        "pytorch": lambda turn: theirs(torch, x, dt, a, b, c),
    }
    own, other = calls["ringattn"](0).float(), calls["pytorch"](0).float()  # warm-up
    error = ((own - other).norm() / other.norm()).item()
    if not error < 0.02:
        sys.exit(f"ringattn and PyTorch differ by {error}")
    times = common.take_turns(calls, args.rounds)
    result: dict[str, Any] = {"what": "ssm_cpu", "op": args.op, "seq": seq, "heads": heads, "state_dim": state_dim}
    if ssd:
        result["head_dim"] = args.head_dim
    result |= {"dtype": args.dtype, "threads": args.threads, "rounds": args.rounds, "difference": round(error, 5)}
    wall = {name: [pair[0] for pair in pairs] for name, pairs in times.items()}
    for name, seconds in wall.items():
        result[f"{name}_best_ms"] = round(min(seconds) * 1e3, 3)
        result[f"{name}_best_cpu_ms"] = round(min(pair[1] for pair in times[name]) * 1e3, 3)
        result[f"{name}_ms"] = round(statistics.median(seconds) * 1e3, 3)
    result["best_ratio"] = round(min(wall["pytorch"]) / min(wall["ringattn"]), 3)
    result["ratio"] = round(statistics.median(b / a for a, b in zip(wall["ringattn"], wall["pytorch"], strict=True)), 3)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=["ssd", "selective_scan"], default="ssd")
    parser.add_argument("--seq", type=common.parse_sizes, metavar="LIST", default="8k", help="tokens, in whole chunks of 64")
    parser.add_argument("--heads", type=common.parse_sizes, metavar="LIST", default="24,80", help="heads, or channels")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--state-dim", type=int, help="128, or 16 of selective_scan")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    common.add_cpu_flags(parser, rounds=9)
    args = parser.parse_args()

    def self_check(torch: Any, ringattn: Any) -> None:
        args.rounds = 1
        for args.op, heads in (("ssd", 2), ("selective_scan", 16)):
            line(torch, ringattn, 192, heads, args)

    def lines(torch: Any, ringattn: Any) -> Any:
        return (line(torch, ringattn, seq, heads, args) for heads in args.heads for seq in args.seq)

    return common.on_cpu(args, self_check, lines)


if __name__ == "__main__":
    sys.exit(main())
