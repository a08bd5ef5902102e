# SPDX-License-Identifier: Apache-2.0
"""bench/peers without a GPU: the programs compile and explain themselves, shapes and sizes are read as ringattn reads
them, decode steps and masks are ours (with a torch that only writes down what it is asked), and, where PyTorch is
installed, the zigzag ring is right on one to three gloo ranks. Usage: peers_test.py
[unit | torch [PROGRAM]]; exits 77 where the part can't run."""

import argparse
import contextlib
import importlib.util
import io
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
sys.path[:0] = [str(PEERS), str(PEERS.parent)]
sys.dont_write_bytecode = True
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same on every machine

import common  # noqa: E402  (these lie in bench/peers and bench)
import decode  # noqa: E402
import result_lines  # noqa: E402
import sparse  # noqa: E402


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-B", *words], capture_output=True, text=True)


class Unit(unittest.TestCase):
    def test_programs_compile_and_have_help(self):
        self.assertEqual(len(PROGRAMS), 16)
        for program in PROGRAMS:
            with tempfile.TemporaryDirectory() as folder:
                py_compile.compile(str(program), cfile=f"{folder}/compiled", doraise=True)
            done = run(str(program), "--help")
            self.assertEqual(done.returncode, 0, done.stderr)
            steps, shapes = "--steps LIST", "--shapes LIST"
            words = {"decode.py": steps, "mla.py": steps, "linear_cpu.py": "--rows LIST"}
            with_shapes = ("attention_backward", "gemm", "linear", "linear_attention", "row_parallel", "ssm")
            words |= dict.fromkeys((f"{name}.py" for name in with_shapes), shapes)
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

    def test_shapes_of_gradients_are_words(self):
        import attention_backward

        shape = attention_backward.parse_shape("2x8kx128/16x192/128", "bf16")
        self.assertEqual(shape, common.Shape(8192, 2, 128, 16, 192, 128, "bf16", "causal"))
        self.assertEqual(attention_backward.flops(shape), 2.5 * 2 * 2 * (8192 * 8193 / 2) * 128 * (192 + 128))
        shape = attention_backward.parse_shape("1x3000x8/8x64:full", "fp16")
        self.assertEqual(shape, common.Shape(3000, 1, 8, 8, 64, 64, "fp16", "full"))
        for text in ("", "1x8kx32/8", "0x8kx32/8x64", "1x8kx32/0x64", "1x8kx32/5x64", "1x8qx32/8x64", "1x8kx32/8x64:causal"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                attention_backward.parse_shape(text, "bf16")
        for texts in attention_backward.SHAPES.values():
            self.assertTrue(all(attention_backward.parse_shape(text, "bf16") for text in texts.split(",")))

    def test_scans_are_ours(self):
        """ssm_gpu.cpp has the same shapes by the same names, and as many bytes of each. Its gradients have no peer yet."""
        import ssm

        ours = (PEERS.parent / "ssm_gpu.cpp").read_text(encoding="utf-8")
        number = r"([\d']+)"
        shape = rf'{{"([-0-9a-z]+)", Kind::k(\w+), {", ".join([number] * 5)}, (true|false)(, true)?}}'
        rows = [row for row in re.findall(shape, ours) if not row[1].endswith("Backward")]
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


class FakeCuda:
    """torch.cuda with a clock: a replay of n steps lasts n times `step_ms`, and the first ones longer."""

    def __init__(self, step_ms: float) -> None:
        self.step_ms, self.clock, self.used, self.captured, self.replays = step_ms, 0.0, [], None, 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = cuda.clock

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                cuda.replays += 1
                cuda.clock += cuda.step_ms * len(cuda.captured) * (5 if cuda.clock < decode.WARM_MS else 1)

        @contextlib.contextmanager
        def graph(_: Graph, stream: object):
            assert stream is cuda.stream
            before, cuda.used = cuda.used, []
            yield
            cuda.captured, cuda.used = cuda.used, before

        @contextlib.contextmanager
        def stream(_: object):
            yield

        self.stream = object()
        self.torch = types.SimpleNamespace(
            cuda=types.SimpleNamespace(
                Stream=lambda: self.stream, stream=stream, graph=graph, CUDAGraph=Graph, Event=Event, synchronize=lambda: None
            )
        )


class DecodePeers(unittest.TestCase):
    def test_caches_are_as_many_as_ours(self):
        """decode_words_test.cpp has the same figures."""
        turns = [decode.Step(1, keys << 10, 32, 8, 128) for keys in (1, 48, 1024)]
        self.assertEqual([(step.caches, step.launches) for step in turns], [(128, 128), (3, 6), (1, 4)])
        for keys in (3000, 65537, 100000):
            step = decode.Step(3, keys, 32, 4, 64)
            self.assertGreaterEqual(step.caches * 2 * step.cache_bytes, decode.FAR_BEYOND_CACHE)
            self.assertEqual((step.launches >= decode.MIN_LAUNCHES, step.launches % step.caches), (True, 0))
        self.assertEqual(decode.FAR_BEYOND_CACHE, result_lines.FAR_BEYOND_CACHE)

    def test_a_graph_of_steps_over_all_caches_in_turn_is_replayed_warm(self):
        step = decode.Step(1, 48 << 10, 32, 8, 128)
        fake = FakeCuda(step_ms=0.25)
        times = decode.microseconds(fake.torch, step, lambda cache: fake.used.append(cache))
        self.assertEqual(fake.used, [0, 1, 2], "each variant is used before it is captured")
        self.assertEqual(fake.captured, [0, 1, 2, 0, 1, 2])
        self.assertEqual(times, [250.0] * decode.REPLAYS, "without the replays that warm up")
        self.assertGreaterEqual(decode.REPLAYS, 9)
        self.assertGreater(fake.replays, decode.REPLAYS)

    def test_lines_are_those_that_are_read(self):
        torch = types.SimpleNamespace(__version__="2.11.0")
        world = types.SimpleNamespace(torch=torch, devices=lambda: ["GPU"])
        step = decode.Step(32, 4096, 32, 8, 128)
        found = {"samples": 11, "us": {"median": 123.0, "p10": 120.0, "p90": 130.0}}
        seen = set()
        for kernel in ("cudnn", "flash_attention_2", decode.PACKAGE):
            for variant in decode.variants(kernel, step):
                line = json.loads(json.dumps(decode.line(world, variant, step, found)))
                reading = result_lines.parse_step(line)
                self.assertEqual((reading.us, reading.job.name), (123.0, "bf16, 32/8 heads of 128, 32 x 4k"))
                seen.add((reading.who, reading.form))
        self.assertEqual(len(seen), 4 + 4 + 1, "no form of one peer is taken for another")
        equal = decode.Step(1, 4096, 32, 32, 128)
        self.assertEqual([variant.grouped for variant in decode.variants("cudnn", equal)], [True, True], "no groups to pack")
        refused = {"samples": 0, "us": None, "error": "No available kernel"}
        self.assertEqual(result_lines.parse_step(decode.line(world, variant, step, refused)).error, "No available kernel")

    def test_what_a_peer_refuses_is_in_its_line(self):
        torch = types.SimpleNamespace(full=lambda *_, **__: None, int32=None)
        world = types.SimpleNamespace(torch=torch, device=None)
        pool = types.SimpleNamespace(cache=lambda *_: (None, None))
        variant, step = decode.Variant("cudnn", True, True), decode.Step(1, 1 << 20, 32, 8, 128)
        for error in (RuntimeError("No available kernel. Aborting.\nmore"), NotImplementedError("x"), ImportError("y")):
            with unittest.mock.patch.object(decode, "query", lambda *_: None), unittest.mock.patch.object(
                decode, "microseconds", side_effect=error
            ):
                found = decode.measure(world, pool, variant, step, 1)
            self.assertEqual(found, {"samples": 0, "us": None, "error": str(error).splitlines()[0]})

    def test_steps_are_words(self):
        self.assertEqual(decode.parse_steps("1x4k,32x16k"), [(1, 4096), (32, 16384)])
        for text in ("", "4k", "x4k", "1x", "0x4k", "1x4k,"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=text):
                decode.parse_steps(text)


class SparsePeers(unittest.TestCase):
    def test_lists_have_the_diagonal_and_the_first_block_and_about_their_part(self):
        for text in sparse.PATTERNS.split(","):
            pattern = sparse.parse_pattern(text)
            self.assertEqual(pattern.name, text)
            lists = sparse.block_mask_rows(pattern, 512 * sparse.BLOCK)
            for row, columns in enumerate(lists):
                self.assertEqual(columns, sorted(set(columns)))
                self.assertEqual((columns[0], columns[-1]), (0, row))
            density = sum(map(len, lists)) / (512 * 513 / 2)
            self.assertLess(abs(density - pattern.part), 0.01, text)
        for text in ("", "dense-10", "random", "random-0", "random-100", "random-x", "other-10"):
            with self.assertRaises(ValueError, msg=text):
                sparse.parse_pattern(text)

    def test_the_random_list_is_the_same_everywhere(self):
        found = sparse.block_mask_rows(sparse.parse_pattern("random-25"), 12 * sparse.BLOCK)[-1]
        self.assertEqual(found, [0, 6, 9, 11])

    def test_a_tile_takes_its_part_of_the_time(self):
        world = types.SimpleNamespace(torch=types.SimpleNamespace(__version__="2.11.0"), devices=lambda: ["GPU"])
        shape = common.Shape(4 * sparse.BLOCK, 1, 32, 8, 128, 128, "bf16", "causal")
        pattern = sparse.parse_pattern("random-50")
        line = sparse.line(world, pattern, shape, 5, {"samples": 10, "ms": {"median": 0.5}, "tflops_per_rank": 700.0})
        self.assertEqual((line["density"], line["ns_per_tile"]), (0.5, 0.5e6 / 5 / 32))
        self.assertNotIn("tflops_per_rank", line, "a rate of pairs that the list leaves out")
        line = sparse.line(world, pattern, shape, 5, {"error": "no compiler"})
        self.assertEqual((line["error"], line["ms"], line["ns_per_tile"]), ("no compiler", None, None))

    def test_a_compiler_that_does_not_end_is_left(self):
        world = types.SimpleNamespace(on_gpu=False)

        def compiles_for_ever() -> None:
            while True:
                pass

        with contextlib.redirect_stderr(io.StringIO()):
            found = sparse.measure(world, compiles_for_ever, None, None, 1)
        self.assertEqual(found, {"error": "it did not compile in 1 s"})


class WithTorch(unittest.TestCase):
    def test_self_checks(self):
        for program in PROGRAMS:
            done = run(str(program), "--self-check")
            expected = common.SKIPPED if "skipped:" in done.stdout else 0
            self.assertEqual(done.returncode, expected, f"{program.name}\n{done.stdout}{done.stderr}")

    def test_peers_are_right_on_several_ranks(self):
        for program, ranks, name, checks in (("zigzag_ring.py", 2, "zigzag ring", 2), ("zigzag_ring.py", 3, "zigzag ring", 2),
                                             ("row_parallel.py", 2, "row-parallel layer", 1)):  # fmt: skip
            done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
                       str(PEERS / program), "--self-check")  # fmt: skip
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertEqual(done.stdout.count(f"{name} of {ranks}"), checks, done.stdout)
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
        (own,) = decode.variants(decode.PACKAGE, step)
        with unittest.mock.patch.dict(sys.modules, {"flash_attn": module}):
            found = decode.attend(torch, own, q, k, v, lengths)
        for variant in decode.variants("math", step):
            torch.testing.assert_close(decode.attend(torch, variant, q, k, v, lengths).reshape(q.shape), found)

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
    unittest.main(defaultTest="WithTorch" if part == "torch" else ["Unit", "DecodePeers", "SparsePeers"])
