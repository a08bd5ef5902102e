"""Prefill of a prompt that is too long for one GPU, by a Llama-shaped model whose weights are too large for one, too: FSDP2
shards the weights, and a ring of the same ranks shares the tokens.

torchrun --nproc-per-node 2 docs/examples/prefill_fsdp.py --check             # two GPUs, or two CPU ranks
torchrun --nproc-per-node 8 docs/examples/prefill_fsdp.py --tokens 1048576 --width 4096 --layers 32 --heads 32 --kv-heads 8 \\
    --hidden 14336

Memory of a rank: its shard of the weights and one whole block, the activations and keys of its own tokens, and ringattn's blocks
of other ranks' keys, which do not grow with their number. No rank ever has all weights, or the keys of all tokens.

--check computes the prompt again on rank 0 alone, with all weights. The logits have the same bits, because each row of
ringattn.linear(), rope() and attention() has the bits that it has on one rank. For small sizes.
"""

import argparse
import os
import time

import ringattn
import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCABULARY = 256  # bytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.head_dim = width // heads
        shapes = {"q": (width, width), "k": (kv_heads * self.head_dim, width), "v": (kv_heads * self.head_dim, width),
                  "o": (width, width), "up": (2 * hidden, width), "down": (width, hidden)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))

    def forward(self, x, world, layout):
        """x: [tokens, width] of this rank. Returns (x, keys, values), the latter for its part of the KV cache."""
        h = normalized(x)
        q, k, v = (ringattn.linear(h, weight).unflatten(-1, (-1, self.head_dim)) for weight in (self.q, self.k, self.v))
        q, k = ringattn.rope(q, k, theta=500000.0, layout=layout, world=world)
        out, _ = ringattn.attention(q, k, v, world=world, layout=layout)  # the only layer that reads other ranks' tokens
        x = x + ringattn.linear(out.flatten(1), self.o)
        h = ringattn.linear(normalized(x), self.up, activation="swiglu")
        return x + ringattn.linear(h, self.down), k, v


def normalized(x):
    """RMS norm. The mean is a linear layer's, because the order of PyTorch's sums may depend on the number of rows."""
    wide = x.float()
    mean = ringattn.linear(wide.square(), torch.full((1, x.shape[-1]), 1.0 / x.shape[-1], device=x.device))
    return (wide * (mean + 1e-5).rsqrt()).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, width), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.head = nn.Parameter(torch.empty(VOCABULARY, width), requires_grad=False)

    def forward(self, tokens, last: int, world=None, layout=None):
        """Returns (logits [VOCABULARY] of row `last`, [(keys, values)] of all layers). tokens: [tokens] of this rank."""
        x, cache = self.embedding[tokens], []
        for block in self.blocks:
            x, *kept = block(x, world, layout)
            cache.append(kept)
        return ringattn.linear(normalized(x[last : last + 1]), self.head)[0], cache


def fill(model: nn.Module, seed: int = 1) -> None:
    """Random weights, the same for any number of ranks. A checkpoint is read here by torch.distributed.checkpoint, which reads
    only a rank's own shards."""
    for number, parameter in enumerate(model.parameters()):
        seeded = torch.Generator().manual_seed(seed + number)
        whole = torch.randn(parameter.shape, generator=seeded) * parameter.shape[-1] ** -0.5
        whole = whole.to(parameter.device, parameter.dtype)
        if hasattr(parameter, "device_mesh"):  # a DTensor
            whole = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 4096, "width": 256, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 512}
    for name, number in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=number)
    parser.add_argument("--check", action="store_true", help="compare the logits with those of one rank")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("there are no ranks (torchrun starts them). "
                     "Run `torchrun --nproc-per-node 2 docs/examples/prefill_fsdp.py`.")
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if on_gpus else torch.float32
    torch.set_grad_enabled(False)

    # One dimension for both. With mesh_dim_names=("dp", "cp") each mesh["cp"] is a ring of its own, for other prompts.
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
    world = ringattn.torch_world(mesh["cp"])
    shape = {name: getattr(arguments, name) for name in sizes if name != "tokens"}
    with torch.device("meta"):
        model = Llama(**shape).to(dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)  # gathers a block's weights while the one before it computes
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # FSDP would keep those outside of blocks for a backward pass
    model.to_empty(device=device)
    fill(model)

    layout = ringattn.zigzag([arguments.tokens], world.size)
    prompt = torch.randint(VOCABULARY, (arguments.tokens,), generator=torch.Generator().manual_seed(2))
    owner = next(rank for rank in range(world.size) if arguments.tokens - 1 in ringattn.positions(layout, rank))
    begin = time.perf_counter()
    logits, cache = model(ringattn.shard(prompt, layout, world.rank).to(device), -1 % len(ringattn.positions(layout, world.rank)),
                          world, layout)  # fmt: skip
    distributed.broadcast(logits, src=owner)  # of the last token of the prompt; other ranks had their own last ones
    token = int(logits.argmax())
    seconds = time.perf_counter() - begin

    if world.rank == 0:
        kept = sum(parameter.to_local().numel() for parameter in model.parameters())
        keys = sum(rows.shape[0] for rows, _ in cache) // len(cache)
        weights = sum(parameter.numel() for parameter in model.parameters())
        print(f"{arguments.tokens} tokens in {seconds:.2f} s on {world.size} {'GPUs' if on_gpus else 'CPU ranks'}; rank 0 has "
              f"{kept} of {weights} weights and the keys of {keys} tokens; the next byte is {token}")
    if arguments.check and world.rank == 0:
        alone = Llama(**shape).to(device, dtype)
        fill(alone)
        ringattn.testing.assert_same_bits(alone(prompt.to(device), arguments.tokens - 1)[0], logits)
        print("the logits have the bits of one rank")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
