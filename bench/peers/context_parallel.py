#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's context_parallel around SDPA with cuDNN's kernel, K/V rotated by all-gather and by all-to-all, head-tail
balanced under a causal mask.

    python3 -m torch.distributed.run --nproc-per-node 8 bench/peers/context_parallel.py --seq 32k-1m*2 --jsonl results.jsonl
    python3 -m torch.distributed.run --nproc-per-node 2 bench/peers/context_parallel.py --self-check   # needs GPUs
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import common
import sdpa

ROTATIONS = {"allgather": "nccl all-gather", "alltoall": "nccl all-to-all"}


@contextlib.contextmanager
def sharded(world: common.World, rotation: str, causal: bool, buffers: list[Any]) -> Iterator[None]:
    """Inside, SDPA takes each rank's rows for a part of the whole, and `buffers` [batch, heads, tokens, dim] are cut to
    this rank's rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import _attention

    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = causal  # load balancing is only for causal masks
    mesh = init_device_mesh("cuda", (world.size,))
    with _attention.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers)):
        yield


def local_inputs(world: common.World, shape: common.Shape, seed: int) -> tuple[Any, Any, Any]:
    """This rank's rows, made in place: whole tensors of 2m tokens on every rank would cost more than the job."""
    if shape.seq % (2 * world.size):
        raise ValueError(f"{shape.seq} tokens are no multiple of {2 * world.size} chunks")
    rows = shape.seq // world.size
    seed += 3 * world.rank
    return (
        common.random_rows(world, shape, rows, shape.heads, shape.head_dim, seed),
        common.random_rows(world, shape, rows, shape.kv_heads, shape.head_dim, seed + 1),
        common.random_rows(world, shape, rows, shape.kv_heads, shape.head_dim_v, seed + 2),
    )


def self_check(world: common.World) -> int:
    torch = world.torch
    if not world.on_gpu or not world.started:
        print("skipped: needs GPUs and torch.distributed.run (context_parallel has no kernel for a CPU)")
        return common.SKIPPED
    good = True
    for rotation in ROTATIONS:
        shape = common.Shape(256 * world.size, 1, 8, 8, 64, 64, "bf16", "causal")
        whole = [
            common.random_rows(world, shape, shape.seq, heads, shape.head_dim, seed).contiguous()
            for seed, heads in [(1, shape.heads), (2, shape.kv_heads), (3, shape.kv_heads)]
        ]
        expected = common.plain_attention(torch, *whole, shape.causal)
        mine = [tensor.clone() for tensor in [*whole, expected]]
        with sharded(world, rotation, shape.causal, mine):
            found = sdpa.attention(torch, "cudnn", *mine[:3], shape.causal)
        error = float((found.double() - mine[3]).abs().max())
        good &= common.judge(world, f"context_parallel, {rotation}", error, shape.dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    common.add_job_flags(parser, "32k,128k,512k,1m")
    parser.add_argument("--rotations", default="allgather,alltoall", help="of %(default)s")
    arguments = parser.parse_args()
    rotations = arguments.rotations.split(",")
    for rotation in rotations:
        if rotation not in ROTATIONS:
            parser.error(f"--rotations has {rotation}, which is none of {', '.join(ROTATIONS)}")
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=True)
    torch.set_grad_enabled(False)
    try:
        if arguments.self_check:
            return self_check(world)
        if not world.started:
            parser.error("start it with python3 -m torch.distributed.run --nproc-per-node N")
        with common.open_lines(arguments.jsonl) as file:
            for rotation in rotations:
                for shape in common.shapes(arguments):
                    q = k = v = None  # the rows of the shape before this one
                    try:
                        q, k, v = local_inputs(world, shape, arguments.seed)
                        marker = torch.zeros(1, 1, 2 * world.size, 1, device=world.device)  # the context cuts something
                        with sharded(world, rotation, shape.causal, [marker]):
                            found = common.measured(
                                world, shape, arguments.samples, lambda: sdpa.attention(torch, "cudnn", q, k, v, shape.causal)
                            )
                    except (RuntimeError, ValueError) as error:
                        found = {"error": common.reason(error)}
                    transport = ROTATIONS[rotation]
                    common.write(world, file, common.line(world, "pytorch context_parallel", transport, "cudnn", shape, **found))
    finally:
        world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
