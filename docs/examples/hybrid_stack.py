# SPDX-License-Identifier: Apache-2.0
"""Attention, Gated DeltaNet and attention on any number of CPU ranks, and the digest of the stack's result. Attention has its
balanced zigzag layout and the scan whole segments of 2,048 tokens, so rows move between the layers. The digest is the same for any
number of ranks.

python docs/examples/hybrid_stack.py
torchrun --nproc-per-node 2 docs/examples/hybrid_stack.py
"""

import hashlib
import os

import ringattn
import torch
import torch.distributed as distributed

LENGTHS, HEADS, DIM = [5000, 300, 0, 40], 4, 32  # packed sequences
under_torchrun = "LOCAL_RANK" in os.environ
if under_torchrun:
    distributed.init_process_group("gloo")
world = ringattn.torch_world(device="cpu") if under_torchrun else ringattn.self_world()

zigzag, segments = ringattn.zigzag(LENGTHS, world.size), ringattn.segments(LENGTHS, world.size)
cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
seeded = torch.Generator().manual_seed(1)
tokens = sum(LENGTHS)
x = torch.randn(tokens, HEADS, DIM, generator=seeded)  # a model would make only this rank's rows
gates = -0.2 * torch.rand(tokens, HEADS, generator=seeded), torch.rand(tokens, HEADS, generator=seeded)
log_decay, beta = (ringattn.shard(gate, segments, world.rank) for gate in gates)


def attention(x):
    return ringattn.varlen(x, x, x, cu_seqlens, layout=zigzag, world=world)[0]


def gated_delta(x):
    x = ringattn.reshard(x, zigzag, segments, world=world)
    out = ringattn.gated_delta(x, x, x, log_decay, beta, qk_l2norm=True, layout=segments, world=world)
    return ringattn.reshard(out, segments, zigzag, world=world)


rows = ringattn.shard(x, zigzag, world.rank)
for layer in (attention, gated_delta, attention):
    rows = rows + layer(rows)

on_rank_0 = ringattn.Layout(LENGTHS, [[(s, 0, n) for s, n in enumerate(LENGTHS)]] + [[]] * (world.size - 1))
whole = ringattn.reshard(rows, zigzag, on_rank_0, world=world)
if world.rank == 0:
    print(f"ranks {world.size}, digest {hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:32]}")
if under_torchrun:
    distributed.barrier()
    distributed.destroy_process_group()
