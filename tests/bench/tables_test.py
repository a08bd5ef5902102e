# SPDX-License-Identifier: Apache-2.0
"""bench/tables.py: the committed tables and pictures follow from the committed results; what is edited by hand, or measured
again, is seen; and what bench/run.sh --readme measured is chosen. Copies of the pages and results are changed, never they."""

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

import plot  # noqa: E402  (these lie in bench)
import svg  # noqa: E402

LINES = pathlib.Path(__file__).resolve().parent / "lines"
COMMIT = "0123456789ab"
# Groups that need not have been measured, and the parts of bench/run.sh that measure them.
OPTIONAL = ("decode", "pages", "sparse", "latents", "scans", "compressed", "compressed-ring", "latent-prefill", "scan-ranks",
            "decode-ranks")  # fmt: skip
PARTS = ("decode-peers", "decode", "sparse-peers", "latents-peers", "scans-peers", "compressed", "compressed-ring", "latent-ring",
         "latent-two-million", "latent-oracle", "scan-ranks", "scan-oracle", "decode-ranks")  # fmt: skip
UNMEASURED = {"sparse": "Prefill with a [block-sparse mask](block-sparse.md) has not been measured yet "
              "(`bench/run.sh sparse-peers` does it).\n"}  # what a page says of those; of the others nothing
SVG = "{http://www.w3.org/2000/svg}"


def tables(root: pathlib.Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-B", str(root / "bench" / "tables.py"), *words]
    return subprocess.run(command, capture_output=True, text=True)


class Committed(unittest.TestCase):
    def test_tables_and_pictures_follow_from_the_results(self):
        done = tables(ROOT, "--check")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_pictures_have_a_dark_form_and_a_description(self):
        for name in ("speed", "scaling"):
            text = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
            picture = xml.fromstring(text)
            self.assertIn("@media (prefers-color-scheme:dark)", text)
            self.assertTrue(picture.find("{*}desc").text)
            self.assertIn("ringattn", "".join(picture.itertext()))


class Changed(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name in ("bench", "docs"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "*.cpp", "peers"))
        shutil.copy(ROOT / "README.md", self.root)

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

    def test_tables_that_nobody_measured_are_empty_and_stand_there_once_somebody_did(self):
        place = "<!-- table:decode -->\n<!-- /table:decode -->\n"
        measured = {name: files for name, files in self.selection().items() if name not in OPTIONAL}
        (self.root / "bench/results/shown.json").write_text(json.dumps(measured))
        self.assertEqual(tables(self.root).returncode, 0)
        if place not in (self.root / "README.md").read_text(encoding="utf-8"):  # a place that the README need not have
            self.edit("README.md", "<!-- /table:speed -->\n", f"<!-- /table:speed -->\n\n{place}")
        self.assertEqual(tables(self.root, "--check").returncode, 0)
        before = {page: (self.root / page).read_text(encoding="utf-8") for page in ("README.md", "docs/results.md")}
        for name in OPTIONAL:
            self.assertNotIn(name, self.selection())
            told = UNMEASURED.get(name, "")
            self.assertIn(f"<!-- table:{name} -->\n{told}<!-- /table:{name} -->\n", before["docs/results.md"])
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
        self.assertNotIn("not been measured yet", page, "what is said of a table that is not there")
        readme = (self.root / "README.md").read_text(encoding="utf-8")
        self.assertRegex(readme, r"\| 32/8 of 128 +\| 1 x 1k +\| +6.0 \| +8.0 \|")
        self.assertNotIn("32/8 of 64", readme, "the README has the main shape alone")
        self.assertIn("`0123456` (decode)", readme)
        (self.root / "README.md").write_text(before["README.md"].replace(place, ""), encoding="utf-8")
        self.assertEqual(tables(self.root).returncode, 0)
        readme = (self.root / "README.md").read_text(encoding="utf-8")
        self.assertNotIn("0123456", readme, "without the place neither the table nor its commit")
        (self.root / "README.md").write_text(before["README.md"], encoding="utf-8")
        selection = self.selection()
        for name in OPTIONAL:
            del selection[name]
        (self.root / "bench/results/shown.json").write_text(json.dumps(selection))
        self.assertEqual(tables(self.root).returncode, 0)
        after = {page: (self.root / page).read_text(encoding="utf-8") for page in before}
        self.assertEqual(after, before)

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


class Drawing(unittest.TestCase):
    def test_labels_keep_their_distance_and_order(self):
        places = svg.apart([10.0, 12.0, 100.0, 11.0, 299.0, 300.0], 17.0, 0.0, 300.0)
        ordered = [places[index] for index in (0, 3, 1, 2, 4, 5)]
        self.assertEqual(ordered, sorted(ordered))
        self.assertTrue(all(after - before >= 17.0 for before, after in zip(ordered, ordered[1:])), ordered)
        self.assertTrue(all(0.0 <= place <= 300.0 for place in places), places)
        self.assertEqual(places[2], 100.0, "where there is room, a label stands at its line's end")

    def test_axes_end_at_round_numbers(self):
        self.assertEqual(svg.steps_up_to(694), [0, 100, 200, 300, 400, 500, 600, 700])
        self.assertEqual(svg.steps_up_to(701), [0, 200, 400, 600, 800])
        for most in (0.0, 0.003, 1.0, 2.26, 99.0, 12345.0):
            steps = svg.steps_up_to(most)
            self.assertTrue(steps[-1] >= most and 2 <= len(steps) <= 9, (most, steps))

    def test_points_lie_where_their_figures_say(self):
        chart = plot.speed_chart("a & b", "<", {"ours": [(1024, 100.0), (4096, 400.0)], "theirs": [(2048, 200.0)]})
        picture = xml.fromstring(svg.charts("c", [chart]))
        pairs = [pair for line in picture.iter(f"{SVG}polyline") for pair in line.get("points").split()]
        (x2, y2), (x1, y1), (x4, y4) = (map(float, pair.split(",")) for pair in pairs)
        self.assertAlmostEqual(x2 - x1, x4 - x2, delta=0.2)  # an axis of powers of two
        self.assertAlmostEqual((y1 - y4) / 3, y1 - y2, delta=0.2)
        words = [element.text for element in picture.iter(f"{SVG}text")]
        self.assertTrue({"a & b", "<", "1k", "2k", "4k", "ours", "theirs", "400"} <= set(words), words)

    def test_the_same_figures_give_the_same_bytes(self):
        lines = {f"line {index}": [(1 << power, index / 3 + power) for power in range(9, 20)] for index in range(9)}
        first, again = (svg.charts("c", [plot.speed_chart("t", "s", dict(lines))]) for _ in range(2))
        self.assertEqual(first, again)


if __name__ == "__main__":
    unittest.main()
