# SPDX-License-Identifier: Apache-2.0
"""python -m ringattn verify: another system's file is right, or its first wrong row is named; what the program knows and this
check doesn't is refused."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import numpy as np
import ringattn
from ringattn.__main__ import _NAMES, _SSM, _STORED, main

KINDS = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8",
         "bfloat16": "BF16"}  # fmt: skip


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
        self.assertRegex(out, rf"^(# not read: .+\n)?{rows} of ")
        sampled = f" ({rows} of 800 rows sampled)" if rows < 800 else ""
        self.assertEqual(out.splitlines()[-1], f"PASS{sampled}")
        return out

    def refused(self, words, *flags, code=2):
        given = self.run_main(*flags)
        self.assertEqual((given[0], given[1]), (code, ""), given)
        self.assertIn(words, given[2])
        self.assertRegex(given[2], r"^error: .+ \(.+\)\. .+[.?]\n$")


class Results(Case):
    def test_settings(self):
        sinks = normal(4, seed=4)
        for flags, given in (
            ((), {}),
            (("--mask", "full"), {"mask": "full"}),
            (("--window", "30,-1"), {"mask": (30, 0)}),
            (("--mask", "full", "--window", "-1,5", "--softcap", "3"), {"mask": (-1, 5), "softcap": 3.0}),
            (("--query-offset", "-7", "--softmax-scale", "0.3"), {"q_offset": -7, "softmax_scale": 0.3}),
        ):
            out, lse = ringattn.attention(self.q, self.k, self.v, sinks=sinks, **given)
            write(self.input, q=self.q, k=self.k, v=self.v, sinks=sinks)
            write(self.peer, out=out, lse=lse.T)
            self.passes(*flags)
            flags = [*flags, "--softmax-scale", "0.9"] if "--softmax-scale" not in flags else [*flags[:-1], "0.9"]
            code, said, _ = self.run_main(*flags)
            self.assertEqual((code, said.splitlines()[-1]), (1, "FAIL"))
        self.passes("--rows", "64", *flags[:-1], "0.3", rows=64)

    def test_a_scale_of_0_weighs_all_keys_alike(self):
        ends = np.arange(1, 201, dtype="float32")[:, None, None]
        out = np.repeat(np.cumsum(self.v.astype("float64"), axis=0) / ends, 2, axis=1).astype("float32")
        write(self.input, q=self.q, k=self.k, v=self.v)
        write(self.peer, out=out, lse=np.repeat(np.log(ends[:, :, 0]), 4, axis=1).T)
        self.passes("--softmax-scale", "0")
        self.assertEqual(self.run_main()[0], 1)

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
        for name, code in (("x\udcff.safetensors", 0), (self.peer.name + "/", 3), ("none\udcff", 3)):
            if code == 0:
                self.peer.rename(self.peer.with_name(name))
                self.peer = self.peer.with_name(name)
            command[-1] = os.path.join(self.peer.parent, name)
            done = subprocess.run(command, capture_output=True, check=False,
                                  env=os.environ | {"PYTHONIOENCODING": "ascii"})
            self.assertEqual((done.returncode, done.stderr.count(b"\n")), (code, code // 3), done.stderr)
        command[-1] = str(self.peer)
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(done.stderr, "error: the result can't be written to stdout (No space left on device). "
                                      "Redirect stdout to a file that can be written.\n")


class Refused(Case):
    def setUp(self):
        super().setUp()
        self.out, self.lse = ringattn.attention(self.q, self.k, self.v)
        self.good()

    def good(self, **more):
        self.good_input(**more)
        write(self.peer, out=self.out, lse=self.lse.T)

    def good_input(self, **more):
        write(self.input, q=self.q, k=self.k, v=self.v, **more)

    def test_what_is_not_there_or_not_known(self):
        self.input.unlink()
        self.refused("qkv.safetensors (No such file or directory)", code=3)
        write(self.input, q=self.q, k=self.k)
        self.refused("has no tensor `v` (it holds `k`, `q`)", code=3)
        self.good()
        peer, self.peer = self.peer, self.peer.with_name("none")
        self.refused("none (No such file or directory)", code=3)
        self.peer = peer
        self.good(k_positions=np.zeros(1, "int32"))
        self.refused("has k_positions (this check covers only whole sequences", code=4)
        self.good(k_lengths=np.zeros(1, "int32"))
        self.refused("has k_lengths", code=3)
        self.good(k_pages=self.k)
        self.refused("holds k and k_pages", code=3)
        self.assertIn("# not read: 1 tensor\n", self.passes("--tensors", "k=k,v=v"))
        write(self.input, q=self.q, block_mask=np.ones((1, 1, 1), "uint8"))
        self.refused("has no tensor `k`", code=3)
        write(self.input, q=self.q, latent=self.k)
        self.refused("has latent (this check takes keys and values in rows). Use the program", code=4)
        self.good()
        self.refused("has no tensor `other`", "--tensors", "sinks=other", code=3)

    def test_names_of_other_libraries(self):
        self.good(alibi_slopes=np.zeros(4, "float32"))
        self.refused("has `alibi_slopes`, which isn't read (no bias is added to scores). Leave it out, or name", code=3)
        self.assertIn("# not read: 1 tensor\n", self.passes("--tensors", "q=q"))
        cu = np.array([0, 50, 200], "int32")
        self.good(cu_seqlens=cu, cu_seqlens_q=cu)
        self.refused("`cu_seqlens` and `cu_seqlens_q` (both names mean cu_seqlens_q)", code=3)
        self.good(x=self.q, dt=self.q)
        self.refused("holds an SSM and attention", code=3)
        self.good(block_mask=np.ones((1, 1, 1), "uint8"), **{f"z{i}": self.q for i in range(9)})
        listed = ", ".join(f"`{name}`" for name in ("block_mask", *(f"z{i}" for i in range(7))))
        self.assertIn(f"# not read: {listed} and 2 more\n", self.passes())
        out, lse = ringattn.varlen(self.q, self.k, self.v, cu, sinks=normal(4, seed=4))
        write(self.peer, out=out, lse=lse.T)
        self.good_input(cu_seqlens=cu, s_aux=normal(4, seed=4))
        self.passes()
        self.good_input(cu_seqlens=cu)
        self.assertEqual(self.run_main()[0], 1)

    def test_names_of_other_roles(self):
        text = (pathlib.Path(__file__).parents[2] / "src/io/tensor_roles.cpp").read_text()
        roles = re.findall(r'TensorRole\{"(\w+)"', text)
        self.assertEqual({*roles}, {*_NAMES, *_STORED, *_SSM})
        self.refused("has no tensor `dt` (--tensors names tensors of an SSM)", "--tensors", "x=q", code=3)
        self.good(dt=self.q)
        self.refused("--peer is not for an SSM", "--tensors", "x=q", code=2)
        self.refused("--tensors names k_pages (this check takes keys", "--tensors", "k_pages=k", code=4)
        self.refused("--tensors is", "--tensors", "y=q", code=2)

    def test_compressed_input_is_the_programs(self):
        header = {"__metadata__": {"k_format": "fp8 head"}, "q": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        text = json.dumps(header).encode()
        self.input.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
        self.refused("has k_format in its metadata (this check takes keys and values that are not", code=4)

    def test_results_of_another_job(self):
        for words, tensors in (
            ("has no tensor `out`", {"lse": self.lse.T}),
            ("`out` is float16 [200, 4, 16], the job gives float32", {"out": self.out.astype("float16")}),
            ("`out` is float32 [199, 4, 16], the job gives float32 [200, 4, 16]", {"out": self.out[1:]}),
            ("`out` is float32 [4, 16]", {"out": self.out[0]}),
            ("`lse` is float32 [200, 4], the job gives float32 [4, 200]", {"out": self.out, "lse": self.lse}),
            ("`lse` is float32 [], the job", {"out": self.out, "lse": np.float32(1).reshape(())}),
            ("`lse` of", {"out": self.out, "lse": self.lse.T.astype("float16")}),
        ):
            write(self.peer, **tensors)
            self.refused(words, code=3)

    def test_tensors_that_make_no_job(self):
        cu = np.array([0, 50, 200])
        for words, more in (
            ("k of", {"k": self.k.astype("float16")}),
            ("k of", {"k": self.k[None]}),
            ("q, k and v are", {"v": self.v[1:]}),
            ("q has 4 heads, and k and v have 3", {"k": normal(200, 3, 32), "v": normal(200, 3, 16)}),
            ("`q` of", {"q": self.q.astype("int32")}),
            ("it has 3 axes, or 4 with a batch", {"q": self.q[0]}),
            ("at least one head", {"v": self.v[:, :, :0]}),
            ("cu_seqlens_q of", {"cu_seqlens_q": cu[1:]}),
            ("cu_seqlens_q of", {"cu_seqlens_q": cu[[0, 2, 1, 2]]}),
            ("cu_seqlens_q of", {"cu_seqlens_q": cu[:2]}),
            ("cu_seqlens_q of", {"cu_seqlens_q": cu[:1]}),
            ("cu_seqlens_q of", {"cu_seqlens_q": cu[None]}),
            ("`cu_seqlens_q` of", {"cu_seqlens_q": cu.astype("float32")}),
            ("2 sequences of queries, 1 of keys", {"cu_seqlens_q": cu, "cu_seqlens_k": cu[[0, 2]]}),
            ("`q_offset` of", {"q_offset": np.zeros(1, "int32")}),
            ("2 offsets", {"q_offset": np.zeros(2, "int64")}),
            ("q_offset of", {"q_offset": np.array([-(2**63)])}),
            ("sinks is [3]", {"sinks": normal(3)}),
        ):
            write(self.input, **({"q": self.q, "k": self.k, "v": self.v} | more))
            self.refused(words, code=3)
        write(self.input, q=self.q[:50], k=self.k, v=self.v, cu_seqlens_k=np.array([0, 200]))
        write(self.peer, out=self.out[:50])
        self.refused("has one of cu_seqlens_q and cu_seqlens_k", code=3)
        batch = [x.reshape(2, 100, *x.shape[1:]) for x in (self.q, self.k, self.v)]
        write(self.input, **dict(zip("qkv", batch)), cu_seqlens_q=cu)
        self.refused("has an axis for the batch already", code=3)
        write(self.input, **dict(zip("qkv", (batch[0], self.k.reshape(4, 50, 2, 32), batch[2]))))
        self.refused("the same batch", code=3)

    def test_broken_files_of_either_kind(self):
        for words, raw in (("(it is empty)", b""), ("isn't JSON in UTF-8", bytes(8)),
                           ("nested deeper than 4 levels", (9000).to_bytes(8, "little") + b"[" * 9000)):  # fmt: skip
            self.good()
            self.peer.write_bytes(raw)
            self.refused(words, code=3)
            self.good()
            self.input.write_bytes(raw)
            self.refused(words, code=3)
        write(self.input, k=self.k)
        self.refused(r"has no tensor `\u001b[31m\u00e4\u0060`", "--tensors", "q=\x1b[31mä`", code=3)

    def test_what_is_no_regular_file(self):
        self.input.unlink()
        os.mkfifo(self.input)
        self.refused("(it is not a regular file). Give a safetensors file", code=3)
        self.input = self.input.parent
        self.refused("(it is a directory)", code=3)
        self.input = pathlib.Path("/dev/zero")
        self.refused("(it is not a regular file)", code=3)

    def test_flags(self):
        for words, flags in (
            *((f'--rows is "{n}" (it takes a whole number from 1 to 1048576)', ("--rows", n))
              for n in ("0", "-3", "2k", "1.5", " 3", "+3", "1_0", "9" * 5000, "٣")),
            *((f'--window is "{w}"', ("--window", w))
              for w in ("3", "-2,0", "3,", "0,-7", "1,2,3", f"{2**61},0", "9999999999g,0")),
            ("q is given twice", ("--tensors", "q=k,q=q")),
            *((f'--tensors is "{t}"', ("--tensors", t)) for t in ("w=1", "q", "q=", "q=a,", ",")),
            *((f'--softcap is "{x}" (it takes', ("--softcap", x))
              for x in ("nan", "-1", "inf", "1e31", "1e-40", "1e-999", "a", "1_0")),
            *((f'--softmax-scale is "{x}"', ("--softmax-scale", x)) for x in ("inf", "-inf", "nan", "1e400", "0x1")),
            ("--window contradicts the causal mask (R is 5", ("--window", "30,5")),
            *((f'--query-offset is "{n}"', ("--query-offset", n)) for n in ("9" * 20, str(2**60 + 1),
                                                                            str(-(2**60) - 1), "-")),
            ('--order is "dht" (it takes thd, htd, bthd or bhtd)', ("--order", "dht")),
            ('--mask is "none" (it takes full or causal)', ("--mask", "none")),
            ("--rows is given 2 times (one value would be ignored)", ("--rows", "3", "--rows=4")),
            ("--peer is given 2 times", ("--peer", "other")),
            ("--mask has no value", ("--mask", "--rows", "3")),
            ("--mask has no value", ("--mask",)),
            ("--rows has no value", ("--rows=",)),
            ("unknown flag --row (", ("--row", "3")),
            ("unknown flag --ranks (this check has no flag of that name, though the program", ("--ranks", "3")),
            ('"more" belongs to no flag', ("more",)),
        ):  # fmt: skip
            with self.subTest(flags):
                self.refused(words, *flags)
        self.assertIn("Did you mean --rows?", self.run_main("--row", "3")[2])
        self.passes("--window", "4k,0", "--softcap", "0")
        for words, said in (([], "there is no command"), (["run"], '"run" is not a command'),
                            (["verify"], "--input is missing")):
            err = io.StringIO()
            with contextlib.redirect_stderr(err):
                self.assertEqual(main(words), 2)
            self.assertIn(said, err.getvalue())

    def test_collect_env_prints_the_library_and_python(self):
        done = subprocess.run([sys.executable, "-m", "ringattn", "collect-env"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for line in (rf"  version +{re.escape(ringattn.__version__)} ", r"  CPU +\S", r"Python\n  Python +CPython \d",
                     rf"  numpy +{re.escape(np.__version__)}\n", r"  torch build +\S"):
            self.assertRegex(done.stdout, line)
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            self.assertEqual(main(["collect-env", "--json"]), 2)
        self.assertIn("collect-env takes none", err.getvalue())

    def test_help_names_every_flag_and_what_is_not_there(self):
        for words in (["--help"], ["verify", "-h"], ["verify", "--rows", "3", "--help"]):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                self.assertEqual(main(words), 0)
            self.assertEqual(re.findall(r"^  --([a-z-]+) ", out.getvalue(), re.MULTILINE),
                             ["input", "peer", "tensors", "order", "mask", "window", "query-offset", "softmax-scale",
                              "softcap",
                              "rows"])  # fmt: skip
            self.assertIn("That program has more", out.getvalue())

    def test_settings_of_the_function(self):
        given = self.q, self.k, self.v, self.out, self.lse
        for words, named in (("softcap is nan", {"softcap": np.nan}), ("softcap is -1.0", {"softcap": -1}),
                             ("softmax_scale is inf", {"softmax_scale": np.inf}), ("rows is 0", {"rows": 0}),
                             ("rows is -3", {"rows": -3}), ("rows is many", {"rows": "many"}),
                             ("a side of mask is -2", {"mask": (-2, 0)})):  # fmt: skip
            with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
                ringattn.testing.check_attention(*given, **named)
            self.assertIn(words, str(caught.exception))
        for rows in (1, 2, 3, 64, 799, 800, 801, None):
            self.assertEqual(ringattn.testing.check_attention(*given, rows=rows).rows, min(rows or 800, 800))


if __name__ == "__main__":
    unittest.main()
