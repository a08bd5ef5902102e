# SPDX-License-Identifier: Apache-2.0
"""python -m ringattn verify: another system's file is right, or its first wrong row is named; what the program knows and this
check doesn't is refused."""

import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import ringattn
from ringattn.__main__ import main

KINDS = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "bfloat16": "BF16"}


def write(path, **tensors):
    """A safetensors file."""
    header, at = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": KINDS[str(array.dtype)], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    rows = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + rows)


def normal(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.input, self.peer = (pathlib.Path(folder.name, f"{name}.safetensors") for name in ("qkv", "theirs"))
        self.q, self.k, self.v = normal(200, 4, 32), normal(200, 2, 32, seed=2), normal(200, 2, 16, seed=3)

    def run_main(self, *flags):
        """(exit code, stdout, stderr)."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["verify", "--input", str(self.input), "--peer", str(self.peer), *flags])
        return code, out.getvalue(), err.getvalue()

    def passes(self, *flags, rows=800):
        code, out, err = self.run_main(*flags)
        self.assertEqual((code, err), (0, ""), out)
        self.assertTrue(out.startswith(f"{rows} of ") and out.endswith("PASS\n"), out)
        return out

    def refused(self, words, *flags, code=2):
        given = self.run_main(*flags)
        self.assertEqual((given[0], given[1]), (code, ""), given)
        self.assertIn(words, given[2])
        self.assertRegex(given[2], r"^error: .+ \(.+\)\. .+\.\n$")


class Results(Case):
    def test_settings(self):
        sinks = normal(4, seed=4)
        for flags, given in (
            ((), {}),
            (("--mask", "full"), {"mask": "full"}),
            (("--window", "30,5"), {"mask": (30, 0)}),
            (("--mask", "full", "--window", "-1,5", "--softcap", "3"), {"mask": (-1, 5), "softcap": 3.0}),
            (("--query-offset", "-7", "--softmax-scale", "0.3"), {"q_offset": -7, "softmax_scale": 0.3}),
        ):
            out, lse = ringattn.attention(self.q, self.k, self.v, sinks=sinks, **given)
            write(self.input, q=self.q, k=self.k, v=self.v, sinks=sinks)
            write(self.peer, out=out, lse=lse.T)
            self.passes(*flags)
            code, said, _ = self.run_main(*flags, "--softmax-scale", "0.9")
            self.assertEqual((code, said.splitlines()[-1]), (1, "FAIL"))
        said = self.run_main("--rows", "64", *flags)[1]
        self.assertIn(int(said.split()[0]), range(64, 67))  # with the first and the last

    def test_the_first_wrong_row_is_named(self):
        out, lse = ringattn.attention(self.q, self.k, self.v)
        out[150, 1, 7] += 1e-3
        write(self.input, q=self.q, k=self.k, v=self.v)
        write(self.peer, out=out)
        code, said, _ = self.run_main()
        self.assertEqual(code, 1)
        self.assertIn("out is wrong in row 150 (token 150 of sequence 0), head 1, number 7", said)
        write(self.peer, out=ringattn.attention(self.q, self.k, self.v)[0], lse=lse.T * np.float32(1.01))
        self.assertIn("lse is wrong in row ", self.run_main()[1])

    def test_orders_and_names_and_types(self):
        for dtype in ("float32", "float16"):
            q, k, v = (x.astype(dtype) for x in (self.q, self.k, self.v))
            out, lse = ringattn.attention(q, k, v)
            turned = [x.swapaxes(0, 1) for x in (q, k, v, out)]
            write(self.input, a=turned[0], b=turned[1], v=turned[2])
            write(self.peer, out=turned[3], lse=lse.T)
            self.passes("--order", "htd", "--tensors", "q=a,k=b")
            batch = [x.reshape(2, 100, *x.shape[1:]) for x in (q, k, v)]
            out, lse = ringattn.attention(*batch)
            write(self.input, q=batch[0], k=batch[1], v=batch[2])
            write(self.peer, out=out, lse=lse.swapaxes(1, 2))
            self.passes()
            write(self.input, **{name: x.swapaxes(1, 2) for name, x in zip("qkv", batch)})
            write(self.peer, out=out.swapaxes(1, 2))
            self.assertIn("theirs has no lse", self.passes("--order", "bhtd"))
            self.refused("its order has 3 axes", "--order", "thd", code=3)

    def test_packed_sequences(self):
        cu = np.array([0, 50, 50, 200])
        offsets = np.array([3, 0, -20])
        out, lse = ringattn.varlen(self.q, self.k, self.v, cu, q_offsets=offsets)
        write(self.input, q=self.q, k=self.k, v=self.v, cu_seqlens_q=cu.astype("int32"), q_offset=offsets)
        write(self.peer, out=out, lse=lse.T)
        self.passes()
        write(self.input, q=self.q, k=self.k, v=self.v, cu_seqlens_q=cu)
        self.assertEqual(self.run_main()[0], 1)

    def test_bfloat16_in_an_index_of_files(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("needs ml_dtypes")
        q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (self.q, self.k, self.v))
        out, lse = ringattn.attention(q, k, v)
        write(self.input, q=q, k=k)
        write(self.input.with_name("rest.safetensors"), v=v)
        write(self.peer, out=out, lse=lse.T)
        index = self.input.with_name("model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": {"q": self.input.name, "k": self.input.name, "v": "rest.safetensors"}}))
        self.input = index
        self.passes()

    def test_as_a_command(self):
        out, lse = ringattn.attention(self.q, self.k, self.v)
        write(self.input, q=self.q, k=self.k, v=self.v)
        write(self.peer, out=out, lse=lse.T)
        command = [sys.executable, "-m", "ringattn", "verify", "--input", str(self.input), "--peer", str(self.peer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout.splitlines()[-1], "PASS")


class Refused(Case):
    def test_what_is_not_there_or_not_known(self):
        self.refused("can't be read", code=3)
        write(self.input, q=self.q, k=self.k)
        out, lse = ringattn.attention(self.q, self.k, self.v)
        write(self.peer, out=out, lse=lse.T)
        self.refused("has no tensor v (there are k, q)", code=3)
        write(self.input, q=self.q, k=self.k, v=self.v)
        peer, self.peer = self.peer, self.peer.with_name("none")
        self.refused("none can't be read", code=3)
        self.peer = peer
        for name in ("k_positions", "block_mask", "block_indptr"):
            write(self.input, q=self.q, k=self.k, v=self.v, **{name: np.zeros(1, "int32")})
            self.refused(f"has {name} (this check has whole sequences", code=4)
        write(self.input, q=self.q, k=self.k, v=self.v)
        self.refused("has no tensor other", "--tensors", "sinks=other", code=3)
        for words, flags in (("--tensors has w=1", ("--tensors", "w=1")), ("--window is 3", ("--window", "3"))):
            self.refused(words, *flags)
        write(self.peer, lse=lse.T)
        self.refused("has no tensor out", code=3)
        write(self.peer, out=out.astype("float16"))
        self.refused("theirs.safetensors is float16 (q is float32)")
        write(self.peer, out=out[1:])
        self.refused("out is [199, 4, 16]")
        write(self.peer, out=out[0])
        self.refused("its order has 3 axes", code=3)

    def test_broken_files(self):
        write(self.peer, out=self.q)
        whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        for words, text in (
            ("its header is no JSON", b"{"),
            ("its header is no object", b"[]"),
            ("q lacks shape", json.dumps({"q": {"dtype": "F32"}}).encode()),
            ("q is F32 [2] in bytes 0 to 8", json.dumps({"q": whole}).encode()),
            ("q is F32 [3] in bytes 0 to 8", json.dumps({"q": whole | {"shape": [3]}}).encode()),
            ("q of", json.dumps({"q": whole | {"dtype": "F8_E4M3"}}).encode()),
        ):
            self.input.write_bytes(len(text).to_bytes(8, "little") + text)
            self.refused(words, code=3)
        self.input.write_bytes((2**40).to_bytes(8, "little"))
        self.refused("its header would have", code=3)


if __name__ == "__main__":
    unittest.main()
