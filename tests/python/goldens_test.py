# SPDX-License-Identifier: Apache-2.0
"""Goldens notice a changed bit and name its row; the pytest fixture records and compares."""

import importlib.util
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import warnings
from unittest import mock

import numpy as np
import ringattn
from ringattn import _abi, goldens
from ringattn._build_id import build_id
from ringattn.goldens import Goldens

# Runs of pytest are forked from a process that has imported it, and nothing of ringattn's.
SERVER = multiprocessing.get_context("forkserver")
SUITE = """
import numpy, ringattn

def test_layer(ringattn_goldens):
    q = numpy.random.default_rng(1).standard_normal((50, 2, 64), dtype="float32")
    out, lse = ringattn.attention(q, q, q, mask=MASK)
    ringattn_goldens.check("layer", out=out, lse=lse)
"""


def run_pytest(said, arguments):
    """As `python -m pytest` does, whose output goes to a file."""
    import pytest

    with open(said, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.exit(int(pytest.main(arguments)))


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

    def test_machines_of_different_kinds_share_a_simd_target(self):
        script = """if True:
            import numpy, ringattn
            print(ringattn.simd_target(), ringattn.goldens.this_machine().split(", ")[-1])
            q = numpy.ones((8, 1, 64), dtype="float32")
            ringattn.attention(q, q, q)
            try:
                ringattn.set_simd_target("auto")
            except ringattn.UsageError as error:
                print(error)
        """
        for target, shown in (("sse4", "sse4 SSE4"), ("neon", "neon NEON")):
            done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"RINGATTN_SIMD_TARGET": target},
                                  capture_output=True, text=True)  # fmt: skip
            if done.returncode != 0:
                self.assertIn(f"SIMD target {target} can't be used here (processor and build have ", done.stderr)
                continue
            self.assertEqual(done.stdout.splitlines()[0], shown)
            self.assertIn(f"can't become auto (ops with {target} exist", done.stdout)
        for name, words in (("avx1024", 'there is no SIMD target "avx1024"'), ("avx2\0", "has a NUL"), ("\ud800", "UTF-8"),
                            (b"avx2", "name is b'avx2' .it is a word")):  # fmt: skip
            with self.assertRaisesRegex(ringattn.UsageError, words):
                ringattn.set_simd_target(name)

    def test_other_machines_record_beside_it(self):
        self.refuses(ringattn.UnsupportedError, "has no goldens of this machine", out=self.out)
        with mock.patch.object(goldens, "this_machine", lambda device: "another"):
            Goldens(self.path, record=True).check("a", out=self.out)
        self.refuses(ringattn.UnsupportedError, "there are those of another", out=self.out)
        Goldens(self.path, record=True).check("a", out=self.out)
        self.assertEqual(len(json.loads(self.path.read_text())), 2)
        self.path.write_text("{")
        self.refuses(ringattn.FileError, "is not a file of goldens", out=self.out)

    def test_a_section_is_of_a_build_a_kind_of_device_and_a_machine(self):
        Goldens(self.path, record=True).check("a", out=self.out)
        (section,) = json.loads(self.path.read_text())
        note = subprocess.run(["readelf", "-n", _abi.lib.path], capture_output=True, text=True)
        if note.returncode == 0:
            self.assertIn(f"Build ID: {build_id()}\n", note.stdout)
        self.assertTrue(section.startswith(f"ringattn {ringattn.__version__}, build {build_id()[:16]}, CPU, "), section)
        self.assertIn(goldens.this_machine(), section)
        goldens.this_machine.cache_clear()
        self.addCleanup(goldens.this_machine.cache_clear)
        with mock.patch.object(goldens, "build_id", lambda: "another build's"):
            self.refuses(ringattn.UnsupportedError, "has no goldens of this machine", out=self.out)

    def test_what_is_missing_may_be_recorded_with_a_warning(self):
        kept = Goldens(self.path, missing="record")
        for name in ("out", "lse"):
            with self.assertWarnsRegex(UserWarning, "They were recorded now"):
                kept.check("a", **{name: self.out})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept.check("a", out=self.out, lse=self.out)
        with self.assertRaises(ringattn.WrongResult):
            kept.check("a", out=self.out + 1, new=self.out)
        self.refuses(ringattn.WrongResult, "knows no 'a: new'", new=self.out)

    def test_what_has_no_bits_is_refused(self):
        with self.assertRaises(ringattn.UsageError) as caught:
            Goldens(self.path).check("a", out=[1.0])
        self.assertIn("out is list", str(caught.exception))
        for device in ("gpu", "cuda:x", "cpu:", ""):
            with self.assertRaises(ringattn.UsageError):
                Goldens(self.path, device=device)
        with self.assertRaises(ringattn.UsageError):
            Goldens(self.path, missing="skip")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_tensors_of_a_gpu_have_its_section(self):
        import torch

        class OnGpu(torch.Tensor):
            """As a tensor of GPU 1 would be asked: NumPy can't have it before it is copied."""

            device = torch.device("cuda", 1)

            def cpu(self):
                return self.as_subclass(torch.Tensor)

            def numpy(self):
                raise TypeError("can't convert cuda:1 device type tensor to numpy")

        on_host = torch.from_numpy(self.out)
        there = on_host.clone().as_subclass(OnGpu)
        with mock.patch.object(goldens, "this_machine", lambda device: f"device {device[0]}:{device[1]}"):
            recorded = Goldens(self.path, record=True)
            recorded.check("a", out=there, lse=self.out[0])
            self.assertEqual(sorted(json.loads(self.path.read_text())), ["device 1:0", "device 2:1"])
            Goldens(self.path).check("a", out=there, lse=on_host[0].requires_grad_())
            Goldens(self.path, device="cuda:1").check("a", out=on_host.detach())
            with self.assertRaises(ringattn.UnsupportedError):
                Goldens(self.path, device="cuda").check("a", out=on_host)
            with self.assertRaises(ringattn.WrongResult):
                Goldens(self.path).check("a", out=there + 1)
        self.assertIsNone(ringattn.testing.first_difference(there, on_host))
        self.assertEqual(ringattn.testing.first_difference(there + 1, on_host), (0, 0, 0))
        with self.assertRaises(ringattn.UnsupportedError) as caught:
            Goldens(self.path).check("a", out=on_host.to("meta"))
        self.assertIn("a tensor is on meta", str(caught.exception))

    def runner(self, suite):
        def run(mask, *options, ini=""):
            suite.write_text(SUITE.replace("MASK", repr(mask)))
            suite.with_name("pytest.ini").write_text(f"[pytest]\n{ini}\n")
            plugins = [] if self.installed() else ["-p", "ringattn.pytest_plugin"]
            arguments = ["-q", "-rs", *plugins, "-p", "no:cacheprovider", *options, str(suite)]
            said = suite.with_name("said")
            process = SERVER.Process(target=run_pytest, args=(said, arguments))
            process.start()
            process.join(100)
            process.kill()
            process.join()
            return subprocess.CompletedProcess(arguments, process.exitcode, said.read_text())

        return run

    @unittest.skipUnless(importlib.util.find_spec("pytest"), "needs pytest")
    def test_the_fixture_s_options(self):
        suite = self.path.parent / "test_layers.py"
        suite.parent.mkdir()
        run = self.runner(suite)
        skipped = run("causal", "--ringattn-missing=skip")
        self.assertEqual(skipped.returncode, 0)
        self.assertIn("1 skipped", skipped.stdout)
        self.assertIn("has no goldens of this machine", skipped.stdout)
        wrong = run("causal", ini="ringattn_missing = ignore")
        self.assertIn("ringattn_missing is 'ignore' (there are fail, skip, record). Correct it.", wrong.stdout)
        recorded = run("causal", ini="ringattn_missing = record")
        self.assertEqual(recorded.returncode, 0)
        self.assertIn("They were recorded now.", recorded.stdout)
        self.assertEqual(run("causal").returncode, 0)
        self.assertEqual(run("full", "--ringattn-missing=skip").returncode, 1, "what is recorded is compared")
        nowhere = run("causal", "--ringattn-device=cuda:99")
        self.assertEqual(nowhere.returncode, 1)
        self.assertRegex(nowhere.stdout, r"ringattn\._errors\.\w+: .*GPU")
        self.assertIn("device is 'gpu'", run("causal", ini="ringattn_device = gpu").stdout)

    @unittest.skipUnless(importlib.util.find_spec("pytest"), "needs pytest")
    def test_the_fixture(self):
        suite = self.path.parent / "test_layers.py"
        suite.parent.mkdir()
        run = self.runner(suite)
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
    SERVER.set_forkserver_preload(["numpy", "pytest"])
    unittest.main()
