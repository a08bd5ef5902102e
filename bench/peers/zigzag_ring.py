#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A zigzag ring as the field writes it: each rank owns chunks r and 2P-1-r of the tokens, K/V go around the ring by NCCL
send and receive while cuDNN computes a block, and blocks are merged in fp32 by their log-sum-exp.

    python3 -m torch.distributed.run --nproc-per-node 8 bench/peers/zigzag_ring.py --seq 32k-2m*4 --jsonl results.jsonl
    python3 -m torch.distributed.run --nproc-per-node 2 bench/peers/zigzag_ring.py --self-check   # without GPUs on gloo
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import common

Merge = Callable[[Any, Any, Any, Any], None]


def cudnn_block(torch: Any, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """Output [batch, heads, rows, dim] and log-sum-exp [batch, heads, rows, 1] of one block."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return found[0], found[1].view(*found[0].shape[:3], 1)


def plain_block(torch: Any, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """The same on a CPU, for the self-check."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(3) @ v, scores.logsumexp(3, keepdim=True)


def make_merge(torch: Any, compiled: bool) -> Merge:
    """Merges a block into (out, lse), both fp32, in place: weights are the blocks' shares of the row sum."""

    def merge(out: Any, lse: Any, block_out: Any, block_lse: Any) -> None:
        share = torch.sigmoid(block_lse - lse)
        out.copy_(out + share * (block_out.float() - out))
        lse.copy_(torch.logaddexp(lse, block_lse))

    def merge_eagerly(out: Any, lse: Any, block_out: Any, block_lse: Any) -> None:
        out.lerp_(block_out.float(), torch.sigmoid(block_lse - lse))
        torch.logaddexp(lse, block_lse, out=lse)

    if not compiled:
        return merge_eagerly
    torch.compiler.reset()  # else the shapes of a sweep add up to the number that it compiles before it gives up
    return torch.compile(merge, dynamic=False)


class Ring:
    """One rank's rows of the job and its two K/V buffers."""

    def __init__(self, world: common.World, shape: common.Shape, q: Any, kv: Any, merge: Merge) -> None:
        torch = world.torch
        self.world, self.shape, self.merge = world, shape, merge
        self.q = q  # [batch, heads, 2 chunks, dim]
        self.kv = kv  # [2, batch, 2 chunks, kv_heads, dim]: one message
        self.buffers = [torch.empty_like(kv) for _ in range(min(2, world.size - 1))]
        self.block = cudnn_block if world.on_gpu else plain_block

    def run(self) -> Any:
        """This rank's rows of the output, in the input's type."""
        torch, world = self.world.torch, self.world
        chunk = self.q.shape[2] // 2
        current = self.kv
        out = lse = None
        for step in range(world.size):
            last = step + 1 == world.size
            if not last:  # the next block travels while this one is computed
                arriving = self.buffers[step % 2]
                requests = torch.distributed.batch_isend_irecv(
                    [
                        torch.distributed.P2POp(torch.distributed.isend, current, (world.rank + 1) % world.size),
                        torch.distributed.P2POp(torch.distributed.irecv, arriving, (world.rank - 1) % world.size),
                    ]
                )
            owner = (world.rank - step) % world.size
            k, v = (half.transpose(1, 2) for half in current)
            if step == 0 or not self.shape.causal:
                block_out, block_lse = self.block(torch, self.q, k, v, self.shape.causal)
            elif owner < world.rank:  # its first chunk lies before both of ours, its second one after both
                block_out, block_lse = self.block(torch, self.q, k[:, :, :chunk], v[:, :, :chunk], False)
            else:  # both of its chunks lie between ours
                block_out, block_lse = self.block(torch, self.q[:, :, chunk:], k, v, False)
            if out is None:
                out, lse = block_out.float(), block_lse.float()
            else:
                rows = slice(out.shape[2] - block_out.shape[2], None)
                self.merge(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
            if not last:
                for request in requests:
                    request.wait()
                current = arriving
        return out.to(self.q.dtype)


def chunks_of(world: common.World, rank: int) -> tuple[int, int]:
    return rank, 2 * world.size - 1 - rank


def make_ring(world: common.World, shape: common.Shape, merge: Merge, seed: int) -> Ring:
    """A ring of random rows of its own; who owns which row is only a matter of the self-check."""
    if shape.seq % (2 * world.size):
        raise ValueError(f"{shape.seq} tokens are no multiple of {2 * world.size} chunks")
    if shape.head_dim != shape.head_dim_v:
        raise ValueError("K and V travel as one message, so head-dim-v must be head-dim")
    rows = shape.seq // world.size
    q = common.random_rows(world, shape, rows, shape.heads, shape.head_dim, seed + 3 * world.rank)
    k, v = (
        common.random_rows(world, shape, rows, shape.kv_heads, shape.head_dim, seed + 3 * world.rank + i).transpose(1, 2)
        for i in (1, 2)
    )
    return Ring(world, shape, q, world.torch.stack([k, v]), merge)


def self_check(world: common.World, merge: Merge) -> int:
    torch = world.torch
    good = True
    for mask in ["causal", "full"]:
        shape = common.Shape(256 * world.size, 2, 8, 2, 64, 64, "bf16" if world.on_gpu else "fp32", mask)
        q, k, v = (
            common.random_rows(world, shape, shape.seq, heads, shape.head_dim, seed)
            for seed, heads in [(1, shape.heads), (2, shape.kv_heads), (3, shape.kv_heads)]
        )
        chunk = shape.seq // (2 * world.size)
        rows = torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in chunks_of(world, world.rank)]).to(world.device)
        mine = [tensor.transpose(1, 2)[:, rows] for tensor in (q, k, v)]
        found = Ring(world, shape, mine[0].transpose(1, 2), torch.stack(mine[1:]), merge).run()
        expected = common.plain_attention(torch, q, k, v, shape.causal)[:, :, rows]
        error = float((found.double() - expected).abs().max())
        good &= common.judge(world, f"zigzag ring of {world.size}, {mask}", error, shape.dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    common.add_job_flags(parser, "32k,128k,512k,1m,2m")
    parser.add_argument(
        "--merge", choices=["compiled", "eager"], default="compiled", help="one kernel by torch.compile, or plain ops"
    )
    arguments = parser.parse_args()
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=True)
    torch.set_grad_enabled(False)
    compiled = arguments.merge == "compiled" and world.on_gpu
    try:
        try:
            wrong = self_check(world, make_merge(torch, compiled))
        except RuntimeError as error:
            if not compiled:
                raise
            # A host without a C compiler, say. The lines name the merge that ran.
            print(f"# torch.compile fails ({common.reason(error)}): merging by plain ops", file=sys.stderr)
            compiled = False
            wrong = self_check(world, make_merge(torch, compiled))
        if wrong:  # a figure of a wrong result is worse than none
            return 1
        if arguments.self_check:
            return 0
        with common.open_lines(arguments.jsonl) as file:
            for shape in common.shapes(arguments):
                ring = None  # the rows of the shape before this one
                try:
                    ring = make_ring(world, shape, make_merge(torch, compiled), arguments.seed)
                    found = common.measured(world, shape, arguments.samples, ring.run)
                except (RuntimeError, ValueError) as error:
                    found = {"error": common.reason(error)}
                kernel = f"cudnn, {'compiled' if compiled else 'eager'} merge"
                common.write(world, file, common.line(world, "zigzag ring", "nccl", kernel, shape, **found))
    finally:
        world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
