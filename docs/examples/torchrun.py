"""One sequence over all ranks that torchrun starts, on GPUs or CPUs. The bits are compared with those of one rank.

torchrun --nproc-per-node 2 docs/examples/torchrun.py
"""

import os

import ringattn
import torch
import torch.distributed as distributed

if "LOCAL_RANK" not in os.environ:
    raise SystemExit("error: there are no ranks (torchrun starts them). "
                     "Run `torchrun --nproc-per-node 2 docs/examples/torchrun.py`.")

on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
distributed.init_process_group("nccl" if on_gpus else "gloo")
world = ringattn.torch_world(device=device)

tokens = 4096
layout = ringattn.zigzag([tokens], world.size)
seeded = torch.Generator().manual_seed(1)
q, k, v = (torch.randn((tokens, heads, 128), generator=seeded).to(device, torch.bfloat16) for heads in (8, 2, 2))
mine = [ringattn.shard(rows, layout, world.rank) for rows in (q, k, v)]  # a model would compute only these

out, lse = ringattn.attention(*mine, world=world, layout=layout)

single, _ = ringattn.attention(q, k, v)
ringattn.testing.assert_same_bits(out, ringattn.shard(single, layout, world.rank))
if world.rank == 0:
    print(f"the same bits on {world.size} {'GPUs' if on_gpus else 'CPU ranks'} and on one")
distributed.barrier()
distributed.destroy_process_group()
