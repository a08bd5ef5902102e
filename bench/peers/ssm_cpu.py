#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ringattn's SSM and linear attention layers on CPU cores, and PyTorch's, in turn on the same cores.

    PYTHONPATH=python bench/peers/ssm_cpu.py --threads 2 --seq 8k --heads 24,80 --jsonl results.jsonl
    bench/peers/ssm_cpu.py --op selective_scan --heads 1536 --seq 2k --threads 2
    bench/peers/ssm_cpu.py --op gated_delta --heads 8 --seq 4k --threads 1

PyTorch has no op for any of them. SSD is the chunk scheme of Mamba-2's paper (ssd_minimal) by torch.einsum and torch.matmul in
the dtype, with decays and states between chunks in fp32; the selective scan is the loop over tokens in fp32, vectorized over
channels and states. gated_delta is Hugging Face's torch_chunk_gated_delta_rule (transformers' Qwen3-Next, in fp32), with half as
many heads of q and k as of v; kda and gla (linear attention with a decay per dim) are loops over tokens in fp32. SSD and the
scan have no D, z or softplus of dt. RINGATTN_SIMD_TARGET=avx512 measures kernels without AMX. A line has the best and the median
time of the rounds, and the median of the ratios PyTorch / ringattn of each round.
"""

from __future__ import annotations

import argparse
import os
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


def delta_rule(torch: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
    """q and k [tokens, key heads, dim], v [tokens, heads, dim], log_decay and beta [tokens, heads]."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = (rows.repeat_interleave(v.shape[1] // rows.shape[1], 1)[None] for rows in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v[None], log_decay[None], beta[None], use_qk_l2norm_in_kernel=True)[0][0]


def decay_loop(torch: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any = None) -> Any:
    """All [tokens, heads, dim], beta [tokens, heads]: KDA with beta, else linear attention."""
    q, k, v = (rows.float() for rows in (q, k, v))
    if beta is not None:
        q, k = (torch.nn.functional.normalize(rows, dim=-1) for rows in (q, k))
    state, out = torch.zeros(v.shape[1], q.shape[2], v.shape[2]), torch.empty_like(v)
    for token in range(len(v)):
        state *= log_decay[token].exp()[..., None]
        added = v[token]
        if beta is not None:
            added = beta[token][:, None] * (added - (k[token][:, None] @ state)[:, 0])
        state += k[token][..., None] * added[:, None]
        out[token] = (q[token][:, None] @ state)[:, 0] * q.shape[2] ** -0.5
    return out


def decay_calls(torch: Any, ringattn: Any, seq: int, heads: int, dtype: Any, args: argparse.Namespace) -> dict[str, Any]:
    dim = args.head_dim
    key_heads = heads // 2 if args.op == "gated_delta" else heads
    q, k = (torch.randn(seq, key_heads, dim, dtype=dtype) for _ in range(2))
    v = torch.randn(seq, heads, dim, dtype=dtype)
    log_decay = -0.2 * torch.rand(seq, heads, *([] if args.op == "gated_delta" else [dim]))
    beta = torch.rand(seq, heads)
    out = torch.empty_like(v)
    if args.op == "gla":
        return {
            "ringattn": lambda turn: ringattn.linear_attention(q, k, v, log_decay, out=out, threads=args.threads),
            "pytorch": lambda turn: decay_loop(torch, q, k, v, log_decay),
        }
    theirs = delta_rule if args.op == "gated_delta" else decay_loop
    return {
        "ringattn": lambda turn: ringattn.gated_delta(
            q, k, v, log_decay, beta, qk_l2norm=True, out=out, threads=args.threads
        ),
        "pytorch": lambda turn: theirs(torch, q, k, v, log_decay, beta),
    }


def scan_calls(torch: Any, ringattn: Any, seq: int, heads: int, dtype: Any, args: argparse.Namespace) -> dict[str, Any]:
    ssd = args.op == "ssd"
    x = torch.randn(seq, heads, *([args.head_dim] if ssd else []), dtype=dtype)
    dt = (torch.rand(seq, heads) * 0.1).to(dtype)
    a = -1 - 15 * torch.rand(heads, *([] if ssd else [args.state_dim]))
    b, c = (torch.randn(seq, args.state_dim, dtype=dtype) / args.state_dim**0.5 for _ in range(2))
    out = torch.empty_like(x)
    ours = ringattn.ssd if ssd else ringattn.selective_scan
    theirs = ssd_chunks if ssd else selective_scan_loop
    return {
        "ringattn": lambda turn: ours(x, dt, a, b[:, None], c[:, None], out=out, threads=args.threads),
        "pytorch": lambda turn: theirs(torch, x, dt, a, b, c),
    }


def line(torch: Any, ringattn: Any, seq: int, heads: int, args: argparse.Namespace) -> dict[str, Any]:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(7)
    scans = args.op in ("ssd", "selective_scan")
    args.head_dim = args.head_dim or (64 if scans else 128)
    args.state_dim = args.state_dim or {"ssd": 128, "selective_scan": 16}.get(args.op, args.head_dim)
    calls = (scan_calls if scans else decay_calls)(torch, ringattn, seq, heads, dtype, args)
    own, other = calls["ringattn"](0).float(), calls["pytorch"](0).float()  # warm-up
    error = ((own - other).norm() / other.norm()).item()
    if not error < 0.02:
        sys.exit(f"ringattn and PyTorch differ by {error}")
    times = common.take_turns(calls, args.rounds)
    result: dict[str, Any] = {"what": "ssm_cpu", "op": args.op, "seq": seq, "heads": heads, "state_dim": args.state_dim}
    if args.op != "selective_scan":
        result["head_dim"] = args.head_dim
    if "RINGATTN_SIMD_TARGET" in os.environ:
        result["simd_target"] = os.environ["RINGATTN_SIMD_TARGET"]
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
    parser.add_argument("--op", choices=["ssd", "selective_scan", "gated_delta", "kda", "gla"], default="ssd")
    parser.add_argument("--seq", type=common.parse_sizes, metavar="LIST", default="8k", help="tokens, in whole chunks of 64")
    parser.add_argument("--heads", type=common.parse_sizes, metavar="LIST", default="24,80", help="heads, or channels")
    parser.add_argument("--head-dim", type=int, help="64, or 128 of gated_delta, kda and gla")
    parser.add_argument("--state-dim", type=int, help="128, or 16 of selective_scan")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    common.add_cpu_flags(parser, rounds=9)
    args = parser.parse_args()

    def self_check(torch: Any, ringattn: Any) -> None:
        args.rounds = 1
        for args.op, heads in (("ssd", 2), ("selective_scan", 16), ("kda", 2), ("gla", 2)):
            args.head_dim = args.state_dim = None
            line(torch, ringattn, 192, heads, args)

    def lines(torch: Any, ringattn: Any) -> Any:
        return (line(torch, ringattn, seq, heads, args) for heads in args.heads for seq in args.seq)

    return common.on_cpu(args, self_check, lines)


if __name__ == "__main__":
    sys.exit(main())
