# SPDX-License-Identifier: Apache-2.0
"""bench/compare.py on the results that are kept in bench/results: it reads every folder, and accounts for every line; and
on the kinds of lines that lie there beside those of `ringattn bench`."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
LINES = pathlib.Path(__file__).resolve().parent / "lines"
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True

import compare  # noqa: E402  (these lie in bench)
import points  # noqa: E402


def run(*paths: pathlib.Path) -> subprocess.CompletedProcess:
    words = [sys.executable, "-B", str(ROOT / "bench" / "compare.py"), *map(str, paths)]
    return subprocess.run(words, capture_output=True, text=True)


def kept(path: pathlib.Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def of_that_day(folder: str) -> list[str]:
    """Files whose figures tests know; what is measured later may replace them elsewhere."""
    return [str(path) for path in sorted((RESULTS / folder).glob("2026-11-21-*.jsonl"))]


class Committed(unittest.TestCase):
    def test_every_folder_is_read_and_every_line_accounted_for(self):
        folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
        self.assertGreaterEqual(len(folders), 3)
        for folder in folders:
            with self.subTest(folder=folder.name):
                paths = sorted(folder.glob("*.jsonl"))
                done = run(*paths)
                self.assertEqual(done.returncode, 0, done.stderr)
                shown = 0
                for path in paths:
                    notes = [line for line in done.stderr.splitlines() if line.startswith(f"# {path}: ")]
                    lines = len(kept(path))
                    left_out = 0
                    if notes:
                        self.assertEqual(len(notes), 1, "one line a file")
                        found = re.match(r"(\d+) of (\d+) lines left out: (.*)", notes[0].removeprefix(f"# {path}: "))
                        left_out = int(found[1])
                        self.assertEqual(int(found[2]), lines)
                        reasons = re.findall(r"(?:^|, )(\d+) ", re.sub(r" \([^)]*\)", "", found[3]))
                        self.assertEqual(sum(map(int, reasons)), left_out, notes[0])
                    shown += lines - left_out
                rows = compare.pair(points.read(map(str, paths)))
                self.assertEqual(len(done.stdout.splitlines()), 1 + len(rows))
                in_table = {point for row in rows for point in (row.ours, row.theirs) if point}
                self.assertEqual(len(in_table), shown, "what isn't in the table is said to be left out")

    def test_the_cpu_table_has_its_runs(self):
        found = points.read([str(path) for path in sorted((RESULTS / "cpu-xeon-16").glob("*.jsonl"))])
        self.assertEqual({(p.job.kind, p.mode) for p in found}, {("bf16 8/2 x 128 causal", "run")})
        self.assertEqual([(p.job.seq >> 10, p.world) for p in found], [(32, 1), (128, 1), (64, 1), (64, 8)])

    def test_flash_attention_3_stands_beside_ours_at_every_shape_that_both_have(self):
        rows = compare.pair(points.read(of_that_day("nvidia-h200")))
        rows = [row for row in rows if row.theirs and row.theirs.tool == "flash_attention_3"]
        seen = {(row.ours.job.kind, row.ours.job.seq): row for row in rows}
        self.assertEqual(len(seen), 8 + 4 + 4 + 4 + 4 + 4 + 4)

    def test_rates_of_flash_attention_3_are_those_of_its_times(self):
        lines = [line for path in RESULTS.glob("*/*.jsonl") for line in kept(path) if "ptxas" in line]
        self.assertGreaterEqual(len(lines), 91)
        for line in lines:
            point = points.parse_flash_attention_3(line)
            # Theirs are rounded to two digits, and count seq^2 / 2 pairs.
            pairs = (line["seq"] + 1) / line["seq"] if line["causal"] else 1.0
            self.assertAlmostEqual(point.tflops / (line["tflops"] * pairs), 1.0, delta=5e-5)

    def test_the_two_million_have_their_peer(self):
        rows = compare.pair(points.read(of_that_day("nvidia-h200-x4")))
        long = [(row.ours.name, row.theirs.tool) for row in rows if row.ours.job.seq == 1 << 21]
        self.assertEqual(long, [(f"ringattn sm90_attention, {via}, one run", "zigzag ring") for via in ("nccl", "p2p")])


class Kinds(unittest.TestCase):
    """Small files in a folder of the test."""

    FLASH = {"peer": "flash_attention_3", "dim": 128, "dim_v": 128, "heads": 32, "kv_heads": 8, "causal": 1}

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.ours = json.loads((LINES / "ours.jsonl").read_text().splitlines()[0])

    def write(self, name: str, *lines: dict) -> pathlib.Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def flash(self, ptxas: str, ms: float, **more: object) -> dict:
        tflops = 2 * 16 * 1024**2 / 2 * 32 * 256 / ms * 1e-9
        return {**self.FLASH, "seq": 1024, "batch": 16, "ptxas": ptxas, "median_ms": ms, "tflops": tflops, **more}

    def test_the_faster_assembler_of_a_file_counts_and_of_an_assembler_the_last_reading(self):
        lines = [self.flash("13", 0.25), self.flash("13", 0.40), self.flash("12", 0.32), self.flash("12", 0.36)]
        (file,) = points.read_files([str(self.write("a", *lines))])
        self.assertEqual([point.median_ms for point in file.points.values()], [0.36])
        self.assertEqual(file.left_out, {"measured again further down": 2, "slower than as another ptxas assembled it": 1})

    def test_other_jobs_of_the_same_shape_are_no_points_of_attention(self):
        """Latents, codes, lists and decode steps have the shape, but not the work."""
        shape = {name: self.ours["job"][name] for name in ("tokens", "batch", "heads", "kv_heads", "head_dim", "head_dim_v")}
        shape |= {"dtype": "bf16", "mask": "causal"}
        step = {**shape, "op": "decode", "keys": 4096, "page_size": 64}
        latents = {**shape, "op": "mla", "keys": 1024, "form": "expanded", "rope_dim": 64, "latent_dim": 512}
        codes = {**shape, "mask": "causal, fp8 token_head"}
        (file,) = points.read_files([str(self.write("a", *({**self.ours, "job": job} for job in (shape, step, latents, codes))))])
        self.assertEqual(file.left_out, {"of decode steps": 1})
        kinds = [point.job.mask for point in file.points.values()]
        self.assertEqual(kinds, ["causal", "causal, latents, expanded", "causal, fp8 token_head"])
        report = {"schema": 1, "command": "run", "op": "ssd", "job": {"tokens": 9}, "time_ms": {"median": 1.0}, "config": {}}
        listed = {**report, "op": "attention", "config": {"block-mask": "random:4"}}
        packed = {**report, "op": "attention", "config": {"cache-format": "fp8"}}
        (file,) = points.read_files([str(self.write("b", report, listed, packed))])
        self.assertEqual(sum(file.left_out.values()), 3)
        self.assertEqual(file.left_out["of runs of ssd"], 1)

    def test_a_later_file_replaces_whoever_was_faster(self):
        first, second = self.write("a", self.flash("13", 0.25)), self.write("b", self.flash("12", 0.30))
        done = run(first, second, self.write("c", self.ours))
        self.assertIn(f"# {first}: 1 of 1 lines left out: 1 measured again in b\n", done.stderr)
        self.assertIn("in the order given", done.stderr)
        self.assertIn("flash_attention_3  458.6", done.stdout)
        self.assertIn("flash_attention_3  550.3", run(second, first, self.folder / "c").stdout, "as the order has it")

    def test_a_failure_is_replaced_by_what_is_measured_later(self):
        no_figures = {"kernel": "", "layout": "", "stripe": 0, "ms": None, "tflops_per_rank": None}
        failed = {**self.ours, **no_figures, "error": "out of memory"}
        (file,) = points.read_files([str(self.write("a", failed, self.ours))])
        self.assertEqual([point.error for point in file.points.values()], [None])
        self.assertEqual(file.left_out, {"measured again further down": 1})
        files = points.read_files([str(self.write("a", failed)), str(self.write("b", self.ours))])
        self.assertEqual([(len(file.points), dict(file.left_out)) for file in files], [(0, {"measured again in b": 1}), (1, {})])
        self.write("c", self.flash("13", 1.0))
        words = [sys.executable, "-B", str(ROOT / "bench" / "compare.py"), "--need", "flash_attention_3=0.1"]
        for names, code in (("abc", 0), ("bac", 1)):
            done = subprocess.run([*words, *(str(self.folder / name) for name in names)], capture_output=True, text=True)
            self.assertEqual(done.returncode, code, done.stderr)
        for lines, errors in (
            ((self.ours, failed), 1),
            ((failed, self.ours, failed), 1),
            ((failed, {**self.ours, "block": 4096}), 1),
            ((failed, {**self.ours, "mode": "folds"}), 1),
            ((failed, {**self.ours, "transport": "p2p", "world": 2, "tflops_per_rank": 100.0}), 1),
            ((failed, failed), 1),
            ((failed, self.ours, failed, self.ours), 0),
        ):
            (file,) = points.read_files([str(self.write("a", *lines))])
            self.assertEqual(sum(point.error is not None for point in file.points.values()), errors, lines)
            self.assertEqual(len(file.points) + sum(file.left_out.values()), len(lines))

    def test_a_rate_that_its_own_time_does_not_make_is_refused(self):
        for wrong in ({"tflops": 500.0}, {"heads": 16}, {"median_ms": 0}, {"dim": None}):
            with self.assertRaisesRegex(points.BadLine, "line 1 of .* is no whole point", msg=wrong):
                points.read([str(self.write("a", self.flash("13", 0.25, **wrong)))])
        run_line = {"what": "run", "command": "run --heads 16", "tokens": 4096, "ranks": 1, "transport": "self"}
        rate = 2 * 4096 * 4097 / 2 * 16 * 256 / 10.0 * 1e-9
        good = self.write("a", {**run_line, "time_ms": 10.0, "tflops_per_rank": rate})
        self.assertEqual(points.read([str(good)])[0].job.heads, 16)
        with self.assertRaises(points.BadLine):  # of 8 heads, the default
            points.read([str(self.write("a", {**run_line, "command": "run", "time_ms": 10.0, "tflops_per_rank": rate}))])

    def report(self, **job: object) -> dict:
        shape = {"dtype": "bf16", "heads": 8, "kv_heads": 2, "head_dim": 128, "head_dim_v": 128, "mask": "causal"}
        shape |= {"softcap": 0, "sinks": False, "sequences": 2, "q_tokens": 8192, "k_tokens": 8192, **job}
        rate = 2 * 2 * 4096 * 4097 / 2 * 8 * 256 / 10.0 / 2 * 1e-9
        return {
            "schema": 1,
            "command": "run",
            "config": {"block": None},
            "world": {"ranks": 2, "transport": "mpi"},
            "kernel": "cpu_attention",
            "job": shape,
            "time_ms": {"median": 10.0},
            "tflops_per_rank": rate,
        }

    def test_reports_of_runs(self):
        (point,) = points.read([str(self.write("a", self.report()))])
        self.assertEqual((point.name, point.job.seq, point.ours), ("ringattn cpu_attention, mpi, one run", 4096, True))
        config, plan = {"block": None, "stripe": 256, "overlap": "off"}, {"layout": "striped", "stripe": 256}
        (point,) = points.read([str(self.write("a", {**self.report(), "config": config, "plan": plan}))])
        self.assertEqual(point.name, "ringattn cpu_attention, mpi, stripe 256, no overlap, one run")
        for line in (
            self.report(softcap=50.0),
            self.report(sinks=True),
            self.report(k_tokens=16384),
            {**self.report(), "tflops_per_rank": 1e-3},  # one long sequence and a short one
            {**self.report(), "time_ms": None, "tflops_per_rank": None},
        ):
            (file,) = points.read_files([str(self.write("a", line))])
            self.assertEqual((len(file.points), sum(file.left_out.values())), (0, 1), line)
        (file,) = points.read_files([str(self.write("a", {**self.report(), "command": "verify"}))])
        self.assertEqual(file.others, {"reports of verify": 1})

    def test_a_report_is_read_as_it_is_written(self):
        path = self.folder / "r.json"
        path.write_text(json.dumps(self.report(), indent=2) + "\n")
        (file,) = points.read_files([str(path)])
        self.assertEqual((file.lines, list(file.points.values())), (1, points.read([str(self.write("a", self.report()))])))
        self.assertEqual(run(path).returncode, 0)
        for wrong in (path.read_text()[:-9], path.read_text() * 2):
            path.write_text(wrong)
            with self.assertRaisesRegex(points.BadLine, "line 1 of .* is no whole point"):
                points.read([str(path)])

    def test_reports_of_runs_that_bench_can_not_have_are_left_out(self):
        one = self.report(sequences=1)
        twice = {**one, "tflops_per_rank": 2 * 8192**2 * 8 * 256 / 10.0 / 2 * 1e-9}  # every query sees every key
        nothing = "of runs of nothing"
        offset = "of runs whose input or offset bench does not have"
        windows = "of runs of sequences whose lengths can't be told under a window"
        for line, why in (
            ({**twice, "config": {"input": None, "query-offset": 8192, "block": None}}, offset),
            ({**twice, "config": {"input": "a.safetensors", "query-offset": None}}, offset),
            ({**self.report(q_tokens=0, k_tokens=0, sequences=0), "tflops_per_rank": None}, nothing),
            ({**one, "time_ms": {"median": 0.0}, "tflops_per_rank": None}, nothing),
            (self.report(mask="window 4095,0"), windows),
        ):
            (file,) = points.read_files([str(self.write("a", line))])
            self.assertEqual((len(file.points), file.left_out), (0, {why: 1}), line)
        with self.assertRaises(points.BadLine):  # nothing names what makes the rate differ
            points.read([str(self.write("a", twice))])
        (point,) = points.read([str(self.write("a", self.report(mask="window 4095,0", sequences=1)))])
        self.assertEqual((point.job.kind, point.job.seq), ("bf16 8/2 x 128 window 4095,0", 8192))

    def test_lines_whose_figures_are_of_another_job_are_left_out(self):
        job, rate = self.ours["job"], self.ours["tflops_per_rank"]
        twice = {**self.ours, "tflops_per_rank": 2 * rate}  # of an offset
        window = {**self.ours, "job": {**job, "mask": "window 4095,0"}}
        away = [twice, *({**window, "argv": ["x", "bench", *words]} for words in (["--query-offset", "9"], ["--query-offset=9"]))]
        path = self.write("a", self.ours, *away)
        (file,) = points.read_files([str(path)])
        self.assertEqual(file.left_out, {"of jobs that differ from what their line names": 3})
        self.assertEqual([point.tflops for point in file.points.values()], [rate])
        nothing = {**self.ours, "job": {**job, "tokens": 0}, "ms": {"median": 0.0}, "tflops_per_rank": 0.0}
        error = {**self.ours, "ms": None, "tflops_per_rank": None, "error": "out of memory"}
        for line in (window, {**twice, "job": {**job, "source": "a.safetensors"}}, nothing, error):
            (file,) = points.read_files([str(self.write("a", line))])
            self.assertEqual((len(file.points), file.left_out), (1, {}), line)

    def test_where_nothing_is_ours_the_error_says_what_there_is(self):
        path = self.write("a", {"what": "fold_cpu"}, {"what": "fold_cpu"}, self.flash("13", 0.25), {"meta": True, "what": "x"})
        done = run(path)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(
            done.stderr,
            "error: no line is ours (no tool is named ringattn; there are 2 fold_cpu, 1 points of flash_attention_3, 1 meta). "
            "Add a file of ringattn bench.\n",
        )
        done = run(self.write("a"))
        self.assertIn("there are no lines", done.stderr)


if __name__ == "__main__":
    unittest.main()
