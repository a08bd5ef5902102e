# SPDX-License-Identifier: Apache-2.0
"""bench/compare.py and bench/plot.py on small files of lines. The runner of resumable parts: parts_test.py; tables and what is
drawn of them: tables_test.py."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = pathlib.Path(__file__).resolve().parent / "lines"
OURS, PEERS = str(LINES / "ours.jsonl"), str(LINES / "peers.jsonl")
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True

import compare  # noqa: E402  (these lie in bench)
import plot  # noqa: E402
import points  # noqa: E402

TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0 on node1"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1 on node1"}},
        {"ph": "X", "name": "block 0", "cat": "compute", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 2500.0},
        {"ph": "X", "name": "block 0", "cat": "wait", "pid": 1, "tid": 1, "ts": 0.0, "dur": 500.0},
        {"ph": "X", "name": "block 0", "cat": "transfer", "pid": 1, "tid": 2, "ts": 0.0, "dur": 0.0},
    ]
}


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True)


def tool(name: str, *words: str) -> subprocess.CompletedProcess:
    return run(sys.executable, "-B", str(ROOT / "bench" / name), *words)


class Compare(unittest.TestCase):
    def rows(self):
        return compare.pair(points.read([OURS, PEERS]))

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
            (file,) = points.read_files([str(path)])
            again = {**first, "stripe": 320}  # chosen from the tiles of a newer kernel
            path.write_text("\n".join(map(json.dumps, [first, again])))
            self.assertEqual(len(points.read([str(path)])), 1)
        self.assertEqual((len(file.points), file.left_out), (len(lines), {}))
        names = {(row.ours.name, row.theirs.name) for row in compare.pair(list(file.points.values()))}
        whole = [f"ringattn sm80_attention, p2p{text}" for _, text in forms]
        self.assertEqual(names, {(name, f"{name}, compute only") for name in whole})
        alone = dataclasses.replace(points.parse(first), world=1, transport="self")
        series = plot.scaling_series([alone, dataclasses.replace(alone, block=4096, tflops=1.0), *file.points.values()])
        self.assertEqual(list(series.values()), [[(1, 1.0), (8, 1.0)]] * len(forms))

    def test_a_window_is_contiguous_unless_asked(self):
        point = points.read([OURS])[0]
        window = dataclasses.replace(point, job=dataclasses.replace(point.job, mask="window 4095,0"), layout="contiguous")
        self.assertEqual((point.form, window.form), ("", ""))
        self.assertEqual(dataclasses.replace(window, layout="striped").form, ", striped")
        self.assertEqual(dataclasses.replace(window, layout="striped", stripe=128).form, ", stripe 128")

    def test_the_last_of_several_measurements_counts(self):
        mine = [point for point in points.read([OURS]) if point.job.seq == 8192]
        self.assertEqual([point.tflops for point in mine], [340.0])

    def test_a_point_without_peers_is_shown(self):
        alone = [row for row in self.rows() if row.theirs is None]
        self.assertEqual([(row.ours.job.seq, row.ours.world) for row in alone], [(32768, 1)])

    def test_tables(self):
        text = tool("compare.py", OURS, PEERS)
        self.assertEqual(text.returncode, 0, text.stderr)
        self.assertIn("can't (No available kernel)", text.stdout)
        self.assertIn("1k x 16", text.stdout)
        other = "1 of other formats (1 speed)"
        self.assertIn(f"# {OURS}: 2 of 9 lines left out: {other}, 1 measured again further down", text.stderr)
        self.assertIn(f"# {PEERS}: 2 of 7 lines left out: 1 of the accuracy of sums", text.stderr)
        self.assertIn("1 of peers or of compute only, with none of ours beside them", text.stderr)
        markdown = tool("compare.py", "--markdown", OURS, PEERS).stdout.splitlines()
        self.assertEqual(len(markdown), 2 + len(self.rows()))
        self.assertTrue(all(line.count("|") == len(compare.HEAD) + 1 for line in markdown), markdown)

    def test_needs_are_gates(self):
        passes = ["flash_attention_2=1.0", "p2p, compute only=0.97"]
        self.assertEqual(tool("compare.py", "--need", passes[0], "--need", passes[1], OURS, PEERS).returncode, 0)
        for need in ["flash_attention_2=1.1", "nccl, compute only=0.97", "nobody=0.1"]:
            done = tool("compare.py", "--need", need, OURS, PEERS)
            self.assertEqual(done.returncode, 1, need)
            self.assertIn("too slow: ", done.stderr)
        for need in ["x", "nobody=", "nobody=nan"]:
            self.assertEqual(tool("compare.py", "--need", need, OURS).returncode, 2, need)

    def test_a_point_that_only_a_peer_can_do_misses_needs(self):
        mine, theirs = points.read([OURS, PEERS])[0], next(p for p in points.read([PEERS]) if p.tflops)
        rows = [compare.Row(dataclasses.replace(mine, tflops=None, error="out of memory"), theirs)]
        self.assertEqual(len(compare.misses(rows, theirs.name, 0.1)), 1)

    def test_what_is_no_line_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder, "bad")
            for text in ["nonsense", "[1]", '{"schema": "ringattn.bench/1"}', '{"schema": "ringattn.bench/1", "job": 3}']:
                bad.write_text("\n" + text + "\n")
                done = tool("compare.py", str(bad))
                self.assertEqual(done.returncode, 3, text)
                self.assertIn("error: line 2 of ", done.stderr)
            bad.write_bytes(b"\xff\xfe{}")
            self.assertEqual(tool("compare.py", str(bad)).returncode, 3, "no text")
            self.assertEqual(tool("compare.py", f"{folder}/none").returncode, 3)
        self.assertEqual(tool("compare.py", PEERS).returncode, 3, "nothing of ours")

    def test_members_of_another_kind_are_refused(self):
        good = json.loads(pathlib.Path(OURS).read_text().splitlines()[0])
        points.parse(good)
        jobs = [{"batch": 0}, {"batch": True}, {"tokens": "1k"}, {"heads": [1]}, {"dtype": None}, {"mask": 3}]
        lines = [{"job": {**good["job"], **wrong}} for wrong in jobs]
        lines += [{"tflops_per_rank": wrong} for wrong in ("fast", float("nan"), float("inf"), -1.0)]
        lines += [{"world": "8"}, {"tool": 5}, {"ms": {"median": None}}, {"error": 7}, {"block": -1}, {"overlap": 1}]
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder, "bad")
            for wrong in lines:
                bad.write_text(json.dumps({**good, **wrong}))
                with self.assertRaisesRegex(points.BadLine, "line 1 of .* is no whole point", msg=wrong):
                    points.read([str(bad)])

    def test_sizes(self):
        written = {0: "0", 100: "100", 1000: "1000", 1024: "1k", 1536: "1536", 1 << 20: "1m", 3 << 19: "1536k"}
        self.assertEqual({tokens: points.size(tokens) for tokens in written}, written)


class Plot(unittest.TestCase):
    def test_speed(self):
        (kind, series), *others = plot.speed_series(points.read([OURS, PEERS])).items()
        self.assertEqual((kind, others), ("bf16 32/8 x 128 causal", []))
        self.assertEqual(series["ringattn sm80_attention"], [(1024, 200.0), (8192, 340.0), (32768, 350.0)])
        self.assertEqual(series["zigzag ring cudnn, compiled merge, nccl, 8 ranks"], [(32768, 305.0), (131072, 520.0)])

    def test_scaling_needs_one_rank_and_several(self):
        series = plot.scaling_series(points.read([OURS, PEERS]))
        self.assertEqual(list(series.values()), [[(1, 1.0), (8, 300 / 350)], [(1, 1.0), (8, 320 / 350)]])

    def test_compression(self):
        lines = [{"what": "compression", "data": "normal", "method": method, "bytes": size, "change_of_o": change}
                 for method, size, change in (("fp8", 132, 2.0**-7), ("fp8 tensor", 64, 2.0**-3), ("fp8", 16, 4.0))]  # fmt: skip
        expected = {"normal": {"fp8": [(16, 0.0), (64, 3.0), (132, 7.0)]}}
        self.assertEqual(plot.compression_series([*lines, {"what": "run"}]), expected)
        picture = xml.fromstring(plot.draw_compression(plot.compression_series(lines)))
        self.assertLess({"KV compression, Gaussian data", "fp8"}, {text.strip() for text in picture.itertext()})

    def test_timeline(self):
        ranks, bars = plot.timeline_bars(TRACE)
        self.assertEqual(ranks, ["rank 0 on node1", "rank 1 on node1"])
        self.assertEqual(bars, [(0, "compute", 1.0, 2.5), (1, "wait", 0.0, 0.5)])

    def test_missing_things_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            none, picture = f"{folder}/none", f"{folder}/none/x.svg"
            for words in (["speed", none], ["timeline", OURS], ["timeline", none], ["scaling", PEERS]):
                done = tool("plot.py", *words, "-o", picture)
                self.assertEqual(done.returncode, 3, words)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertEqual(tool("plot.py", "speed", OURS, "-o", picture).returncode, 3)

    def test_jobs_of_no_tokens_are_not_drawn(self):
        point = points.read([OURS])[0]
        nothing = dataclasses.replace(point, job=dataclasses.replace(point.job, tokens=0), tflops=0.0)
        self.assertEqual(plot.speed_series([nothing]), {})


class Pictures(unittest.TestCase):
    def test_each_kind_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder, "trace.json")
            trace.write_text(json.dumps(TRACE))
            for what, files, words in [
                ("speed", [OURS, PEERS], {"bf16 32/8 x 128 causal", "1k", "ringattn sm80_attention"}),
                ("scaling", [OURS], {"Scaling efficiency", "8"}),
                ("timeline", [str(trace)], {"rank 0 on node1", "compute", "wait", "transfer", "ms"}),
            ]:
                picture = pathlib.Path(folder, f"{what}.svg")
                done = tool("plot.py", what, *files, "-o", str(picture))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertLess(words, {text.strip() for text in xml.fromstring(picture.read_text()).itertext()})


if __name__ == "__main__":
    unittest.main()
