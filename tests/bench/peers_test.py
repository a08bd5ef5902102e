# SPDX-License-Identifier: Apache-2.0
"""bench/peers without a GPU: the programs compile and explain themselves, shapes and sizes are read as ringattn reads
them, and, where PyTorch is installed, the zigzag ring is right on one to three gloo ranks. Usage: peers_test.py
[unit | torch [PROGRAM]]; exits 77 where the part can't run."""

import argparse
import importlib.util
import json
import os
import pathlib
import py_compile
import re
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock

PEERS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"
PROGRAMS = sorted(path for path in PEERS.glob("*.py") if path.name != "common.py")
sys.path.insert(0, str(PEERS))
sys.dont_write_bytecode = True
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine

import common  # noqa: E402  (it lies in bench/peers)


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-B", *words], capture_output=True, text=True)


class Unit(unittest.TestCase):
    def test_programs_compile_and_have_help(self):
        self.assertEqual(len(PROGRAMS), 9)
        for program in PROGRAMS:
            with tempfile.TemporaryDirectory() as folder:
                py_compile.compile(str(program), cfile=f"{folder}/compiled", doraise=True)
            done = run(str(program), "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            steps, shapes = "--steps LIST", "--shapes LIST"
            words = {"decode.py": steps, "mla.py": steps, "gemm.py": shapes, "ssm.py": shapes}
            self.assertIn(words.get(program.name, "--seq LIST"), done.stdout)

    def test_sizes_are_ringattns(self):
        self.assertEqual(common.parse_sizes("8k,64k"), [8192, 65536])
        self.assertEqual(common.parse_sizes("8k-64k*2,2m"), [8192, 16384, 32768, 65536, 2097152])
        for text in ["", "k", "-1", "0", "8k-64k", "8k-64k*1", "8q"]:
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                common.parse_sizes(text)

    def test_short_sequences_are_batched(self):
        parser = common.describe("")
        common.add_job_flags(parser, "1k,16k,64k")
        self.assertEqual([shape.batch for shape in common.shapes(parser.parse_args([]))], [16, 1, 1])
        shape = common.shapes(parser.parse_args(["--seq", "3", "--batch", "2", "--heads", "4", "--head-dim", "8"]))[0]
        self.assertEqual(shape.flops(), 2 * 2 * (1 + 2 + 3) * 4 * (8 + 8))
        self.assertEqual(shape.as_json()["tokens"], 6)
        self.assertEqual(shape.as_json()["head_dim_v"], 8)

    def test_products_are_ours(self):
        """gemm_arguments_test.cpp has the same figures."""
        import gemm

        expand, absorb, back = (gemm.Gemm(*shape, True) for shape in gemm.parse_shapes(
            "expand:32kx16,absorb:128x128,back:128x128"
        ))
        self.assertEqual(expand.flops, 2 * 32768 * 16 * 512 * 128)
        self.assertEqual(expand.bytes, 2 * (32768 * 512 + 16 * 128 * 512 + 32768 * 16 * 128))
        self.assertEqual(absorb.bytes, 2 * (128 * 128 * 128 + 128 * 128 * 512 + 128 * 128 * 512))
        self.assertEqual((back.bytes, absorb.caches, absorb.launches), (absorb.bytes, 15, 30))
        warm = gemm.Gemm("back", 128, 128)
        self.assertEqual((warm.caches, warm.launches), (1, 16))
        for text in ("", "128x128", "back:128", "fold:1x1", "back:0x1", "back:1x1,"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                gemm.parse_shapes(text)
        with self.assertRaises(argparse.ArgumentTypeError):
            gemm.parse_caches("hot")

    def test_scans_are_ours(self):
        """ssm_gpu.cpp has the same shapes by the same names, and as many bytes of each."""
        import ssm

        ours = (PEERS.parent / "ssm_gpu.cpp").read_text(encoding="utf-8")
        number = r"([\d']+)"
        shape = rf'{{"([-0-9a-z]+)", Kind::k(\w+), {", ".join([number] * 5)}, (true|false)(, true)?}}'
        rows = re.findall(shape, ours)
        numbers = lambda row: tuple(int(text.replace("'", "")) for text in row[2:7])
        told = {row[0]: (*numbers(row), row[8] != "") for row in rows}
        peers = {
            one.name: (one.sequences, one.tokens, one.heads, one.head_dim, 0 if "conv" in one.kind else one.state_dim, one.gate)
            for one in ssm.SHAPES
        }
        self.assertEqual(told, peers)
        of = {one.name: one for one in ssm.parse_shapes(",".join(told))}
        self.assertEqual(list(of)[-1], "ssd-2m", "what may end the use of the device comes last")
        self.assertEqual(of["ssd-16k"].bytes, 346554368)
        self.assertEqual(of["ssd-gated-131k"].bytes, 4114612224)
        self.assertEqual(of["conv1d-131k"].bytes, 2 * 2 * 131072 * 8448)
        self.assertEqual(of["update-128"].bytes - 2 * 128 * 80 * 64 * 128 * 4, 2 * 128 * (2 * 80 * 64 + 80 + 2 * 128))
        with self.assertRaises(argparse.ArgumentTypeError):
            ssm.parse_shapes("ssd-16k,ssd-17k")

    def test_flash_attention_3_is_skipped_where_it_is_not_installed(self):
        words = [str(PEERS / "sdpa.py"), "--kernels", "flash_attention_3", "--self-check"]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "flash_attn_interface.py").touch()
            empty = pathlib.Path(folder, "empty")
            empty.mkdir()
            for path, skipped in ((str(empty), not importlib.util.find_spec("flash_attn_interface")), (folder, False)):
                environment = {**os.environ, "PYTHONPATH": path}
                command = [sys.executable, "-B", *words]
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                self.assertEqual("# flash_attention_3: skipped (" in done.stderr, skipped, done.stderr)

    def test_quantiles(self):
        self.assertEqual(common.quantile([3.0, 1.0, 2.0], 0.5), 2.0)
        self.assertAlmostEqual(common.quantile([float(i) for i in range(11)], 0.9), 9.0)
        self.assertEqual(common.quantile([5.0], 0.1), 5.0)


class WithTorch(unittest.TestCase):
    def test_self_checks(self):
        for program in PROGRAMS:
            done = run(str(program), "--self-check")
            expected = common.SKIPPED if "skipped:" in done.stdout else 0
            self.assertEqual(done.returncode, expected, f"{program.name}\n{done.stdout}{done.stderr}")

    def test_zigzag_ring_is_right_on_several_ranks(self):
        for ranks in (2, 3):
            done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                       str(PEERS / "zigzag_ring.py"), "--self-check")  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(done.stdout.count(f"zigzag ring of {ranks}"), 2, done.stdout)
            self.assertNotIn("WRONG", done.stdout)

    def test_ringattn_sums_the_same_values(self):
        import long_sum
        import torch

        world = common.World(torch, wanted=False)
        for dtype, least, most in [("fp32", 0, 1e-5), ("bf16", 0, 0.01)]:
            shape = common.Shape(3000, 1, 4, 2, 16, 16, dtype, "full")
            found, kernel = long_sum.run_ours(world, PROGRAM, shape, 5, 1)
            self.assertEqual(kernel, "cpu_attention")
            self.assertTrue(least <= found["largest"] <= most, found)
        with self.assertRaises(RuntimeError):  # what the program refuses is the line's error
            long_sum.run_ours(world, PROGRAM, common.Shape(100, 1, 3, 2, 16, 16, "fp32", "full"), 5, 1)

    def test_flash_attention_3_is_given_tokens_before_heads(self):
        import sdpa
        import torch

        def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, None]:
            self.assertEqual((q.shape, k.shape), ((2, 33, 4, 16), (2, 33, 2, 16)))
            out = common.plain_attention(torch, *(rows.transpose(1, 2) for rows in (q, k, v)), causal)
            return out.transpose(1, 2), None

        module = types.ModuleType("flash_attn_interface")
        module.flash_attn_func = flash_attn_func
        world, shape = common.World(torch, wanted=False), common.Shape(33, 2, 4, 2, 16, 16, "fp32", "causal")
        q, k, v = sdpa.inputs(world, shape, 1)
        with unittest.mock.patch.dict(sys.modules, {"flash_attn_interface": module}):
            found = sdpa.attention(torch, sdpa.FLASH_ATTENTION_3, q, k, v, True)
        self.assertTrue(torch.equal(found, common.plain_attention(torch, q, k, v, True)))
        line = sdpa.line(world, sdpa.FLASH_ATTENTION_3, shape, {})
        self.assertEqual((line["tool"]["name"], line["kernel"]), ("flash_attention_3", ""))

    def test_flash_attention_2_is_given_its_caches_as_they_lie(self):
        import decode
        import torch

        def flash_attn_with_kvcache(q: torch.Tensor, *caches: torch.Tensor, cache_seqlens: torch.Tensor) -> torch.Tensor:
            k, v = caches
            self.assertEqual((q.shape, k.shape), ((3, 1, 4, 16), (3, 33, 2, 16)))
            self.assertTrue(k.is_contiguous() and v.is_contiguous(), "nothing is copied")
            self.assertEqual((cache_seqlens.tolist(), cache_seqlens.dtype), ([33] * 3, torch.int32))
            rows = (rows.transpose(1, 2) for rows in (q, k, v))
            return common.plain_attention(torch, *rows, causal=False).float().transpose(1, 2)

        module = types.ModuleType("flash_attn")
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
        world, step = common.World(torch, wanted=False), decode.Step(3, 33, 4, 2, 16, "fp32")
        with unittest.mock.patch.object(decode, "FAR_BEYOND_CACHE", 1 << 16):
            pool = decode.Pool(world, [step], 1)
            self.assertGreater(step.caches, 1)
            caches = [pool.cache(step, True, index) for index in range(step.caches)]
        places = {half.data_ptr() for cache in caches for half in cache}
        self.assertEqual(len(places), 2 * len(caches), "K and V of each cache lie apart")
        q, (k, v) = decode.query(world, step, 1), caches[-1]
        lengths = torch.full((3,), 33, dtype=torch.int32)
        (own,) = decode.ways(decode.PACKAGE, step)
        with unittest.mock.patch.dict(sys.modules, {"flash_attn": module}):
            found = decode.attend(torch, own, q, k, v, lengths)
        for way in decode.ways("math", step):
            torch.testing.assert_close(decode.attend(torch, way, q, k, v, lengths).reshape(q.shape), found)

    def test_lines_have_the_schema(self):
        import torch

        world = common.World(torch, wanted=False)
        shape = common.Shape(64, 1, 2, 1, 16, 16, "fp32", "causal")
        found = common.measured(world, shape, None, lambda: torch.ones(1000).sum())
        line = json.loads(json.dumps(common.line(world, "tool", "self", "kernel", shape, **found)))
        self.assertEqual(line["schema"], "ringattn.bench/1")
        self.assertGreaterEqual(line["samples"], common.MIN_SAMPLES)
        self.assertLessEqual(line["ms"]["p10"], line["ms"]["median"])
        self.assertLessEqual(line["ms"]["median"], line["ms"]["p90"])
        self.assertAlmostEqual(line["tflops_per_rank"], shape.flops() / line["ms"]["median"] * 1e-9)

        def refuses() -> None:
            raise RuntimeError("no kernel\nfor this shape")

        found = common.measured(world, shape, None, refuses)
        line = common.line(world, "tool", "self", "kernel", shape, **found)
        self.assertEqual((line["error"], line["ms"]), ("no kernel", None))


if __name__ == "__main__":
    part = sys.argv.pop(1) if sys.argv[1:] else "unit"
    PROGRAM = sys.argv.pop(1) if sys.argv[1:] else "ringattn"
    if part == "torch" and os.environ.get("RINGATTN_TEST_LONG") != "1":
        print("skipped: a part of the long suite (RINGATTN_TEST_LONG=1), as it tests what measures others")
        sys.exit(common.SKIPPED)
    if part == "torch" and importlib.util.find_spec("torch") is None:
        print("skipped: needs PyTorch (pip install torch==2.11.*)")
        sys.exit(common.SKIPPED)
    unittest.main(defaultTest="WithTorch" if part == "torch" else "Unit")
