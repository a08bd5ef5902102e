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
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.q = normal(100, 2, 64)

    @torch.no_grad()
    def save(self, layer):
        torch.export.save(torch.export.export(layer, (self.q,)), self.folder / "layer.pt2")

    def elsewhere(self):
        """(What another process says, what it computes)."""
        torch.save(self.q, self.folder / "q.pt")
        done = subprocess.run([sys.executable, __file__, self.folder], capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout, torch.load(self.folder / "made.pt")

    def test_a_layout_is_the_same_one_elsewhere(self):
        layer = Packed(ringattn.Layout([30, 70], [[(0, 0, 30), (1, 0, 70)]]))
        self.save(layer)
        said, made = self.elsewhere()
        self.assertEqual(said, "")
        for a, b in zip(made, layer(self.q), strict=True):
            assert_same_bits(a, b)

    def test_a_world_is_of_its_process(self):
        (world,) = ringattn.threads_worlds(1)
        layer = Packed("striped", world)
        layer.forward = lambda q: ringattn.varlen(q, q, q, [0, 30, 100], layout=layer.layout, world=layer.world)
        self.save(layer)
        for a, b in zip(torch.export.load(self.folder / "layer.pt2").module()(self.q), layer(self.q), strict=True):
            assert_same_bits(a, b)
        said, made = self.elsewhere()
        self.assertIn("UsageError: a graph names a world that is not there", said)
        self.assertIsNone(made)


class Texts(unittest.TestCase):
    def test_a_layout_is_its_text(self):
        for layout in (ringattn.zigzag([8, 0, 5], 3), ringattn.super_segments([70000, 3], 4), ringattn.Layout([], [[], []]),
                       ringattn.Layout([4], [[], [(0, 0, 4)], []])):  # fmt: skip
            self.assertEqual(ringattn.layouts.of_text(layout.text), layout)
        self.assertEqual(ringattn.contiguous([4, 2], 2).text, "lengths 4 2 | 0:0:2 1:0:1 | 0:2:4 1:1:2")


def compute(folder: pathlib.Path) -> None:
    """What the saved program makes in this process, which has worlds and layouts of its own."""
    _kept = ringattn.threads_worlds(3), [ringattn.contiguous([tokens], 2) for tokens in range(9)]
    made = None
    try:
        with torch.no_grad():
            made = torch.export.load(folder / "layer.pt2").module()(torch.load(folder / "q.pt"))
    except ringattn.Error as error:
        print(f"{type(error).__name__}: {error}")
    torch.save(made, folder / "made.pt")


if __name__ == "__main__":
    if len(sys.argv) == 2 and pathlib.Path(sys.argv[1]).is_dir():
        compute(pathlib.Path(sys.argv[1]))
    else:
        unittest.main()
