#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A row-parallel linear layer as the field writes it: each rank multiplies its features of x by its columns of W with
cuBLAS, and NCCL's reduce-scatter adds the products, so that a rank has the sums of its tokens.

    python3 -m torch.distributed.run --nproc-per-node 2 bench/peers/row_parallel.py --jsonl results.jsonl
    python3 -m torch.distributed.run --nproc-per-node 2 bench/peers/row_parallel.py --self-check   # without GPUs on gloo
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import common
import linear


def work(world: common.World, layer: linear.Layer, x: Any, weight: Any) -> Callable[[], Any]:
    """Of x [rows, k / ranks] and weight [n, k / ranks] the function that computes this rank's rows of y."""
    torch = world.torch
    own = torch.empty(layer.rows // world.size, layer.n, device=world.device, dtype=x.dtype)

    def multiply() -> Any:
        partial = torch.nn.functional.linear(x, weight)
        if world.size == 1:
            return partial
        torch.distributed.reduce_scatter_tensor(own, partial)
        return own

    return multiply


def random_parts(world: common.World, layer: linear.Layer, seed: int) -> tuple[Any, Any]:
    """This rank's columns of x and W, which are the same columns for every number of ranks."""
    torch = world.torch
    if layer.k % world.size or layer.rows % world.size:
        raise ValueError(f"{layer.k} features or {layer.rows} tokens are no multiple of {world.size} ranks")
    generator = torch.Generator(device=world.device).manual_seed(seed)
    dtype = common.dtype_of(torch, layer.dtype)
    columns = slice(world.rank * layer.k // world.size, (world.rank + 1) * layer.k // world.size)

    def normal(rows: int, scale: float) -> Any:
        whole = torch.empty(rows, layer.k, device=world.device, dtype=dtype).normal_(0.0, scale, generator=generator)
        return whole[:, columns].contiguous()

    return normal(layer.rows, 1.0), normal(layer.n, 1.0 / math.sqrt(layer.k))


def self_check(world: common.World) -> int:
    dtype = "bf16" if world.on_gpu else "fp32"
    layer = linear.Layer(8 * world.size, 24, 32 * world.size, dtype=dtype)
    whole = common.World(world.torch, wanted=False)
    whole.device = world.device
    x, weight = (part.double() for part in random_parts(whole, layer, 1))
    wanted = (x @ weight.T)[layer.rows // world.size * world.rank :][: layer.rows // world.size]
    found = work(world, layer, *random_parts(world, layer, 1))().double()
    error = float(((found - wanted).abs() / wanted.std()).max())
    return 0 if common.judge(world, f"row-parallel layer of {world.size}", error, dtype) else 1


def main() -> int:
    parser = common.describe(__doc__)
    parser.add_argument("--shapes", metavar="LIST", type=linear.parse_shapes, default="8192x4096x14336", help="rows x N x K")
    parser.add_argument("--samples", type=int, help="of each shape")
    parser.add_argument("--seed", type=int, default=1, help="of the random input")
    parser.add_argument("--jsonl", metavar="FILE", default="-", help="lines are appended to it; - is stdout")
    parser.add_argument("--self-check", action="store_true", help="compare with a plain computation at a small size, and stop")
    arguments = parser.parse_args()
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=True)
    torch.set_grad_enabled(False)
    try:
        if self_check(world):  # a figure of a wrong result is worse than none
            return 1
        if arguments.self_check:
            return 0
        with common.open_lines(arguments.jsonl) as file:
            for layer in arguments.shapes:
                parts = random_parts(world, layer, arguments.seed)
                times = common.measure(world, work(world, layer, *parts), arguments.samples)
                median = common.quantile(times, 0.5)
                found = {
                    "samples": len(times),
                    "ms": {"median": median, "p10": common.quantile(times, 0.1), "p90": common.quantile(times, 0.9)},
                    "tflops_per_rank": layer.flops / world.size / median * 1e-9,
                }
                if world.rank == 0:
                    content = linear.line(world, layer, "reduce-scatter", found)
                    content["job"]["parallel"] = "row"
                    del content["cache"], content["copies"], content["launches"]  # the layer runs again and again
                    print(json.dumps(content), file=file, flush=True)
                    print(f"# {layer.rows}x{layer.n}x{layer.k}: {median * 1e3:.1f} us", file=sys.stderr)
    finally:
        world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
