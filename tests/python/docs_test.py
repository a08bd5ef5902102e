# SPDX-License-Identifier: Apache-2.0
"""The first example of docs/python.md runs and prints what it says; names that the page uses are there."""

import contextlib
import io
import pathlib
import re
import unittest

import ringattn

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/python.md").read_text(encoding="utf-8")


class Page(unittest.TestCase):
    def test_the_first_result(self):
        example = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(example, "docs/python.md", "exec"), {})
        wanted = re.search(r'print\("(.*)"\)', example)[1]
        self.assertEqual(said.getvalue(), f"{wanted}\n")

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
