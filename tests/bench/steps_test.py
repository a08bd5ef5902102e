# SPDX-License-Identifier: Apache-2.0
"""bench/steps.py on small files of lines; and the method and the lists of bench/peers/decode.py and sparse.py without a GPU
and without PyTorch: a torch that only writes down what it is asked. What needs PyTorch itself: peers_test.py."""

import argparse
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = pathlib.Path(__file__).resolve().parent / "lines"
PEERS, OURS = LINES / "decode-peers.jsonl", LINES / "decode.jsonl"
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "peers")]
sys.dont_write_bytecode = True

import common  # noqa: E402  (these lie in bench and bench/peers)
import decode  # noqa: E402
import points  # noqa: E402
import sparse  # noqa: E402
import steps  # noqa: E402


def tool(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", str(ROOT / "bench" / "steps.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


class Reading(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name: str, *content: dict) -> pathlib.Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
        return path

    def figures(self, *paths: pathlib.Path) -> dict:
        shown = steps.table(steps.read(map(str, paths)))
        one_row = {key: one.us for key, one in shown.items() if key[1].rows == 1}
        return {(who, step.batch, step.keys, step.head_dim, step.page_size): us for (who, step), us in one_row.items()}

    def test_rounds_count_as_their_median_and_the_fastest_form_of_a_peer(self):
        found = self.figures(PEERS)
        self.assertEqual(found["ringattn", 1, 1024, 128, 0], 6.0, "of 5, 6 and 60")
        self.assertEqual(found["cuDNN", 1, 1024, 128, 0], 8.0, "the other form took 9")
        self.assertIsNone(found["FlashAttention-2", 32, 4096, 128, 0])

    def test_ours_is_the_form_that_it_chose_itself(self):
        found = self.figures(OURS)
        self.assertEqual(found["ringattn", 1, 4096, 128, 0], 10.0)
        self.assertEqual(found["ringattn", 1, 4096, 128, 16], 11.0)
        self.assertIn("slices 1", tool("--forms", OURS).stdout)

    def test_a_kernel_that_was_named_is_a_form_of_its_own(self):
        usual = lines(OURS)[0]
        for kernel in ("sm80_attention", "sm90_mla_split1k"):
            for form in ("", "slices 2"):
                named = {**usual, "kernel": kernel, "form": form, "us": {"median": 1.0, "p10": 1.0, "p90": 1.0}}
                path = self.write("latents.jsonl", named, usual, named)
                self.assertEqual(self.figures(path), self.figures(self.write("usual.jsonl", usual)))
                self.assertIn(f"ringattn, {kernel}{', ' if form else ''}{form}  ", tool("--forms", path).stdout)

    def test_one_failure_among_the_rounds_does_not_hide_the_others(self):
        good = lines(PEERS)[0]
        failed = {**good, "us": None, "error": "out of memory"}
        for order in ((good, failed), (failed, good)):
            (reading,) = steps.read_lines(order).values()
            self.assertEqual((reading.us, reading.error), (5.0, ""))
        (reading,) = steps.read_lines((failed, failed)).values()
        self.assertEqual((reading.us, reading.error), (None, "out of memory"))

    def test_the_last_file_counts_with_all_forms_of_a_peer(self):
        old = next(line for line in lines(PEERS) if line["kernel"] == "cudnn")
        new = {**old, "form": "another", "us": {"median": 20.0}}
        first, second = self.write("a", old), self.write("b", new)
        self.assertEqual(self.figures(first, second)["cuDNN", 1, 1024, 128, 0], 20.0)
        self.assertEqual(self.figures(second, first)["cuDNN", 1, 1024, 128, 0], 8.5)

    def test_ours_stays_with_the_peers_that_it_took_turns_with(self):
        ours, theirs = (next(one for one in lines(PEERS) if one["kernel"] == kernel) for kernel in ("sm90_attention", "cudnn"))
        faster, slower = ({**ours, "us": {"median": us}} for us in (1.0, 9.0))
        forced = {**ours, "form": "slices 8"}
        turns, alone = self.write("turns", ours, theirs), self.write("alone", faster, forced)
        for order in ((turns, alone), (alone, turns)):
            self.assertEqual(self.figures(*order)["ringattn", 1, 1024, 128, 0], 5.0)
        again = self.write("again", slower, theirs)
        self.assertEqual(self.figures(turns, alone, again)["ringattn", 1, 1024, 128, 0], 9.0)
        apart = self.write("apart", theirs)
        self.assertEqual(self.figures(alone, apart)["ringattn", 1, 1024, 128, 0], 1.0)
        self.assertEqual(self.figures(alone, self.write("newer", slower))["ringattn", 1, 1024, 128, 0], 9.0)

    def test_other_lines_are_left_out(self):
        path = self.write("a", {"schema": "other"}, {"what": "speed"}, lines(PEERS)[0])
        self.assertEqual(len(steps.read([str(path)])), 1)
        done = tool(self.write("b", {"schema": "other"}))
        self.assertEqual(done.returncode, 3)
        self.assertIn("no line has the schema ringattn.decode/1", done.stderr)

    def test_what_is_no_whole_line_is_refused(self):
        good = lines(PEERS)[0]
        job = good["job"]
        wrong = [
            {"job": {**job, "keys": 0}},
            {"job": {**job, "page_size": -1}},
            {"job": {**job, "dtype": "fp8"}},
            {"us": {"median": float("nan")}},
            {"us": None},
            {"kernel": "unknown", "tool": {"name": "peer"}},
            {"caches": 127},  # 508 MiB
            {"launches": 129},  # the first cache twice in a row
            {"form": None},
        ]
        for change in wrong:
            with self.assertRaisesRegex(points.BadLine, "line 1 of .* is no whole step", msg=change):
                steps.read([str(self.write("a", {**good, **change}))])
        self.assertEqual(tool(self.folder / "nothing").returncode, 3)

    def test_needs_and_goals_are_gates(self):
        self.assertEqual(tool("--need", "cuDNN=1.05", PEERS).returncode, 0)
        done = tool("--need", "cuDNN=1.0", PEERS)
        self.assertEqual(done.returncode, 1)
        self.assertIn("32/8 heads of 128, 32 x 4k: 1.040 of the time of cuDNN, at most 1.000 is wanted", done.stderr)
        self.assertEqual(done.stderr.count("too slow"), 1)
        done = tool("--goals", PEERS)
        self.assertEqual((done.returncode, done.stderr.count("too slow")), (1, 1))
        alone = self.write("a", *(line for line in lines(PEERS) if line["kernel"] == "cudnn"))
        done = tool("--goals", alone)
        self.assertEqual((done.returncode, done.stderr.count("ours was not measured")), (1, 2))
        self.assertEqual(tool("--goals", OURS).returncode, 1, "no peer was measured")
        for need in ("cuDNN", "nobody=1", "cuDNN=nan"):
            self.assertEqual(tool("--need", need, PEERS).returncode, 2, need)

    def test_the_table_has_ratios_and_rates(self):
        done = tool(PEERS)
        (row,) = [line.split() for line in done.stdout.splitlines() if ", 1 x 1k" in line]
        rate = 2 * 1024 * 8 * 128 * 2 / 6.0 * 1e-3
        self.assertEqual(row[-9:], ["1k", "6.0", "8.0", "12.0", "0.750", "0.500", "0.833", "—", f"{rate:.0f}"])
        (paged,) = [line.split() for line in tool(OURS).stdout.splitlines() if "pages of 16" in line]
        self.assertEqual(paged[-2], "1.100", "as a part of the dense time")
        refused = "# FlashAttention-2, grouped, token-major, bf16, 32/8 heads of 128, 32 x 4k: No available kernel"
        self.assertIn(refused, done.stderr)


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
        self.assertEqual(decode.FAR_BEYOND_CACHE, steps.FAR_BEYOND_CACHE)

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
                reading = steps.parse(line)
                self.assertEqual((reading.us, reading.step.name), (123.0, "bf16, 32/8 heads of 128, 32 x 4k"))
                seen.add((reading.who, reading.form))
        self.assertEqual(len(seen), 4 + 4 + 1, "no form of one peer is taken for another")
        equal = decode.Step(1, 4096, 32, 32, 128)
        self.assertEqual([variant.grouped for variant in decode.variants("cudnn", equal)], [True, True], "no groups to pack")
        refused = {"samples": 0, "us": None, "error": "No available kernel"}
        self.assertEqual(steps.parse(decode.line(world, variant, step, refused)).error, "No available kernel")

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


if __name__ == "__main__":
    unittest.main()
