# SPDX-License-Identifier: Apache-2.0
"""A decoder layer of a Llama with random weights, whose matrix products, RoPE and attention are ringattn's: a sequence has the
same bits alone, in a batch, and where two ranks share the heads and the hidden features.

    python docs/examples/decoder_layer.py                       # 4,096 wide, as Llama 3 8B: half a minute on two cores
    python docs/examples/decoder_layer.py --width 256 --heads 8 --kv-heads 4 --hidden 512"""

import argparse

import ringattn
import torch
from torch import Tensor


class DecoderLayer(torch.nn.Module):
    """Column-parallel layers followed by row-parallel ones, as in Megatron. All ranks make the same random weights and keep their
    part."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, world: ringattn.World | None = None):
        super().__init__()
        self.dim = width // heads
        self.world = world
        self.random = torch.Generator().manual_seed(1)
        self.q = self.layer(width, width, "column")
        self.k = self.layer(width, kv_heads * self.dim, "column")
        self.v = self.layer(width, kv_heads * self.dim, "column")
        self.o = self.layer(width, width, "row")
        self.up = self.layer(width, 2 * hidden, "column", "swiglu")
        self.down = self.layer(hidden, width, "row")

    def layer(self, features: int, rows: int, parallel: str, activation: str = "none") -> ringattn.nn.Linear:
        whole = torch.nn.Linear(features, rows, bias=False, device="meta")
        weight = torch.randn(rows, features, generator=self.random) * features**-0.5
        whole.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        output = "replicated" if parallel == "row" else "shard"
        return ringattn.nn.Linear.from_linear(
            whole, activation=activation, parallel=parallel, output=output, world=self.world
        )

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        """RMS norm. The mean is a linear layer's, because the order of PyTorch's sums may depend on the batch."""
        wide = x.float()
        mean = ringattn.linear(wide.square(), torch.full((1, x.shape[-1]), 1.0 / x.shape[-1]))
        return (wide * (mean + 1e-5).rsqrt()).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.dim)) for layer in (self.q, self.k, self.v))
        attended, _ = ringattn.attention(*ringattn.rope(q, k), v)  # of this rank's heads, positions from 0 in each sequence
        x = x + self.o(attended.flatten(-2))
        return x + self.down(self.up(self.norm(x)))


def check(width: int, heads: int, kv_heads: int, hidden: int, sequences: int, tokens: int, ranks: int) -> int:
    """Returns how many sequences were compared."""
    x = torch.randn(sequences, tokens, width, generator=torch.Generator().manual_seed(2)).bfloat16()
    with torch.no_grad():
        layer = DecoderLayer(width, heads, kv_heads, hidden)
        batch = layer(x)
        alone = sorted({0, sequences // 2, sequences - 1})
        for sequence in alone:
            ringattn.testing.assert_same_bits(layer(x[sequence : sequence + 1]), batch[sequence : sequence + 1])
    del layer

    def shared(world: ringattn.World) -> Tensor:
        with torch.no_grad():
            return DecoderLayer(width, heads, kv_heads, hidden, world)(x)

    for found in ringattn.run_ranks(ranks, shared):
        ringattn.testing.assert_same_bits(found, batch)
    return len(alone)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    defaults = {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "sequences": 64, "tokens": 4, "ranks": 2}
    for name, number in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=number)
    given = parser.parse_args()
    compared = check(**vars(given))
    print(f"{compared} of {given.sequences} sequences have the bits alone that they have in the batch, and all of them on "
          f"{given.ranks} ranks")  # fmt: skip
