# SPDX-License-Identifier: Apache-2.0
"""The first example of docs/python.md, and those of docs/compression.md and docs/scan.md, run and print what they say; names
that the page uses are there."""

import contextlib
import io
import pathlib
import re
import unittest

import ringattn

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "python.md").read_text(encoding="utf-8")


def run_example(page, number=0):
    """A block of Python of a page, and what it prints."""
    example = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[number]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(example, page, "exec"), {})
    return example, said.getvalue()


class Page(unittest.TestCase):
    def test_the_first_result(self):
        example, said = run_example("python.md")
        wanted = re.search(r'print\("(.*)"\)', example)[1]
        self.assertEqual(said, f"{wanted}\n")

    def test_compression(self):
        said = run_example("compression.md")[1].split()
        self.assertEqual(said[:3], ["int4_channel", "group", "32"])
        self.assertLess(2 * int(said[3]), int(said[-1]))
        self.assertIn("250 of 1000 tokens are left", run_example("compression.md", 1)[1])

    def test_scans(self):
        self.assertEqual(run_example("scan.md")[1], "the last token alone agrees with the whole layer\n")

    def test_every_function_of_the_tables_is_there(self):
        named = re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)
        self.assertGreater(len(named), 12)
        for name in [*named, *re.findall(r"`ringattn\.(\w+)`", PAGE)]:
            if name not in ("h", "ring_flash_attn", "testing", "transformers"):  # a header, and modules
                self.assertTrue(hasattr(ringattn, name), name)

    def test_all_that_is_exported_is_there(self):
        for name in ringattn.__all__:
            self.assertTrue(hasattr(ringattn, name), name)


if __name__ == "__main__":
    unittest.main()
