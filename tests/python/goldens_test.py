# SPDX-License-Identifier: Apache-2.0
"""Goldens notice a changed bit and name its row; the pytest fixture records and compares."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import ringattn
from ringattn.goldens import Goldens

SUITE = """
import numpy, ringattn

def test_layer(ringattn_goldens):
    q = numpy.random.default_rng(1).standard_normal((50, 2, 64), dtype="float32")
    out, lse = ringattn.attention(q, q, q, mask=MASK)
    ringattn_goldens.check("layer", out=out, lse=lse)
"""


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "some" / "goldens.json"
        self.out = np.arange(60, dtype="float32").reshape(10, 2, 3)

    def refuses(self, kind, words, **arrays):
        with self.assertRaises(kind) as caught:
            Goldens(self.path).check("a", **arrays)
        self.assertIn(words, str(caught.exception))

    def test_a_changed_bit_is_found_and_its_row_named(self):
        Goldens(self.path, record=True).check("a", out=self.out)
        Goldens(self.path, record=True).check("a", lse=self.out[0])
        Goldens(self.path).check("a", out=self.out.copy(), lse=self.out[0])
        changed = self.out.copy()
        changed[7, 1, 2] = np.nextafter(changed[7, 1, 2], np.float32(0))
        changed[9] = 0
        self.refuses(ringattn.WrongResult, "the bits of a: out have changed (row 7 is the first of 2 rows", out=changed)
        self.refuses(ringattn.WrongResult, "shape [9, 2, 3]", out=self.out[1:])
        self.refuses(ringattn.WrongResult, "dtype float64", out=self.out.astype("float64"))
        self.refuses(ringattn.WrongResult, "knows no 'a: state'", state=self.out)

    def test_other_machines_record_beside_it(self):
        self.refuses(ringattn.UnsupportedError, "has no goldens of this machine", out=self.out)
        other = Goldens(self.path, record=True)
        other.machine = "another"
        other.check("a", out=self.out)
        self.refuses(ringattn.UnsupportedError, "there are those of another", out=self.out)
        Goldens(self.path, record=True).check("a", out=self.out)
        self.assertEqual(len(json.loads(self.path.read_text())), 2)
        self.path.write_text("{")
        self.refuses(ringattn.FileError, "is no file of goldens", out=self.out)

    @unittest.skipUnless(importlib.util.find_spec("pytest"), "needs pytest")
    def test_the_fixture(self):
        suite = self.path.parent / "test_layers.py"
        suite.parent.mkdir()

        def run(mask, *options):
            suite.write_text(SUITE.replace("MASK", repr(mask)))
            plugins = [] if self.installed() else ["-p", "ringattn.pytest_plugin"]
            command = [sys.executable, "-m", "pytest", "-q", *plugins, "-p", "no:cacheprovider", *options, str(suite)]
            return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=100)

        self.assertEqual(run("causal").returncode, 1, "nothing is recorded")
        self.assertEqual(run("causal", "--ringattn-record").returncode, 0)
        self.assertEqual(run("causal").returncode, 0)
        changed = run("full")
        self.assertEqual(changed.returncode, 1)
        self.assertIn("the bits of layer: out have changed (row 0 is the first of 49 rows", changed.stdout)

    @staticmethod
    def installed() -> bool:
        """Whether pip has installed the package, whose entry point names the plugin."""
        import importlib.metadata

        return any(point.name == "ringattn" for point in importlib.metadata.entry_points(group="pytest11"))


if __name__ == "__main__":
    unittest.main()
