# SPDX-License-Identifier: Apache-2.0
"""bench/compare.py and bench/plot.py on small files of lines, and the runner of resumable parts. Usage: tools_test.py
[unit | plot]; exits 77 where the part can't run. What is drawn is checked as series; that pictures are written, only where
matplotlib is installed."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

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
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "fold"}},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1 on node1"}},
        {"ph": "X", "name": "block 0", "cat": "fold", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 2500.0},
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
        self.assertEqual(self.ratios("ringattn sm80_fold, p2p, folds alone"), {(32768, "p2p"): 320 / 325})
        self.assertEqual(self.ratios("ringattn sm80_fold, nccl, folds alone"), {(32768, "nccl"): 300 / 326})

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
        whole = [f"ringattn sm80_fold, p2p{text}" for _, text in forms]
        self.assertEqual(names, {(name, f"{name}, folds alone") for name in whole})
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
        self.assertIn("1 of peers or of folds alone, with none of ours beside them", text.stderr)
        markdown = tool("compare.py", "--markdown", OURS, PEERS).stdout.splitlines()
        self.assertEqual(len(markdown), 2 + len(self.rows()))
        self.assertTrue(all(line.count("|") == len(compare.HEAD) + 1 for line in markdown), markdown)

    def test_needs_are_gates(self):
        passes = ["flash_attention_2=1.0", "p2p, folds alone=0.97"]
        self.assertEqual(tool("compare.py", "--need", passes[0], "--need", passes[1], OURS, PEERS).returncode, 0)
        for need in ["flash_attention_2=1.1", "nccl, folds alone=0.97", "nobody=0.1"]:
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
        self.assertEqual(tool("compare.py", "/nonexistent").returncode, 3)
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
        self.assertEqual(series["ringattn sm80_fold"], [(1024, 200.0), (8192, 340.0), (32768, 350.0)])
        self.assertEqual(series["zigzag ring cudnn, compiled merge, nccl, 8 ranks"], [(32768, 305.0), (131072, 520.0)])

    def test_scaling_needs_one_rank_and_several(self):
        series = plot.scaling_series(points.read([OURS, PEERS]))
        self.assertEqual(list(series.values()), [[(1, 1.0), (8, 300 / 350)], [(1, 1.0), (8, 320 / 350)]])

    def test_timeline(self):
        ranks, bars = plot.timeline_bars(TRACE)
        self.assertEqual(ranks, ["rank 0 on node1", "rank 1 on node1"])
        self.assertEqual(bars, [(0, "fold", 1.0, 2.5), (1, "wait", 0.0, 0.5)])

    def test_missing_things_are_named(self):
        for words in (["speed", "/nonexistent"], ["timeline", OURS], ["timeline", "/nonexistent"], ["scaling", PEERS]):
            done = tool("plot.py", *words, "-o", "/nonexistent/x.svg")
            self.assertEqual(done.returncode, 3, words)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        if importlib.util.find_spec("matplotlib") is None:
            done = tool("plot.py", "speed", OURS, "-o", "/nonexistent/x.svg")
            self.assertEqual(done.returncode, 4)
            self.assertIn("matplotlib isn't installed", done.stderr)


class Parts(unittest.TestCase):
    """A script of four parts: one that leaves a mark, one that can't run here, one that fails, one that takes long."""

    SCRIPT = """
set -euo pipefail
source "{root}/tests/support/parts.sh"
part first-one 1 "leaves a mark"
part gpu-one 1 "can't run here"
part bad 1 "fails"
part long 100 "takes long"
part_is_done() {{ [[ -e $1.mark ]]; }}
part_first_one() {{ echo ran >>runs; touch first-one.mark; }}
part_gpu_one() {{ need false -- "a GPU"; echo never; }}
part_bad() {{ false; echo "errexit is off"; }}
part_long() {{ touch long.mark; }}
run_parts "$@"
"""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.script = pathlib.Path(self.folder.name, "script.sh")
        self.script.write_text(self.SCRIPT.format(root=ROOT))

    def tearDown(self):
        self.folder.cleanup()

    def run_script(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["bash", str(self.script), *words], cwd=self.folder.name, capture_output=True, text=True)

    def runs(self) -> int:
        return len(pathlib.Path(self.folder.name, "runs").read_text().splitlines())

    def test_done_parts_are_skipped_unless_again(self):
        self.assertEqual(self.run_script("first-one").returncode, 0)
        again = self.run_script("first-one")
        self.assertIn("first-one: done before", again.stdout)
        self.assertEqual(self.runs(), 1)
        self.run_script("--again", "first-one")
        self.assertEqual(self.runs(), 2)
        self.assertRegex(self.run_script("--list").stdout, r"first-one +done +about +1 min")

    def test_failures_and_skips_are_told_apart(self):
        failed = self.run_script("bad", "first-one")
        self.assertEqual(failed.returncode, 1)
        self.assertNotIn("errexit is off", failed.stdout)
        self.assertIn("failed: bad", failed.stdout)
        self.assertEqual(self.runs(), 1, "the parts behind a failure run")
        skipped = self.run_script("gpu-one")
        self.assertEqual(skipped.returncode, 77)
        self.assertIn("skipped: needs a GPU", skipped.stdout)
        self.assertEqual(self.run_script("first-one", "gpu-one").returncode, 0)
        self.assertNotIn("never", skipped.stdout)

    def test_parts_of_the_gpu_suite_fail_with_their_first_command(self):
        """tests/run_gpu.sh with a launcher and a program that are not the real ones: whatever fails is seen."""
        root = pathlib.Path(self.folder.name, "checkout")
        for name in ("tests/run_gpu.sh", "tests/support/parts.sh"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())

        def executable(path: pathlib.Path, text: str) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n" + text)
            path.chmod(0o755)

        executable(root / "launch/ringattn-mpirun", 'shift 2; [ "$1" != -x ] || shift 2; exec "$RINGATTN_PROGRAM" "$@"\n')
        executable(root / "bin/nvidia-smi", 'printf "GPU 0: a\\nGPU 1: b\\n"\n')
        program = """case "$*" in *info*) echo '"build_id": "abc",'; exit 0;; {case}) echo FAIL; exit {code};; esac
echo PASS 12ab
"""
        environment = {**os.environ, "GPU_PRESET": "fake", "PATH": f"{root}/bin:{os.environ['PATH']}"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        for part, case, code in (
            ("worlds", "*nothing*", 0),
            ("worlds", "*causal*p2p*", 1),
            ("worlds", "*record*", 1),
            ("worlds", "*golden*nccl*", 1),
            ("one-connection", "*nothing*", 0),
            ("one-connection", "*4k*", 6),
            ("one-connection", "*16k*", 6),
        ):
            with self.subTest(part=part, case=case):
                executable(root / "build/fake/bin/ringattn", program.format(case=case, code=code))
                words = ["bash", str(root / "tests/run_gpu.sh"), "--again", part]
                done = subprocess.run(words, capture_output=True, text=True, env=environment)
                self.assertEqual(done.returncode, 1 if code else 0, done.stdout + done.stderr)
                (root / f"build/gpu/{part}.passed").unlink(missing_ok=True)

    def test_benchmarks_of_one_gpu_write_what_was_measured(self):
        """bench/run.sh with programs that only write down their words: ours and the peers get the same shapes, and what
        precision-and-state measures comes in its order, or not at all."""
        root = pathlib.Path(self.folder.name, "checkout")
        for name in ("bench/run.sh", "tests/support/parts.sh"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())

        def executable(name: str, text: str) -> None:
            path = root / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("#!/bin/sh\n" + text)
            path.chmod(0o755)

        writes = """for word; do
  case $last in --dtype) dtype=$word;; --jsonl) file=$word;; esac; last=$word
done
"""
        members = '"tool": "%s", "kernel": "sm90_fold", "dtype": "%s", "words": "%s"'
        line = f"""printf '{{{members}}}\\n' TOOL "$dtype" "$*" >MODE"$file"\n"""
        version = "[ \"$1\" != --version ] || { echo 'ringattn 1 (git abc, x)'; exit 0; }\n"
        executable("nvidia-smi", 'echo "GPU 0: a"\n')
        executable("ringattn", version + writes + line.replace("TOOL", "ours").replace("MODE", ""))
        executable("torch", '[ "$1" != -c ] || exit 0\n' + writes + line.replace("TOOL", "peer").replace("MODE", ">"))
        environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "PYTHON": f"{root}/bin/torch"}
        environment |= {"RINGATTN_PROGRAM": f"{root}/bin/ringattn", "BENCH_MODEL": "a", "BENCH_DATE": "day"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)

        def measure(part: str, code: int) -> list[dict]:
            words = ["bash", str(root / "bench/run.sh"), part]
            done = subprocess.run(words, capture_output=True, text=True, env=environment)
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            self.assertEqual(list((root / "bench/results/a").glob(".lines*")), [])
            path = root / f"bench/results/a/day-{part}.jsonl"
            return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

        shapes = [[line["words"].split(" --seq ")[1].split(" --jsonl")[0] for line in measure(part, 0)]
                  for part in ("one-gpu", "one-gpu-peers")]
        self.assertEqual(shapes[0][: len(shapes[1])], shapes[1])
        self.assertTrue(all("--total-tokens 16k" in shape for shape in shapes[1]), shapes)

        self.assertEqual(measure("precision-and-state", 1), [], "fold_gpu_bench isn't there")
        executable("fold_gpu_bench", "exit 0\n")
        self.assertEqual(measure("precision-and-state", 1), [], "it measured nothing")
        executable("fold_gpu_bench", """printf '{"what": "%s", "kernel": "%s"}\\n' "$1" "$2"\n""")
        lines = measure("precision-and-state", 0)
        turns = [(line["tool"], line["dtype"]) for line in lines[:8]]
        self.assertEqual(turns, [(tool, dtype) for dtype in ("bf16", "fp16") for tool in ("ours", "peer")] * 2)
        self.assertEqual([line["what"] for line in lines[8:]], ["touched", "host", "state", "speed"])
        self.assertEqual(lines[8]["command"], "fold_gpu_bench touched sm90_fold")
        self.assertEqual({line["git"] for line in lines[8:]}, {"abc"})

    def test_the_part_that_measures_shapes_again_sorts_last(self):
        """In the C locale, and where only letters and digits count."""
        listed = run(str(ROOT / "bench/run.sh"), "--list").stdout
        names = [line.split()[0] for line in listed.splitlines()]
        again = "precision-and-state"
        self.assertLess({again, "one-gpu", "one-gpu-peers"}, set(names))
        for key in (str, lambda name: "".join(filter(str.isalnum, name))):
            files = sorted((f"2026-11-21-{name}.jsonl" for name in names if name.startswith("one-gpu") or name == again), key=key)
            self.assertEqual(files[-1], f"2026-11-21-{again}.jsonl")

    def test_what_takes_too_long_is_put_off(self):
        first = self.run_script("first-one", "long")
        self.assertEqual(first.returncode, 75)
        self.assertIn("put off, call", first.stdout)
        self.assertEqual(self.run_script("first-one", "long").returncode, 0, "the first part that isn't done always runs")

    def test_unknown_words(self):
        for words in (["none"], ["--minutes", "x"], ["--minutes"]):
            self.assertEqual(self.run_script(*words).returncode, 2, words)

    def test_the_scripts_name_a_function_for_each_part(self):
        for script in ("bench/run.sh", "tests/run_gpu.sh"):
            listed = run(str(ROOT / script), "--list")
            self.assertEqual(listed.returncode, 0, listed.stderr)
            names = [line.split()[0] for line in listed.stdout.splitlines()]
            self.assertGreater(len(names), 5)
            text = (ROOT / script).read_text()
            for name in names:
                self.assertIn(f"part_{name.replace('-', '_')}() {{", text)


class Pictures(unittest.TestCase):
    def test_each_kind_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            trace = pathlib.Path(folder, "trace.json")
            trace.write_text(json.dumps(TRACE))
            for what, files in [("speed", [OURS, PEERS]), ("scaling", [OURS]), ("timeline", [str(trace)])]:
                picture = pathlib.Path(folder, f"{what}.svg")
                done = tool("plot.py", what, *files, "-o", str(picture))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("<svg", picture.read_text())


if __name__ == "__main__":
    part = sys.argv.pop(1) if sys.argv[1:] else "unit"
    if part == "plot" and importlib.util.find_spec("matplotlib") is None:
        print("skipped: needs matplotlib")
        sys.exit(77)
    unittest.main(defaultTest=["Pictures"] if part == "plot" else ["Compare", "Plot", "Parts"])
