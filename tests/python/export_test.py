# SPDX-License-Identifier: Apache-2.0
"""Exported programs mean in another process what they mean where they were made: a layout is a part of the graph, and a world
that is not there is refused."""

import importlib.util
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
