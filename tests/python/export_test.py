# SPDX-License-Identifier: Apache-2.0
"""Exported programs: of any lengths, with the bits of eager calls. They mean in another process what they mean where they were
made: a layout is a part of the graph, and a world that is not there is refused."""

import importlib.util
import io
import pathlib
import subprocess
import sys
import tempfile
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.torch_ops  # noqa: F401, registers the operators
import torch
from ringattn.testing import assert_same_bits


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Packed(torch.nn.Module):
    def __init__(self, layout, world=None):
        super().__init__()
        self.layout, self.world = layout, world

    def forward(self, q):
        out, lse = ringattn.varlen(q, q, q, [0, 30, 100], layout=self.layout, world=self.world)
        return out, lse, ringattn.causal_conv1d(q.flatten(1), torch.ones(128, 4), layout=self.layout)


class Graphs(unittest.TestCase):
    @classmethod
    @torch.no_grad()
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.q = normal(100, 2, 64)
        (world,) = ringattn.threads_worlds(1)
        in_world = Packed("striped", world)
        in_world.forward = lambda q: ringattn.varlen(q, q, q, [0, 30, 100], layout=in_world.layout, world=in_world.world)
        cls.layers = {"layout": Packed(ringattn.Layout([30, 70], [[(0, 0, 30), (1, 0, 70)]])), "world": in_world}
        for name, layer in cls.layers.items():
            torch.export.save(torch.export.export(layer, (cls.q,)), cls.folder / f"{name}.pt2")
        torch.save(cls.q, cls.folder / "q.pt")
        done = subprocess.run([sys.executable, __file__, cls.folder], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        cls.said = done.stdout  # by the other process

    def test_a_layout_is_the_same_one_elsewhere(self):
        self.assertNotIn("layout: ", self.said)
        for a, b in zip(torch.load(self.folder / "layout.made"), self.layers["layout"](self.q), strict=True):
            assert_same_bits(a, b)

    def test_a_world_is_of_its_process(self):
        here = torch.export.load(self.folder / "world.pt2").module()
        for a, b in zip(here(self.q), self.layers["world"](self.q), strict=True):
            assert_same_bits(a, b)
        self.assertIn("world: UsageError: a graph names a world that is not there", self.said)
        self.assertIsNone(torch.load(self.folder / "world.made"))


class Layer(torch.nn.Module):
    """A layer of a prefill, and a decode step on its keys."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = torch.nn.Linear(48, 4 * 32), torch.nn.Linear(48, 2 * 2 * 32)

    def forward(self, x, step, lengths):
        """x: [batch, tokens, 48]; step: [batch, 4, 32]; lengths: int32 [batch]."""
        q = self.q(x).unflatten(-1, (4, 32))
        k, v = self.kv(x).unflatten(-1, (2, 2, 32)).unbind(2)
        out, lse = ringattn.attention(q, k, v, mask=(40, 0), sinks=torch.zeros(4))
        decoded, _ = ringattn.decode(step, k.detach(), v.detach(), lengths=lengths)
        return out, lse, ringattn.linear(decoded.flatten(1), self.q.weight.detach().T)


class Lengths(unittest.TestCase):
    def test_one_program_serves_all_lengths(self):
        def inputs(batch, tokens):
            return normal(batch, tokens, 48), normal(batch, 4, 32, seed=2), torch.arange(1, batch + 1, dtype=torch.int32)

        batch, tokens = torch.export.Dim("batch", max=64), torch.export.Dim("tokens", min=2, max=100_000)
        layer = Layer()
        for strict in (False, True):
            program = torch.export.export(
                layer, inputs(2, 30), dynamic_shapes=({0: batch, 1: tokens}, {0: batch}, {0: batch}), strict=strict
            )
            file = io.BytesIO()
            torch.export.save(program, file)
            file.seek(0)
            loaded = torch.export.load(file).module()
            ops = {str(node.target) for node in program.graph.nodes}
            self.assertGreaterEqual(ops, {f"ringattn.{name}.default" for name in ("attention", "decode", "linear")})
            for given in (inputs(2, 30), inputs(3, 77), inputs(1, 513)):
                expected = layer(*given)
                for a, b in zip(loaded(*given), expected, strict=True):
                    assert_same_bits(a.detach(), b.detach())
                weights = (list(module.parameters()) for module in (loaded, layer))
                found, wanted = (torch.autograd.grad(made[0].square().sum(), [w for w in w_of if w.shape[0] == 128])
                                 for made, w_of in zip((loaded(*given), expected), weights))  # fmt: skip
                for a, b in zip(found, wanted, strict=True):
                    assert_same_bits(a, b)


class Texts(unittest.TestCase):
    def test_a_layout_is_its_text(self):
        for layout in (ringattn.zigzag([8, 0, 5], 3), ringattn.super_segments([70000, 3], 4), ringattn.Layout([], [[], []]),
                       ringattn.Layout([4], [[], [(0, 0, 4)], []])):  # fmt: skip
            self.assertEqual(ringattn.layouts.of_text(layout.text), layout)
        self.assertEqual(ringattn.contiguous([4, 2], 2).text, "lengths 4 2 | 0:0:2 1:0:1 | 0:2:4 1:1:2")


def compute(folder: pathlib.Path) -> None:
    """What the saved programs make in this process, which has worlds and layouts of its own."""
    _kept = ringattn.threads_worlds(3), [ringattn.contiguous([tokens], 2) for tokens in range(9)]
    for program in folder.glob("*.pt2"):
        made = None
        try:
            with torch.no_grad():
                made = torch.export.load(program).module()(torch.load(folder / "q.pt"))
        except ringattn.Error as error:
            print(f"{program.stem}: {type(error).__name__}: {error}")
        torch.save(made, program.with_suffix(".made"))


if __name__ == "__main__":
    if len(sys.argv) == 2 and pathlib.Path(sys.argv[1]).is_dir():
        compute(pathlib.Path(sys.argv[1]))
    else:
        unittest.main()
