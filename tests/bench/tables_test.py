# SPDX-License-Identifier: Apache-2.0
"""bench/tables.py: the committed tables and pictures follow from the committed results; figures that are edited by hand, or
measured again, are seen; --select chooses what bench/run.sh --readme measured; plot draws; and gate decides. Pages and
results are changed in copies. Tests of pictures need matplotlib."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
sys.dont_write_bytecode = True

import result_lines  # noqa: E402  (these lie in bench)
import tables as bench_tables  # noqa: E402

LINES = pathlib.Path(__file__).resolve().parent / "lines"
COMMIT = "0123456789ab"
# Parts of bench/run.sh, each of which has a small file of lines.
PARTS = ("decode-peers", "decode", "sparse-peers", "latents-peers", "scans-peers", "compressed", "compressed-ring", "latent-ring",
         "latent-two-million", "latent-oracle", "scan-ranks", "scan-oracle", "decode-ranks")  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"
needs_matplotlib = unittest.skipUnless(importlib.util.find_spec("matplotlib"), "needs matplotlib")
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


def tables(root: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", str(root / "bench" / "tables.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


class Committed(unittest.TestCase):
    def test_tables_and_pictures_follow_from_the_results(self):
        done = tables(ROOT, "--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_pictures_have_a_dark_form_and_a_description(self):
        for name in ("speed", "scaling", "compression"):
            text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
            picture = xml.fromstring(text)
            self.assertIn("@media (prefers-color-scheme:dark)", text)
            self.assertTrue(picture.find("{*}desc").text)
        words = {text.strip() for text in xml.fromstring((ROOT / "docs/pictures/scaling.svg").read_text()).itertext()}
        self.assertLess({"TFLOP/s per GPU", "sequence length (tokens)", "zigzag ring (own re-implementation), 4 GPUs"}, words)


@needs_matplotlib
class Changed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """A copy of the pages and results, with pictures that this version of matplotlib drew."""
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.copy = pathlib.Path(cls.folder.name, "copy")
        for name in ("bench", "docs"):
            shutil.copytree(ROOT / name, cls.copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.cpp", "peers"))
        shutil.copy(ROOT / "README.md", cls.copy)
        if tables(cls.copy).returncode != 0:
            raise RuntimeError("the copy's pages can't be written")

    def setUp(self):
        self.root = pathlib.Path(self.folder.name, self.id())
        shutil.copytree(self.copy, self.root)

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.root / path
        text = file.read_text(encoding="utf-8")
        self.assertTrue(old in text, f"{path} has no {old}")
        file.write_text(text.replace(old, new, 1), encoding="utf-8")

    def selection(self) -> dict[str, list[str]]:
        return json.loads((self.root / "bench/results/shown.json").read_text())

    def test_a_figure_that_was_written_by_hand_is_seen_and_mended(self):
        for path, old in (("README.md", "| 1 GPU "), ("docs/results.md", "| 1 GPU "), ("docs/mla.md", "| 131,072 "),
                          ("docs/pictures/speed.svg", ">1k<")):  # fmt: skip
            before = (self.root / path).read_text(encoding="utf-8")
            self.edit(path, old, old.replace("1", "2"))
            done = tables(self.root, "--check")
            self.assertEqual(done.returncode, 1, path)
            self.assertIn(f"{path} doesn't follow from bench/results/shown.json", done.stderr)
            self.assertEqual(tables(self.root).returncode, 0)
            self.assertEqual((self.root / path).read_text(encoding="utf-8"), before)

    def test_what_is_around_a_table_stays(self):
        self.edit("README.md", "# ringattn\n", "# ringattn, edited\n")
        self.edit("docs/results.md", "### Scaling, H200\n", "### Scaling to two and four GPUs, H200\n")
        self.assertEqual(tables(self.root, "--check").returncode, 0)

    def test_results_that_differ_change_pages_and_pictures(self):
        for name in self.selection()["one-gpu"]:
            path = self.root / "bench/results" / name
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                if line.get("ms"):
                    line["ms"]["median"] /= 2
                    line["tflops_per_rank"] *= 2
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        done = tables(self.root, "--check")
        self.assertEqual(done.returncode, 1)
        for path in ("README.md", "docs/results.md", "docs/pictures/speed.svg"):
            self.assertIn(f"{path} doesn't follow", done.stderr)

    def test_what_is_missing_is_named(self):
        self.edit("README.md", "<!-- /table:speed -->\n", "")
        done = tables(self.root, "--check")
        self.assertEqual(done.returncode, 3)
        self.assertIn("README.md has no <!-- /table:speed -->", done.stderr)
        self.edit("README.md", "<!-- table:speed -->\n", "")
        self.assertIn("README.md has places for measured, two-million", tables(self.root).stderr)
        (self.root / "bench/results" / self.selection()["cpu"][0]).unlink()
        done = tables(self.root)
        self.assertEqual(done.returncode, 3)
        self.assertIn("can't be read (No such file", done.stderr)

    def measure(self, folder: str, date: str, part: str, group: str, commit: str = COMMIT) -> str:
        """A file as bench/run.sh would write it: the lines that are shown now, as of another commit."""
        lines = [json.loads(line) for name in self.selection_at_first[group]
                 for line in (ROOT / "bench/results" / name).read_text().splitlines()]  # fmt: skip
        for line in lines:
            line["git"] = commit
            line.pop("beside", None)
        path = self.root / "bench/results" / folder / f"{date}-{part}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return f"{folder}/{date}-{part}.jsonl"

    def test_the_newest_results_of_a_gpu_are_selected(self):
        self.selection_at_first = before = self.selection()
        one = self.measure("card", "2030-01-02", "one-gpu", "one-gpu")
        self.measure("card", "2030-01-01", "one-gpu", "one-gpu", "000000000000")
        self.measure("card-x2", "2030-01-02", "two-million", "two-million")
        most = self.measure("card-x4", "2030-01-02", "two-million", "two-million")
        self.measure("card-x8", "2030-01-01", "two-million", "two-million")
        scaling = self.measure("card-x4", "2030-01-02", "scaling", "scaling")
        ring = self.measure("card-x4", "2030-01-02", "ring-nccl", "scaling")
        self.measure("card-x4", "2030-01-02", "ring-p2p", "scaling", "000000000000")  # of another commit: not beside
        self.measure("cardboard", "2030-01-03", "scaling", "scaling")  # another GPU
        done = tables(self.root, "--select", "card")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        new = {"one-gpu": [one], "scaling": [ring, scaling], "two-million": [most]}
        self.assertEqual(self.selection(), before | new, "what was not measured again stays")
        page = (self.root / "README.md").read_text(encoding="utf-8")
        self.assertIn(f"All figures here were measured at commit `{COMMIT[:7]}` (NVIDIA H200, bf16, 2030-01-02).", page)
        self.assertEqual(tables(self.root, "--check").returncode, 0)

    def test_the_tables_have_the_figures_of_the_results(self):
        folder = self.root / "bench/results/card"
        folder.mkdir()
        for part in PARTS:
            shutil.copy(LINES / f"{part}.jsonl", folder / f"2030-01-02-{part}.jsonl")
        self.assertEqual(tables(self.root, "--select", "card").returncode, 0)
        page = re.sub(" +", " ", (self.root / "docs/results.md").read_text(encoding="utf-8"))
        for rows in (
            "### Decode step, H200\n",
            "Commit `0123456`, NVIDIA H200. Raw results: [card/2030-01-02-decode-peers](../bench/results/card/",
            "Compared with: PyTorch 2.11.0.",
            "| 32/8 of 128 | 1 x 1k | 6.0 | 8.0 | 12.0 | 0.75 |\n| 32/8 of 128 | 32 x 4k | 130 | 125 | can't | 1.04 |\n"
            "| 32/8 of 64 | 1 x 4k | 9.0 | 10.0 | — | 0.90 |\n<!--",
            "| heads, head_dim | sequences x keys | dense, µs | pages of 16 | pages of 64 |\n",
            "| 32/8 of 128 | 1 x 4k | 10.0 | 1.100 x | 1.020 x |\n<!--",
            "| all | 32k | 100.0 % | 7.00 | 10.00 | 1.43 | 1.00 |\n"
            "| random-10 | 32k | 11.5 % | 1.00 | 2.00 | 2.00 | 7.00 |\n<!--",
            "| 1 x 16k | 21.0 | 15.0 (0.71 x) | 16.0 (0.76 x) | 12.0 (0.57 x) |\n\n",
            "| prefill, ms | bf16 | fp8 | int4 |\n",
            "| 1 x 16k | 2.00 | 2.10 (1.05 x) | 2.50 (1.25 x) |\n\n",
            "| int8 | 3000 | 0.75 | 2500 | 0.62 |\n<!--",
            "| bf16 | 32.0 MB | 1.000 | 4.00 s | 50 % | `aaaaaaaa…` |\n"
            "| fp8 | 16.0 MB | 0.500 | 2.50 s | 10 % | `bbbbbbbb…` |\n<!--",
            "| 128k | 1 GPU | 150 ms | 586 | 590 | 733 | 0.800 | 0.0 % | — |\n"
            "| 128k | 2 GPUs | 80.00 ms | 550 | 579 | 687 | 0.800 | 5.0 % | — |\n"
            "| 2m | 1 GPU | 36.0 s | 626 | — | 682 | 0.917 | 0.0 % | `cccccccc…` |\n"
            "| 2m | 2 GPUs | 18.0 s | 626 | 633 | 682 | 0.917 | 1.0 % | `cccccccc…` |\n\n"
            "64 rows of 2m tokens of 16 heads, compared with fp64: passed, "
            "the greatest error is 0.25 of the allowed error.\n<!--",
            "| 128k | 1 GPU | 3.50 ms | 1.00 x | 0.0 % | `eeeeeeee…` |\n"
            "| 128k | 2 GPUs, p2p | 1.75 ms | 2.00 x | 4.0 % | `eeeeeeee…` |\n"
            "| 128k | 2 GPUs, nccl | 2.00 ms | 1.75 x | 15.0 % | `eeeeeeee…` |\n\n64 rows of 2m tokens of 8 heads",
            "| 1m | 1 GPU | 980 µs | 1.00 x | `99999999…` |\n| 1m | 2 GPUs, p2p | 500 µs | 1.96 x | `99999999…` |\n<!--",
            "| 128, 1 | 128 x 4k | 1810 | 1510 | 1.20 |\n| 128, 2 | 64 x 16k | 9000 | — | — |\n<!--",
            "Compared with: FlashMLA 1.0.0.",
            "| op | sequences x tokens | ringattn, ms | mamba_ssm, ms | PyTorch, ms | fastest peer / ringattn | GB/s |\n",
            "| Mamba-2 | 1 x 128k | 2 | 6 | — | 3.00 | 1386 |\n| conv1d | 1 x 128k | 1.9 | — | 19 | 10.00 | 2331 |\n"
            "| Mamba-2 | 1 x 2m | 32 | can't | — | — | 1386 |\n<!--",
            "Compared with: mamba_ssm 2.3.2; PyTorch 2.11.0.",
        ):
            self.assertIn(rows, page)
        self.assertNotIn("window-10", page, "what could not be measured is no row")
        self.assertNotIn("causal_conv1d none", page, "a peer that was not installed is no column")
        mla = re.sub(" +", " ", (self.root / "docs/mla.md").read_text(encoding="utf-8"))
        self.assertIn("| 2,097,152 | 2 | 18.5 s | 609 | 2.0 GiB | 20.0 GiB | `cccccccc…` |\n<!--", mla)

    def test_a_peer_that_was_not_there_has_no_column(self):
        for name in self.selection()["one-gpu"]:
            path = self.root / "bench/results" / name
            lines = [line for line in path.read_text().splitlines(True) if "flash_attention_3" not in line]
            path.write_text("".join(lines))
        self.assertEqual(tables(self.root).returncode, 0)
        (head,) = [line for line in (self.root / "README.md").read_text().splitlines() if line.startswith("| head_dim")]
        names = [cell.strip() for cell in head.strip("|").split("|")[2:]]
        self.assertEqual(names, ["ringattn", "cuDNN", "FlashAttention-2"])

    def test_several_commits_are_told_apart(self):
        self.selection_at_first = self.selection()
        self.measure("card", "2030-01-02", "one-gpu", "one-gpu")
        self.measure("card-x2", "2030-01-02", "scaling", "scaling", "ba9876543210")
        self.measure("card-x2", "2030-01-02", "two-million", "two-million", "ba9876543210")
        done = tables(self.root, "--select", "card")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the README's figures are of 2 commits: 0123456, ba98765", done.stderr)
        page = (self.root / "README.md").read_text(encoding="utf-8")
        self.assertIn("several commits: `0123456` (one GPU), `ba98765` (several GPUs)", page)


@needs_matplotlib
class Pictures(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_lines_have_their_points_and_labels(self):
        curves = {"ringattn": [(1024, 100.0), (4096, 400.0)], "theirs": [(2048, 200.0)]}
        chart = bench_tables.speed_chart("a & b", "<", curves)
        self.assertEqual(chart.ticks, [(1024, "1k"), (2048, "2k"), (4096, "4k")])
        picture = xml.fromstring(bench_tables.draw("c", [chart]))
        words = [element.text for element in picture.iter(f"{SVG}text")]
        self.assertLessEqual({"a & b", "<", "1k", "2k", "4k", "ringattn", "theirs", "400", "TFLOP/s"}, set(words), words)

    def test_the_same_figures_give_the_same_bytes(self):
        curves = {f"line {index}": [(1 << power, index / 3 + power) for power in range(9, 20)] for index in range(9)}
        first, again = (bench_tables.draw("c", [bench_tables.speed_chart("t", "s", dict(curves))]) for _ in range(2))
        self.assertEqual(first, again)

    def test_speed_of_any_results(self):
        found = result_lines.points_of(result_lines.read_files(LINES / name for name in ("ours.jsonl", "peers.jsonl")))
        (kind, curves), *others = result_lines.speed_curves(found).items()
        self.assertEqual((kind, others), ("bf16 32/8 x 128 causal", []))
        self.assertEqual(curves["ringattn sm80_attention"], [(1024, 200.0), (8192, 340.0), (32768, 350.0)])
        self.assertEqual(curves["zigzag ring cudnn, compiled merge, nccl, 8 ranks"], [(32768, 305.0), (131072, 520.0)])
        nothing = dataclasses.replace(found[0], job=dataclasses.replace(found[0].job, tokens=0), tflops=0.0)
        self.assertEqual(result_lines.speed_curves([nothing]), {})

    def test_scaling_needs_one_rank_and_several(self):
        found = result_lines.points_of(result_lines.read_files(LINES / name for name in ("ours.jsonl", "peers.jsonl")))
        curves = result_lines.scaling_curves(found)
        self.assertEqual(list(curves.values()), [[(1, 1.0), (8, 300 / 350)], [(1, 1.0), (8, 320 / 350)]])
        alone = next(point for point in found if point.world == 1 and point.tflops == 350.0)
        other = dataclasses.replace(alone, block=4096, tflops=1.0)
        self.assertEqual(result_lines.scaling_curves([alone, other, *found]), curves, "the default form is the base")

    def test_compression_in_bits(self):
        lines = [{"data": "normal", "method": method, "bytes": size, "change_of_o": change}
                 for method, size, change in (("fp8", 132, 2.0**-7), ("fp8 tensor", 64, 2.0**-3), ("fp8", 16, 4.0))]  # fmt: skip
        expected = {"normal": {"fp8": [(16, 0.0), (64, 3.0), (132, 7.0)]}}
        self.assertEqual(result_lines.compression_curves(lines), expected)

    def test_each_kind_is_written(self):
        ranks, bars = result_lines.timeline_bars(TRACE)
        self.assertEqual(ranks, ["rank 0 on node1", "rank 1 on node1"])
        self.assertEqual(bars, [(0, "compute", 1.0, 2.5), (1, "wait", 0.0, 0.5)])
        trace, picture = self.folder / "trace.json", self.folder / "picture.svg"
        trace.write_text(json.dumps(TRACE))
        ours = str(LINES / "ours.jsonl")
        for words, wanted in ((["speed", ours], {"bf16 32/8 x 128 causal", "1k", "ringattn sm80_attention"}),
                              (["scaling", ours], {"Scaling efficiency", "efficiency", "8"}),
                              (["timeline", str(trace)], {"rank 0 on node1", "compute", "wait", "ms"})):  # fmt: skip
            done = tables(ROOT, "plot", *words, "-o", str(picture))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertLess(wanted, {text.strip() for text in xml.fromstring(picture.read_text()).itertext()})

    def test_missing_things_are_named(self):
        none, ours, picture = f"{self.folder}/none", str(LINES / "ours.jsonl"), f"{self.folder}/none/x.svg"
        for words in (["speed", none], ["timeline", ours], ["timeline", none], ["scaling", str(LINES / "peers.jsonl")],
                      ["speed", ours], ["speed", ours, "--kind", "9/9"]):  # fmt: skip
            done = tables(ROOT, "plot", *words, "-o", picture)
            self.assertEqual(done.returncode, 3, words)
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)


class Gate(unittest.TestCase):
    """Two programs that print their rates: of each head_dim one point, and a second one that is this much faster."""

    def gate(self, first: float, second: float, *words: str, old: str = "") -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            program = """#!{python} -B
import json, sys
assert sys.argv[1:3] == ["gate", "sm90_attention"]
line = dict(heads=32, kv_heads=8, head_dim=int(sys.argv[3]), head_dim_v=128, mask="causal")
for seq, rate in ((1024, {first}), (4096, {second})):
    print(json.dumps(dict(line, seq=seq, tflops=rate)))
"""
            for name, rates in (("old", (100.0, 100.0)), ("new", (first, second))):
                path = pathlib.Path(folder, name)
                path.write_text(program.format(python=sys.executable, first=rates[0], second=rates[1]))
                path.chmod(0o755)
            output = f"{folder}/lines.jsonl"
            done = tables(ROOT, "gate", old or f"{folder}/old", f"{folder}/new", "--rounds", "2", "--output", output, *words)
            self.kept = pathlib.Path(output).read_text().splitlines() if pathlib.Path(output).exists() else []
            return done

    def test_each_point_and_the_geometric_mean_decide(self):
        for first, second, code in ((100.0, 100.0, 0), (99.2, 100.0, 0), (98.9, 120.0, 1), (99.2, 99.2, 1), (101.0, 99.1, 0)):
            done = self.gate(first, second)
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertIn("10 points, 0 below 0.99; geometric mean 1.0005", done.stdout)
        self.assertEqual(self.gate(98.9, 98.9, "--least", "0.98", "--mean", "0.98").returncode, 0)

    def test_the_builds_take_turns(self):
        self.gate(100.0, 100.0, "--head-dims", "128,64")
        lines = [json.loads(line) for line in self.kept]
        turns = [(line["round"], line["head_dim"], line["build"]) for line in lines[::2]]
        self.assertEqual(turns, [(number, dim, build) for number in (0, 1) for dim in (128, 64) for build in ("old", "new")])

    def test_a_program_that_does_not_run_is_an_error(self):
        for old in ("/bin/false", "/none"):
            done = self.gate(100.0, 100.0, old=old)
            self.assertEqual(done.returncode, 3, done.stderr)
            self.assertIn("error: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
