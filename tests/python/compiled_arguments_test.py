# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile an argument means what it means without, or is refused as there: no graph drops one."""

import importlib.util
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import torch
from ringattn.testing import assert_same_bits


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scan_rows(tokens):
    """x, dt, A, B, C."""
    x, dt, A = normal(tokens, 2, 16), normal(tokens, 2, seed=2).abs(), -normal(2, seed=3).exp()
    return x, dt, A, normal(tokens, 1, 8, seed=4), normal(tokens, 1, 8, seed=5)


def selective_rows(tokens):
    """u, delta, A, B, C."""
    u, delta, A = normal(tokens, 24), normal(tokens, 24, seed=2).abs(), -normal(24, 16, seed=3).exp()
    return u, delta, A, normal(tokens, 16, seed=4), normal(tokens, 16, seed=5)


@torch.no_grad()
def compiled(function, *inputs, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", **options)(*inputs)


class Both(unittest.TestCase):
    """What a call does in eager mode and compiled."""

    def same(self, function, *inputs):
        """One graph has the eager bits."""
        for a, b in zip(compiled(function, *inputs, fullgraph=True), function(*inputs), strict=True):
            assert_same_bits(a, b)

    def refused(self, words, function, *inputs, kind=ringattn.UsageError):
        """Both refuse by one error, the compiled function whether the refusal is met while it is traced or when it runs."""
        for run in (function, lambda *given: compiled(function, *given)):
            with self.subTest(words):
                with self.assertRaises(kind) as caught:
                    run(*inputs)
                self.assertIn(words, str(caught.exception))


class Layouts(Both):
    def test_the_sequences_of_a_scan_are_those_of_its_layout(self):
        scan, selective, x, weight = scan_rows(100), selective_rows(100), normal(100, 16), normal(16, 4, seed=2)
        cu = torch.tensor([0, 30, 100])
        for layout in (ringattn.Layout([30, 70], [[(0, 0, 30), (1, 0, 70)]]), ringattn.super_segments([30, 70], 1)):
            for named in ({}, {"cu_seqlens": cu}):
                named = {"layout": layout} | named
                self.same(lambda *rows, named=named: ringattn.ssd(*rows, return_final_states=True, **named), *scan)
                self.same(lambda *rows, named=named: ringattn.selective_scan(*rows, return_last_state=True, **named), *selective)
                self.same(lambda *rows, named=named: ringattn.causal_conv1d(*rows, return_final_states=True, **named), x, weight)
        two = ringattn.ssd(*scan, layout=layout, return_final_states=True)[1]
        self.assertEqual(len(two), 2)

    def test_a_layout_of_another_job_is_refused(self):
        scan, selective, x, weight = scan_rows(100), selective_rows(100), normal(100, 16), normal(16, 4, seed=2)
        one, other = ringattn.super_segments([30, 70], 1), ringattn.super_segments([30, 70], 2)
        for words, named in (
            ("layout is 'zigzag'", {"layout": "zigzag"}),
            ("the layout is one of lengths [30, 70] over 2 ranks", {"layout": other}),
            ("the layout is one of lengths [30, 70] over 1 ranks", {"layout": one, "cu_seqlens": torch.tensor([0, 31, 100])}),
        ):
            self.refused(words, lambda *rows, named=named: ringattn.ssd(*rows, **named), *scan)
            self.refused(words, lambda *rows, named=named: ringattn.selective_scan(*rows, **named), *selective)
            self.refused(words, lambda *rows, named=named: ringattn.causal_conv1d(*rows, **named), x, weight)


if __name__ == "__main__":
    unittest.main()
