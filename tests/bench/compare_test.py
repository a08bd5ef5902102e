# SPDX-License-Identifier: Apache-2.0
"""bench/tables.py compare, and how bench/result_lines.py reads lines: the committed results, where every line is accounted
for, and small files of every kind of line."""

import dataclasses
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
OURS, PEERS = LINES / "ours.jsonl", LINES / "peers.jsonl"
DECODE, DECODE_PEERS = LINES / "decode.jsonl", LINES / "decode-peers.jsonl"
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True

import result_lines  # noqa: E402  (it lies in bench)


def compare(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", str(ROOT / "bench" / "tables.py"), "compare", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def points(*paths: object) -> list[result_lines.Point]:
    return result_lines.points_of(result_lines.read_files(map(str, paths)))


def steps(*paths: object) -> result_lines.StepTimes:
    return result_lines.steps_of(result_lines.read_files(map(str, paths)))


def pairs(*paths: object) -> list[result_lines.Pair]:
    """Without decode steps."""
    found = result_lines.pair(result_lines.read_files(map(str, paths)))
    return [row for row in found if isinstance(row.ours, result_lines.Point)]


def of_that_day(folder: str) -> list[pathlib.Path]:
    """Files whose figures tests know; what is measured later may replace them elsewhere."""
    return sorted((RESULTS / folder).glob("2026-11-21-*.jsonl"))


class Folder(unittest.TestCase):
    """Small files in a folder of the test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name: str, *content: dict) -> pathlib.Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
        return path


class Committed(unittest.TestCase):
    def test_every_folder_is_read_and_every_line_accounted_for(self):
        folders = sorted(path for path in RESULTS.iterdir() if path.is_dir())
        self.assertGreaterEqual(len(folders), 3)
        for folder in folders:
            with self.subTest(folder=folder.name):
                paths = sorted(folder.glob("*.jsonl"))
                done = compare(*paths)
                self.assertEqual(done.returncode, 0, done.stderr)
                shown = 0
                for path in paths:
                    notes = [line for line in done.stderr.splitlines() if line.startswith(f"# {path}: ")]
                    kept, left_out = lines(path), 0
                    if notes:
                        self.assertEqual(len(notes), 1, "one line per file")
                        found = re.match(r"(\d+) of (\d+) lines left out: (.*)", notes[0].removeprefix(f"# {path}: "))
                        left_out = int(found[1])
                        self.assertEqual(int(found[2]), len(kept))
                        reasons = re.findall(r"(?:^|, )(\d+) ", re.sub(r" \([^)]*\)", "", found[3]))
                        self.assertEqual(sum(map(int, reasons)), left_out, notes[0])
                    shown += len(kept) - left_out - sum(line.get("schema") == "ringattn.decode/1" for line in kept)
                rows = pairs(*paths)
                decode_rows = result_lines.pair_steps(steps(*paths), forms=False)
                self.assertEqual(len(done.stdout.splitlines()), 2 + len(rows) + len(decode_rows))
                in_table = {point for row in rows for point in (row.ours, row.theirs) if point}
                self.assertEqual(len(in_table), shown, "what isn't in the table is said to be left out")

    def test_the_cpu_table_has_its_runs(self):
        found = [p for p in points(*sorted((RESULTS / "cpu-xeon-16").glob("*.jsonl"))) if p.mode == "run"]
        self.assertEqual({p.job.kind for p in found}, {"bf16 8/2 x 128 causal"})
        self.assertEqual([(p.job.seq >> 10, p.world) for p in found], [(32, 1), (128, 1), (64, 1), (64, 8)])

    def test_flash_attention_3_stands_beside_ours_at_every_shape_that_both_have(self):
        rows = pairs(*of_that_day("nvidia-h200"))
        rows = [row for row in rows if row.theirs and row.theirs.tool == "flash_attention_3"]
        seen = {(row.ours.job.kind, row.ours.job.seq): row for row in rows}
        self.assertEqual(len(seen), 8 + 4 + 4 + 4 + 4)

    def test_rates_of_flash_attention_3_are_those_of_its_times(self):
        kept = [line for path in RESULTS.glob("*/*.jsonl") for line in lines(path) if "ptxas" in line]
        self.assertGreaterEqual(len(kept), 50)
        for line in kept:
            point = result_lines.parse_flash_attention_3(line)
            # Theirs are rounded to two digits, and count seq^2 / 2 pairs.
            pairs = (line["seq"] + 1) / line["seq"] if line["causal"] else 1.0
            self.assertAlmostEqual(point.tflops / (line["tflops"] * pairs), 1.0, delta=5e-5)

    def test_the_two_million_have_their_peer(self):
        rows = pairs(*of_that_day("nvidia-h200-x4"))
        long = [(row.ours.name, row.theirs.tool) for row in rows if row.ours.job.seq == 1 << 21]
        self.assertEqual(long, [(f"ringattn sm90_attention, {via}, one run", "zigzag ring") for via in ("nccl", "p2p")])


class Compare(unittest.TestCase):
    def rows(self):
        return pairs(OURS, PEERS)

    def ratios(self, name: str):
        rows = [row for row in self.rows() if row.theirs and row.theirs.name == name]
        return {(row.ours.job.seq, row.ours.transport): row.ratio for row in rows}

    def test_pairs_have_the_same_job_and_world(self):
        self.assertEqual(self.ratios("pytorch sdpa cudnn"), {(1024, "self"): 0.5, (8192, "self"): 0.5})
        self.assertEqual(self.ratios("pytorch sdpa flash_attention_2"), {(1024, "self"): None, (8192, "self"): 340 / 320})
        zigzag = self.ratios("zigzag ring cudnn, compiled merge, nccl")
        self.assertEqual(zigzag, {(32768, "p2p"): 320 / 305, (32768, "nccl"): 300 / 305})

    def test_folds_stand_beside_the_run_of_their_own_transport(self):
        self.assertEqual(self.ratios("ringattn sm80_attention, p2p, compute only"), {(32768, "p2p"): 320 / 325})
        self.assertEqual(self.ratios("ringattn sm80_attention, nccl, compute only"), {(32768, "nccl"): 300 / 326})

    def test_layouts_stripes_and_overlap_stand_side_by_side(self):
        first = json.loads(pathlib.Path(OURS).read_text().splitlines()[4]) | {"layout": "striped", "stripe": 128, "overlap": True}
        self.assertEqual((first["world"], first["transport"]), (8, "p2p"))
        forms = [
            ({}, ""),
            ({"layout": "zigzag", "stripe": 2048}, ", zigzag"),
            ({"stripe": 256, "argv": ["x", "bench", "--stripe", "256"]}, ", stripe 256"),
            ({"overlap": False}, ", no overlap"),
            ({"layout": "zigzag", "overlap": False, "block": 4096}, ", block 4096, zigzag, no overlap"),
        ]
        lines = [{**first, **more, "mode": mode} for more, _ in forms for mode in ("whole", "folds")]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "a")
            path.write_text("\n".join(map(json.dumps, lines)))
            (file,) = result_lines.read_files([path])
            again = {**first, "stripe": 320}  # chosen from the tiles of a newer kernel
            path.write_text("\n".join(map(json.dumps, [first, again])))
            self.assertEqual(len(points(path)), 1)
        self.assertEqual((len(file.points), file.left_out), (len(lines), {}))
        names = {(row.ours.name, row.theirs.name) for row in result_lines.pair_points(list(file.points.values()))}
        whole = [f"ringattn sm80_attention, p2p{text}" for _, text in forms]
        self.assertEqual(names, {(name, f"{name}, compute only") for name in whole})

    def test_a_window_is_contiguous_unless_asked(self):
        point = points(OURS)[0]
        window = dataclasses.replace(point, job=dataclasses.replace(point.job, mask="window 4095,0"), layout="contiguous")
        self.assertEqual((point.form, window.form), ("", ""))
        self.assertEqual(dataclasses.replace(window, layout="striped").form, ", striped")
        self.assertEqual(dataclasses.replace(window, layout="striped", stripe=128).form, ", stripe 128")

    def test_the_last_of_several_measurements_counts(self):
        mine = [point for point in points(OURS) if point.job.seq == 8192]
        self.assertEqual([point.tflops for point in mine], [340.0])

    def test_a_point_without_peers_is_shown(self):
        alone = [row for row in self.rows() if row.theirs is None]
        self.assertEqual([(row.ours.job.seq, row.ours.world) for row in alone], [(32768, 1)])

    def test_tables(self):
        text = compare(OURS, PEERS)
        self.assertEqual(text.returncode, 0, text.stderr)
        self.assertIn("can't (No available kernel)", text.stdout)
        self.assertIn("1k x 16", text.stdout)
        other = "1 of other formats (1 speed)"
        self.assertIn(f"# {OURS}: 2 of 9 lines left out: {other}, 1 measured again further down", text.stderr)
        self.assertIn(f"# {PEERS}: 2 of 7 lines left out: 1 of the accuracy of sums", text.stderr)
        self.assertIn("1 of peers or of compute only, with none of ours beside them", text.stderr)
        markdown = text.stdout.splitlines()
        self.assertEqual(len(markdown), 2 + len(self.rows()))
        self.assertTrue(all(line.count("|") == 9 for line in markdown), markdown)

    def test_needs_are_gates(self):
        passes = ["flash_attention_2=1.0", "p2p, compute only=0.97"]
        self.assertEqual(compare("--need", passes[0], "--need", passes[1], OURS, PEERS).returncode, 0)
        for need in ["flash_attention_2=1.1", "nccl, compute only=0.97", "nobody=0.1"]:
            done = compare("--need", need, OURS, PEERS)
            self.assertEqual(done.returncode, 1, need)
            self.assertIn("too slow: ", done.stderr)
        for need in ["x", "nobody=", "nobody=nan"]:
            self.assertEqual(compare("--need", need, OURS).returncode, 2, need)

    def test_a_point_that_only_a_peer_can_do_misses_needs(self):
        mine, theirs = points(OURS, PEERS)[0], next(p for p in points(PEERS) if p.tflops)
        rows = [result_lines.Pair(dataclasses.replace(mine, tflops=None, error="out of memory"), theirs)]
        self.assertEqual(len(result_lines.misses(rows, theirs.name, 0.1)), 1)

    def test_what_is_no_line_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder, "bad")
            for text in ["nonsense", "[1]", '{"schema": "ringattn.bench/1"}', '{"schema": "ringattn.bench/1", "job": 3}']:
                bad.write_text("\n" + text + "\n")
                done = compare(str(bad))
                self.assertEqual(done.returncode, 3, text)
                self.assertIn("error: line 2 of ", done.stderr)
            bad.write_bytes(b"\xff\xfe{}")
            self.assertEqual(compare(str(bad)).returncode, 3, "no text")
            self.assertEqual(compare(f"{folder}/none").returncode, 3)
        self.assertEqual(compare(PEERS).returncode, 3, "nothing of ours")

    def test_members_of_another_kind_are_refused(self):
        good = json.loads(pathlib.Path(OURS).read_text().splitlines()[0])
        result_lines.parse_bench(good)
        jobs = [{"batch": 0}, {"batch": True}, {"tokens": "1k"}, {"heads": [1]}, {"dtype": None}, {"mask": 3}]
        lines = [{"job": {**good["job"], **wrong}} for wrong in jobs]
        lines += [{"tflops_per_rank": wrong} for wrong in ("fast", float("nan"), float("inf"), -1.0)]
        lines += [{"world": "8"}, {"tool": 5}, {"ms": {"median": None}}, {"error": 7}, {"block": -1}, {"overlap": 1}]
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder, "bad")
            for wrong in lines:
                bad.write_text(json.dumps({**good, **wrong}))
                with self.assertRaisesRegex(result_lines.BadLine, "line 1 of .* is not a whole result", msg=wrong):
                    points(bad)

    def test_sizes(self):
        written = {0: "0", 100: "100", 1000: "1000", 1024: "1k", 1536: "1536", 1 << 20: "1m", 3 << 19: "1536k"}
        self.assertEqual({tokens: result_lines.size(tokens) for tokens in written}, written)


class Kinds(Folder):
    FLASH = {"peer": "flash_attention_3", "dim": 128, "dim_v": 128, "heads": 32, "kv_heads": 8, "causal": 1}

    def setUp(self):
        super().setUp()
        self.ours = lines(OURS)[0]

    def flash(self, ptxas: str, ms: float, **more: object) -> dict:
        tflops = 2 * 16 * 1024**2 / 2 * 32 * 256 / ms * 1e-9
        return {**self.FLASH, "seq": 1024, "batch": 16, "ptxas": ptxas, "median_ms": ms, "tflops": tflops, **more}

    def test_the_faster_assembler_of_a_file_counts_and_of_an_assembler_the_last_reading(self):
        lines = [self.flash("13", 0.25), self.flash("13", 0.40), self.flash("12", 0.32), self.flash("12", 0.36)]
        (file,) = result_lines.read_files([self.write("a", *lines)])
        self.assertEqual([point.median_ms for point in file.points.values()], [0.36])
        self.assertEqual(file.left_out, {"measured again further down": 2, "slower than as another ptxas assembled it": 1})

    def test_other_jobs_of_the_same_shape_are_no_points_of_attention(self):
        """Latents, codes, lists and decode steps have the shape, but not the work."""
        shape = {name: self.ours["job"][name] for name in ("tokens", "batch", "heads", "kv_heads", "head_dim", "head_dim_v")}
        shape |= {"dtype": "bf16", "mask": "causal"}
        step = {**shape, "op": "decode", "keys": 4096, "page_size": 64}
        latents = {**shape, "op": "mla", "keys": 1024, "form": "expanded", "rope_dim": 64, "latent_dim": 512}
        codes = {**shape, "mask": "causal, fp8 token_head"}
        path = self.write("a", *({**self.ours, "job": job} for job in (shape, step, latents, codes)))
        (file,) = result_lines.read_files([path])
        self.assertEqual(file.left_out, {"of decode steps": 1})
        kinds = [point.job.mask for point in file.points.values()]
        self.assertEqual(kinds, ["causal", "causal, latents, expanded", "causal, fp8 token_head"])
        report = {"schema": 1, "command": "run", "op": "ssd", "job": {"tokens": 9}, "time_ms": {"median": 1.0}, "config": {}}
        listed = {**report, "op": "attention", "config": {"block-mask": "random:4"}}
        packed = {**report, "op": "attention", "config": {"cache-format": "fp8"}}
        (file,) = result_lines.read_files([self.write("b", report, listed, packed)])
        self.assertEqual(sum(file.left_out.values()), 3)
        self.assertEqual(file.left_out["of runs of ssd"], 1)

    def test_a_later_file_replaces_whoever_was_faster(self):
        first, second = self.write("a", self.flash("13", 0.25)), self.write("b", self.flash("12", 0.30))
        done = compare(first, second, self.write("c", self.ours))
        self.assertIn(f"# {first}: 1 of 1 lines left out: 1 measured again in b\n", done.stderr)
        self.assertIn("in the order given", done.stderr)
        self.assertRegex(done.stdout, r"flash_attention_3 \| +458.6")
        self.assertRegex(compare(second, first, self.folder / "c").stdout, r"flash_attention_3 \| +550.3", "as the order has it")

    def test_a_failure_is_replaced_by_what_is_measured_later(self):
        no_figures = {"kernel": "", "layout": "", "stripe": 0, "ms": None, "tflops_per_rank": None}
        failed = {**self.ours, **no_figures, "error": "out of memory"}
        (file,) = result_lines.read_files([self.write("a", failed, self.ours)])
        self.assertEqual([point.error for point in file.points.values()], [None])
        self.assertEqual(file.left_out, {"measured again further down": 1})
        files = result_lines.read_files([self.write("a", failed), self.write("b", self.ours)])
        self.assertEqual([(len(file.points), dict(file.left_out)) for file in files], [(0, {"measured again in b": 1}), (1, {})])
        self.write("c", self.flash("13", 1.0))
        for names, code in (("abc", 0), ("bac", 1)):
            done = compare("--need", "flash_attention_3=0.1", *(self.folder / name for name in names))
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
            (file,) = result_lines.read_files([self.write("a", *lines)])
            self.assertEqual(sum(point.error is not None for point in file.points.values()), errors, lines)
            self.assertEqual(len(file.points) + sum(file.left_out.values()), len(lines))

    def test_a_rate_that_its_own_time_does_not_make_is_refused(self):
        for wrong in ({"tflops": 500.0}, {"heads": 16}, {"median_ms": 0}, {"dim": None}):
            with self.assertRaisesRegex(result_lines.BadLine, "line 1 of .* is not a whole result", msg=wrong):
                points(self.write("a", self.flash("13", 0.25, **wrong)))
        run_line = {"what": "run", "command": "run --heads 16", "tokens": 4096, "ranks": 1, "transport": "self"}
        rate = 2 * 4096 * 4097 / 2 * 16 * 256 / 10.0 * 1e-9
        good = self.write("a", {**run_line, "time_ms": 10.0, "tflops_per_rank": rate})
        self.assertEqual(points(good)[0].job.heads, 16)
        with self.assertRaises(result_lines.BadLine):  # of 8 heads, the default
            points(self.write("a", {**run_line, "command": "run", "time_ms": 10.0, "tflops_per_rank": rate}))

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
        (point,) = points(self.write("a", self.report()))
        self.assertEqual((point.name, point.job.seq, point.ours), ("ringattn cpu_attention, mpi, one run", 4096, True))
        config, plan = {"block": None, "stripe": 256, "overlap": "off"}, {"layout": "striped", "stripe": 256}
        (point,) = points(self.write("a", {**self.report(), "config": config, "plan": plan}))
        self.assertEqual(point.name, "ringattn cpu_attention, mpi, stripe 256, no overlap, one run")
        for line in (
            self.report(softcap=50.0),
            self.report(sinks=True),
            self.report(k_tokens=16384),
            {**self.report(), "tflops_per_rank": 1e-3},  # one long sequence and a short one
            {**self.report(), "time_ms": None, "tflops_per_rank": None},
        ):
            (file,) = result_lines.read_files([self.write("a", line)])
            self.assertEqual((len(file.points), sum(file.left_out.values())), (0, 1), line)
        (file,) = result_lines.read_files([self.write("a", {**self.report(), "command": "verify"})])
        self.assertEqual(file.others, {"reports of verify": 1})

    def test_a_report_is_read_as_it_is_written(self):
        path = self.folder / "r.json"
        path.write_text(json.dumps(self.report(), indent=2) + "\n")
        (file,) = result_lines.read_files([path])
        self.assertEqual((len(file.lines), list(file.points.values())), (1, points(self.write("a", self.report()))))
        self.assertEqual(compare(path).returncode, 0)
        for wrong in (path.read_text()[:-9], path.read_text() * 2):
            path.write_text(wrong)
            with self.assertRaisesRegex(result_lines.BadLine, "line 1 of .* is not a whole result"):
                points(path)

    def test_reports_of_runs_that_bench_can_not_have_are_left_out(self):
        one = self.report(sequences=1)
        twice = {**one, "tflops_per_rank": 2 * 8192**2 * 8 * 256 / 10.0 / 2 * 1e-9}  # every query sees every key
        nothing = "of empty runs"
        offset = "of runs whose input or offset bench does not have"
        windows = "of runs of sequences whose lengths can't be told under a window"
        for line, why in (
            ({**twice, "config": {"input": None, "query-offset": 8192, "block": None}}, offset),
            ({**twice, "config": {"input": "a.safetensors", "query-offset": None}}, offset),
            ({**self.report(q_tokens=0, k_tokens=0, sequences=0), "tflops_per_rank": None}, nothing),
            ({**one, "time_ms": {"median": 0.0}, "tflops_per_rank": None}, nothing),
            (self.report(mask="window 4095,0"), windows),
        ):
            (file,) = result_lines.read_files([self.write("a", line)])
            self.assertEqual((len(file.points), file.left_out), (0, {why: 1}), line)
        with self.assertRaises(result_lines.BadLine):  # nothing names what makes the rate differ
            points(self.write("a", twice))
        (point,) = points(self.write("a", self.report(mask="window 4095,0", sequences=1)))
        self.assertEqual((point.job.kind, point.job.seq), ("bf16 8/2 x 128 window 4095,0", 8192))

    def test_lines_whose_figures_are_of_another_job_are_left_out(self):
        job, rate = self.ours["job"], self.ours["tflops_per_rank"]
        twice = {**self.ours, "tflops_per_rank": 2 * rate}  # of an offset
        window = {**self.ours, "job": {**job, "mask": "window 4095,0"}}
        away = [twice, *({**window, "argv": ["x", "bench", *words]} for words in (["--query-offset", "9"], ["--query-offset=9"]))]
        path = self.write("a", self.ours, *away)
        (file,) = result_lines.read_files([path])
        self.assertEqual(file.left_out, {"of jobs that differ from what their line names": 3})
        self.assertEqual([point.tflops for point in file.points.values()], [rate])
        nothing = {**self.ours, "job": {**job, "tokens": 0}, "ms": {"median": 0.0}, "tflops_per_rank": 0.0}
        error = {**self.ours, "ms": None, "tflops_per_rank": None, "error": "out of memory"}
        for line in (window, {**twice, "job": {**job, "source": "a.safetensors"}}, nothing, error):
            (file,) = result_lines.read_files([self.write("a", line)])
            self.assertEqual((len(file.points), file.left_out), (1, {}), line)

    def test_where_nothing_is_ours_the_error_says_what_there_is(self):
        path = self.write("a", {"what": "fold_cpu"}, {"what": "fold_cpu"}, self.flash("13", 0.25), {"meta": True, "what": "x"})
        done = compare(path)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(
            done.stderr,
            "error: no line is of ringattn (there are 2 fold_cpu, 1 points of flash_attention_3, 1 meta); "
            "add a file of ringattn bench.\n",
        )
        done = compare(self.write("a"))
        self.assertIn("there are no lines", done.stderr)


class Steps(Folder):
    def figures(self, *paths: pathlib.Path) -> dict:
        shown = result_lines.best_steps(steps(*paths))
        one_row = {key: one.us for key, one in shown.items() if key[1].rows == 1}
        return {(who, step.batch, step.keys, step.head_dim, step.page_size): us for (who, step), us in one_row.items()}

    def test_rounds_count_as_their_median_and_the_fastest_form_of_a_peer(self):
        found = self.figures(DECODE_PEERS)
        self.assertEqual(found["ringattn", 1, 1024, 128, 0], 6.0, "of 5, 6 and 60")
        self.assertEqual(found["cuDNN", 1, 1024, 128, 0], 8.0, "the other form took 9")
        self.assertIsNone(found["FlashAttention-2", 32, 4096, 128, 0])

    def test_ours_is_the_form_that_it_chose_itself(self):
        found = self.figures(DECODE)
        self.assertEqual(found["ringattn", 1, 4096, 128, 0], 10.0)
        self.assertEqual(found["ringattn", 1, 4096, 128, 16], 11.0)
        self.assertIn("slices 1", compare("--forms", DECODE).stdout)

    def test_a_kernel_that_was_named_is_a_form_of_its_own(self):
        usual = lines(DECODE)[0]
        for kernel in ("sm80_attention", "sm90_mla_split1k"):
            for form in ("", "slices 2"):
                named = {**usual, "kernel": kernel, "form": form, "us": {"median": 1.0, "p10": 1.0, "p90": 1.0}}
                path = self.write("latents.jsonl", named, usual, named)
                self.assertEqual(self.figures(path), self.figures(self.write("usual.jsonl", usual)))
                self.assertIn(f"ringattn, {kernel}{', ' if form else ''}{form} |", compare("--forms", path).stdout)

    def test_one_failure_among_the_rounds_does_not_hide_the_others(self):
        good = lines(DECODE_PEERS)[0]
        failed = {**good, "us": None, "error": "out of memory"}
        for order in ((good, failed), (failed, good)):
            (reading,) = steps(self.write("a", *order)).values()
            self.assertEqual((reading.us, reading.error), (5.0, ""))
        (reading,) = steps(self.write("a", failed, failed)).values()
        self.assertEqual((reading.us, reading.error), (None, "out of memory"))

    def test_the_last_file_counts_with_all_forms_of_a_peer(self):
        old = next(line for line in lines(DECODE_PEERS) if line["kernel"] == "cudnn")
        new = {**old, "form": "another", "us": {"median": 20.0}}
        first, second = self.write("a", old), self.write("b", new)
        self.assertEqual(self.figures(first, second)["cuDNN", 1, 1024, 128, 0], 20.0)
        self.assertEqual(self.figures(second, first)["cuDNN", 1, 1024, 128, 0], 8.5)

    def test_ours_stays_with_the_peers_that_it_took_turns_with(self):
        kept = lines(DECODE_PEERS)
        ours, theirs = (next(one for one in kept if one["kernel"] == kernel) for kernel in ("sm90_attention", "cudnn"))
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
        path = self.write("a", {"schema": "other"}, {"what": "speed"}, lines(DECODE_PEERS)[0])
        self.assertEqual(len(steps(path)), 1)
        done = compare(self.write("b", {"schema": "other"}))
        self.assertEqual(done.returncode, 3)
        self.assertIn("no line is of ringattn (there are 1 other)", done.stderr)

    def test_what_is_no_whole_line_is_refused(self):
        good = lines(DECODE_PEERS)[0]
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
            with self.assertRaisesRegex(result_lines.BadLine, "line 1 of .* is not a whole result", msg=change):
                steps(self.write("a", {**good, **change}))
        self.assertEqual(compare(self.folder / "nothing").returncode, 3)

    def test_needs_and_goals_are_gates(self):
        self.assertEqual(compare("--need", "cuDNN=0.96", DECODE_PEERS).returncode, 0)
        done = compare("--need", "cuDNN=0.97", DECODE_PEERS)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r"32/8 heads of 128, 4k on 1: 0.962 of cuDNN, .*, at least 0.97 is needed")
        self.assertEqual(done.stderr.count("too slow"), 1)
        done = compare("--goals", DECODE_PEERS)
        self.assertEqual((done.returncode, done.stderr.count("too slow")), (1, 1))
        self.assertIn("32/8 heads of 128, 32 x 4k: 1.040 of the time of cuDNN, at most 1.000 is wanted", done.stderr)
        alone = self.write("a", lines(DECODE)[0], *(line for line in lines(DECODE_PEERS) if line["kernel"] == "cudnn"))
        done = compare("--goals", alone)
        self.assertEqual((done.returncode, done.stderr.count("ringattn was not measured")), (1, 2))
        self.assertEqual(compare("--goals", DECODE).returncode, 1, "no peer was measured")
        self.assertEqual(compare("--need", "nobody=1", DECODE_PEERS).returncode, 1)
        for need in ("cuDNN", "cuDNN=nan"):
            self.assertEqual(compare("--need", need, DECODE_PEERS).returncode, 2, need)

    def test_the_table_has_ratios(self):
        def rows(path: pathlib.Path) -> list[list[str]]:
            return [[cell.strip() for cell in line.split("|")[1:-1]] for line in compare(path).stdout.splitlines()[2:]]

        shown = [row for row in rows(DECODE_PEERS) if row[:2] == ["bf16, 32/8 heads of 128", "1k"]]
        self.assertEqual([(row[4], row[6], row[7]) for row in shown], [("6.0", "12.0", "2.000"), ("6.0", "8.0", "1.333")])
        (paged,) = [row for row in rows(DECODE) if "pages of 16" in row[0]]
        self.assertEqual(paged[3:], ["ringattn", "11.0", "ringattn", "10.0", "0.909"], "beside the dense time")
        refused = "# FlashAttention-2, grouped, token-major, bf16, 32/8 heads of 128, 32 x 4k: No available kernel"
        self.assertIn(refused, compare(DECODE_PEERS).stderr)


if __name__ == "__main__":
    unittest.main()
