# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md, and those of docs/compression.md, docs/eviction.md, docs/gated-delta.md, docs/linear.md,
docs/linear-attention.md, docs/mla.md, docs/porting.md and docs/ssm.md, run and print what they say; names that the page uses
are there."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
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

    def test_the_adapter_for_transformers(self):
        if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
            self.skipTest("needs torch and transformers")
        example, said = run_example("python.md", 3)
        self.assertIn("substitute_hf_flash_attn(world, heads_k_stride=1)", example)
        self.assertEqual(said, "a sequence on two ranks, packed with another, has the logits that it has alone\n")

    def test_a_whole_model(self):
        if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
            self.skipTest("needs torch and transformers")
        self.assertEqual(run_example("python.md", 4)[1], "the logits of a prompt are those that it has alone, bit for bit\n")

    def test_training(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("needs torch")
        self.assertEqual(run_example("python.md", 1)[1], "three ranks have the gradients of one, bit for bit\n")
        self.assertEqual(run_example("gradients.md")[1], "three ranks have the gradients of one, bit for bit\n")
        self.assertEqual(run_example("python.md", 2)[1], "2 ranks have gradients of [1, 256, 4, 64]\n")

    def test_torchrun_s_example_without_torchrun(self):
        if importlib.util.find_spec("torch") is None:
            self.skipTest("needs torch")
        alone = {name: value for name, value in os.environ.items() if not name.startswith("LOCAL_")}
        done = subprocess.run([sys.executable, DOCS / "examples" / "torchrun.py"], env=alone, capture_output=True,
                              text=True,
                              check=False)  # fmt: skip
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"^error: there are no ranks \(torchrun starts them\)\. Run `torchrun .*`\.\n$")

    def test_compression(self):
        said = run_example("compression.md")[1].split()
        self.assertEqual(said[:3], ["int4_channel", "group", "32"])
        self.assertLess(2 * int(said[3]), int(said[-1]))
        self.assertIn("250 of 1000 tokens are left", run_example("eviction.md")[1])

    def test_batched_gemm(self):
        self.assertEqual(run_example("mla.md")[1], "multiplying by the matrices yourself gives the same bytes\n")

    def test_linear(self):
        if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
            self.skipTest("needs torch and transformers")
        said = "three ranks have the bits of one, and a row alone those that it has in a batch\n"
        self.assertEqual(run_example("linear.md", 1)[1], said)
        said = run_example("linear.md", 2)[1]
        self.assertRegex(said, r"model\.layers\.1\.mlp\.down_proj +int4 .*%")
        self.assertRegex(said, r'model\.layers\.0\.mlp\.up_proj +kept .* ignore has "re:\.\*layers\.0\.mlp"')
        self.assertRegex(said, r"20 tokens, [\d,]+ bytes of layers are [\d,]+\n$")
        said = "trained weights have the same bits on 1, 2, 3 and 8 ranks\n"
        self.assertEqual(run_example("linear.md")[1], said)

    def test_ssm(self):
        self.assertEqual(run_example("ssm.md")[1], "the decoded token agrees with the prefill\n")

    def test_layers_with_states(self):
        self.assertEqual(run_example("linear-attention.md")[1], "the decoded token agrees with the prefill\n")
        self.assertEqual(run_example("gated-delta.md")[1], "")
        example, said = run_example("gated-delta.md", 1)
        self.assertIn(f'print("{said.strip()}")', example)

    def test_calls_of_other_libraries(self):
        said = ["flash_attn's calls and ringattn's own have the same bits\n",
                "SDPA's alignment, and that of the last tokens, are both there\n",
                "sequences of [21, 48] tokens, out (2, 4, 64), lse (2, 4)\n",
                "y (2, 100, 4, 16), a token (2, 4, 16), states (2, 4, 16, 8)\n"]  # fmt: skip
        for number, words in enumerate(said):
            if number < 2 and importlib.util.find_spec("torch") is None:
                continue
            self.assertEqual(run_example("porting.md", number)[1], words)

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
