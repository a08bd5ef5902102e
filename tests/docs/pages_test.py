# SPDX-License-Identifier: Apache-2.0
"""What the README, the pages of docs/ and the notes name exists: files, headings, tests, flags, results; and the README
and the notes' index keep their length."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUARANTEES = ROOT / "docs/guarantees.md"
NOTES = ROOT / "bench/NOTES.md"  # the index of the pages behind it
NOTES_PAGES = sorted((ROOT / "bench/notes").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "src/kernels/README.md", *sorted((ROOT / "docs").glob("*.md")), NOTES,
         *NOTES_PAGES]  # fmt: skip
LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
# Scripts whose options the pages name, beside the program's own flags.
SCRIPTS = ["launch/launcher/options.cpp", "launch/ringattn.sbatch", "bench/run.sh", "bench/tables.py", "tests/support/parts.sh",
           "tests/run.sh", "tests/package/package_test.sh", "python/ringattn/pytest_plugin.py",
           "launch/ringattn-goldens", "docs/examples/batch_invariant.py", "docs/examples/train_llama.py"]  # fmt: skip
# The sections that pages of ops share, in this order; a page may have sections of its own before the last five.
SECTIONS = ["What is computed", "A layer from a file", "Tensors", "Output", "Synthetic jobs", "Models", "Ranks", "Guarantees",
            "Speed", "Limits", "From Python", "From C++ and C"]  # fmt: skip
OP_PAGES = ["gated-delta", "linear", "linear-attention", "mla", "rope", "ssm"]
OF_OTHERS = ["nproc-per-node", "no-python", "enable-deterministic-inference"]  # torchrun, SGLang


def prose(text: str) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: pathlib.Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def promises() -> list[list[str]]:
    """The rows of the table of guarantees: what is promised, and the tests that show it."""
    section = GUARANTEES.read_text(encoding="utf-8").partition("\n## What is promised\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


class Pages(unittest.TestCase):
    def test_links_lead_somewhere(self):
        seen = 0
        for page in PAGES:
            for target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
                if target.startswith(("http://", "https://")):
                    continue
                seen += 1
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                self.assertTrue(file.exists(), f"{page.name} links to {target}")
                if anchor:
                    self.assertIn(anchor, anchors(file), f"{page.name} links to {target}")
        self.assertGreater(seen, 30)

    def test_pages_of_ops_have_the_same_sections_in_the_same_order(self):
        for page in OP_PAGES:
            headings = re.findall(r"^###? (.*)$", prose((ROOT / f"docs/{page}.md").read_text(encoding="utf-8")), re.MULTILINE)
            shared = [heading for heading in headings if heading in SECTIONS]
            self.assertEqual(shared, sorted(shared, key=SECTIONS.index), page)
            self.assertEqual(shared[-5:], SECTIONS[-5:], page)
        ops = prose((ROOT / "docs/gradients.md").read_text(encoding="utf-8")).split("\n## ")[1:]  # a section for each op
        self.assertGreaterEqual(len(ops), 4)
        for op in ops:
            shared = [heading for heading in re.findall(r"^### (.*)$", op, re.MULTILINE) if heading in SECTIONS]
            self.assertEqual(shared, sorted(shared, key=SECTIONS.index), op.splitlines()[0])
            self.assertLessEqual({"Guarantees", *SECTIONS[-3:]}, set(shared), op.splitlines()[0])

    def test_every_promise_names_tests_that_exist(self):
        rows = promises()
        self.assertGreaterEqual(len(rows), 8)
        for promise, *shown in rows:
            self.assertEqual(len(shown), 1, promise)
            groups = re.findall(r"((?:`\w+\.(?:\w+|\*)`(?:, )?)+) in \[[^\]]+\]\(([^)]+)\)", shown[0])
            named = [(test, path) for tests, path in groups for test in re.findall(r"`([^`]+)`", tests)]
            self.assertEqual(len(named), shown[0].count("`") // 2, f"every test stands before its file: {shown[0]}")
            self.assertTrue(named, promise)
            for test, path in named:
                suite, name = test.split(".")
                pattern = rf"\bTEST(_[FP])?\({suite}, {name.replace('*', ' *')}\b"  # of a suite any test
                self.assertRegex((GUARANTEES.parent / path).read_text(encoding="utf-8"), pattern, promise)

    def test_flags_are_flags(self):
        known = set(re.findall(r'^    \{"([a-z-]+)"', (ROOT / "launch/flags.cpp").read_text(), re.MULTILINE))
        for entry in (*ROOT.glob("src/ops/*/*_entry.cpp"), *ROOT.glob("src/ops/*/*_settings.hpp"),
                      *ROOT.glob("src/ops/jobs/*_setting.hpp")):  # settings of few ops  # fmt: skip
            known |= set(re.findall(r'\.name = "([a-z-]+)",\s*\.(?:kind|value) =', entry.read_text()))
        scripts = "\n".join((ROOT / script).read_text(encoding="utf-8") for script in SCRIPTS)
        for page in [README, *sorted((ROOT / "docs").glob("*.md"))]:
            for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", page.read_text(encoding="utf-8")):
                if flag in ("help", "version", "config-settings", *OF_OTHERS) or flag in known:  # the third one is of pip
                    continue
                self.assertTrue(re.search(rf"--{flag}(?![a-z-])", scripts), f"{page.name} names --{flag}")

    def test_paths_in_code_spans_exist(self):
        for page in [README, *sorted((ROOT / "docs").glob("*.md"))]:
            for path in re.findall(r"`((?:src|launch|tests|bench|docs)/[\w./-]+)`", page.read_text(encoding="utf-8")):
                self.assertTrue((ROOT / path).exists(), f"{page.name} names {path}")

    def test_results_that_the_notes_name_exist(self):
        seen = 0
        for page in [NOTES, *NOTES_PAGES]:
            text = page.read_text(encoding="utf-8")
            for name in re.findall(r"`((?:nvidia|cpu)-[\w-]+/\d{4}-\d\d-\d\d-[\w-]+)`", text):
                seen += 1
                self.assertTrue((ROOT / f"bench/results/{name}.jsonl").exists(), f"{page.name} names {name}")
        self.assertGreater(seen, 30)

    def test_the_notes_have_one_index_and_say_first_what_ships(self):
        index = NOTES.read_text(encoding="utf-8")
        self.assertLessEqual(len(index.splitlines()), 120)
        self.assertGreater(len(NOTES_PAGES), 5)
        for page in NOTES_PAGES:
            self.assertIn(f"(notes/{page.name})", index)
            headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            self.assertEqual(headings[0], "What ships", page.name)

    def test_the_container_runs_the_readme_s_commands(self):
        commands = re.findall(r"^RUN (.*)$", (ROOT / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
        self.assertGreater(len(commands), 2)
        for command in [part.partition(" --")[0] for line in commands for part in line.split(" && ")]:
            self.assertIn(command, README.read_text(encoding="utf-8"))

    def test_the_readme_is_short(self):
        lines = README.read_text(encoding="utf-8").splitlines()
        self.assertLessEqual(len(lines), 180)
        generated = re.compile(r"^(\||!\[|All figures |The figures )")  # rows, pictures, and the sentence of the commits
        self.assertEqual([line for line in lines if len(line) > 120 and not generated.match(line)], [])


if __name__ == "__main__":
    unittest.main()
