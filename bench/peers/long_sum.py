#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far a kernel's sums drift over long contexts. With Q = 0 every key weighs the same, so each output is a plain mean
of V, known exactly in fp64; V > 0, so that a bias can't cancel.

    bench/peers/long_sum.py --seq 16k,128k,1m,2m --jsonl results.jsonl

V is uniform in (0, 1), times a factor between 1 and 2 that differs from column to column: means spread over the output
type's grid, its rounding averages out over thousands of columns, and what is left is the bias of the sum. --dtype fp16
shows smaller ones. A line's `accuracy`: `bias`, the mean of (out - exact) / exact over all outputs; `worst_column`, the
largest such mean of a column, its rounding included; `largest`, the largest single one.
"""

from __future__ import annotations

import sys
from typing import Any

import common
import sdpa

PIECE = 1 << 18  # tokens that are made, or summed in fp64, at a time


def make_values(world: common.World, shape: common.Shape, seed: int) -> Any:
    """[1, kv_heads, tokens, dim], tokens outermost in memory."""
    torch = world.torch
    columns = shape.kv_heads * shape.head_dim
    scale = 1 + torch.arange(columns, device=world.device, dtype=torch.float32) / columns
    dtype = common.dtype_of(torch, shape.dtype)
    values = torch.empty(1, shape.seq, shape.kv_heads, shape.head_dim, device=world.device, dtype=dtype)
    generator = torch.Generator(device=world.device).manual_seed(seed)
    for begin in range(0, shape.seq, PIECE):
        rows = min(PIECE, shape.seq - begin)
        uniform = torch.rand(rows, columns, device=world.device, generator=generator)
        values[0, begin : begin + rows] = (uniform * scale).view(rows, shape.kv_heads, shape.head_dim).to(values.dtype)
    return values.transpose(1, 2)


def exact_means(values: Any) -> Any:
    """[kv_heads, dim] in fp64."""
    total = 0
    for piece in values[0].split(PIECE, dim=1):
        total = total + piece.double().sum(1)
    return total / values.shape[2]


def accuracy_of(out: Any, means: Any) -> dict[str, float]:
    """`out`: [1, heads, rows, dim]; a K/V head's means stand for all of its query heads."""
    kv_heads, dim = means.shape
    grouped = out.double().view(kv_heads, -1, dim)
    relative = grouped / means.unsqueeze(1) - 1
    return {
        "bias": float(relative.mean()),
        "worst_column": float(relative.mean(1).abs().max()),
        "largest": float(relative.abs().max()),
    }


def run(world: common.World, backend: str, shape: common.Shape, rows: int, seed: int) -> dict[str, float]:
    torch = world.torch
    values = make_values(world, shape, seed)
    dtype = common.dtype_of(torch, shape.dtype)
    keys = torch.zeros_like(values).normal_()  # anything: the queries are zero
    queries = torch.zeros(1, rows, shape.heads, shape.head_dim, device=world.device, dtype=dtype).transpose(1, 2)
    out = sdpa.attention(torch, backend, queries, keys, values, causal=False)
    return accuracy_of(out, exact_means(values))


def self_check(world: common.World) -> int:
    shape = common.Shape(3000, 1, 8, 2, 64, 64, "fp32", "full")
    found = run(world, "math", shape, 16, 1)
    good = common.judge(world, "plain mean of 3,000 keys in fp32", found["largest"], "fp32")
    # The figure can see a bias: outputs one part in a thousand too small.
    means = exact_means(make_values(world, shape, 1))
    shown = accuracy_of((means * 0.999).repeat_interleave(4, 0).view(1, 8, 1, 64), means)["bias"]
    good &= common.judge(world, "a bias of a thousandth is seen", abs(shown + 1e-3), "fp32")
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    common.add_job_flags(parser, "16k,128k,1m,2m")
    parser.add_argument("--rows", type=int, default=1024, help="queries; enough that no kernel splits the keys (default: 1024)")
    parser.add_argument("--kernels", default="cudnn,flash_attention_2", help="of %(default)s,math")
    arguments = parser.parse_args()
    arguments.batch, arguments.mask = 1, "full"
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=False)
    torch.set_grad_enabled(False)
    if arguments.self_check:
        return self_check(world)
    with common.open_lines(arguments.jsonl) as file:
        for kernel in arguments.kernels.split(","):
            for shape in common.shapes(arguments):
                try:
                    found: dict[str, Any] = {"accuracy": run(world, kernel, shape, arguments.rows, arguments.seed)}
                    print(f"# {kernel}, {shape.seq} keys: {found['accuracy']}", file=sys.stderr)
                except RuntimeError as error:
                    found = {"error": common.reason(error)}
                common.write(world, file, common.line(world, "long sum", "self", kernel, shape, rows=arguments.rows, **found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
