# SPDX-License-Identifier: Apache-2.0
"""Gradients of mla() in its expanded form: against PyTorch in fp64, with the bits of one rank on several, and in compiled
functions. The absorbed form and FP8 latents are refused."""

import functools
import importlib.util
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.torch_ops
import torch
from ringattn.testing import assert_same_bits
from torch import library

HEADS, HEAD_DIM, ROPE_DIM, HEAD_DIM_V, LATENT_DIM = 4, 16, 8, 24, 40


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(tokens, keys, dtype=torch.float32):
    return [
        normal(tokens, HEADS, HEAD_DIM + ROPE_DIM, dtype=dtype),
        normal(keys, LATENT_DIM, seed=2, dtype=dtype),
        normal(keys, ROPE_DIM, seed=3, dtype=dtype),
        normal(HEADS, HEAD_DIM, LATENT_DIM, seed=4, dtype=dtype) / 8,
        normal(HEADS, HEAD_DIM_V, LATENT_DIM, seed=5, dtype=dtype) / 8,
    ]


def reference(q, latent, k_rope, w_uk, w_uv):
    """One causal sequence in PyTorch, in the dtype of the arguments."""
    k = torch.cat([torch.einsum("td,hnd->thn", latent, w_uk), k_rope[:, None].expand(-1, HEADS, -1)], -1)
    v = torch.einsum("td,hnd->thn", latent, w_uv)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T


def gradients(function, inputs, douts):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, douts)


class MlaTraining(unittest.TestCase):
    def test_accuracy(self):
        for dtype, allowed in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
            inputs = tensors(70, 110, dtype)
            douts = normal(70, HEADS, HEAD_DIM_V, seed=6, dtype=dtype), normal(70, HEADS, seed=7)
            exact = gradients(reference, [x.double() for x in inputs], [x.double() for x in douts])
            for got, wanted, given in zip(gradients(ringattn.mla, inputs, douts), exact, inputs):
                self.assertEqual((got.dtype, got.shape), (given.dtype, given.shape))
                self.assertLess((got.double() - wanted).abs().max(), allowed * wanted.abs().max())

    def test_two_and_three_ranks(self):
        inputs = tensors(300, 300, torch.bfloat16)
        douts = normal(300, HEADS, HEAD_DIM_V, seed=6, dtype=torch.bfloat16), normal(300, HEADS, seed=7)
        begins = [0, 0, 1, 120, 300]

        def packed(q, latent, k_rope, w_uk, w_uv, sinks, **named):
            return ringattn.mla(q, latent, k_rope, w_uk, w_uv, cu_seqlens_q=begins, sinks=sinks, **named)

        lengths = [end - begin for begin, end in zip(begins, begins[1:])]
        sinks = normal(HEADS, seed=8)
        expected = gradients(packed, [*inputs, sinks], douts)
        for layout in (ringattn.packed(lengths, 2), ringattn.striped(lengths, 3, stripe=64)):

            def rank(world, layout=layout):
                mine = [ringattn.shard(x, layout, world.rank) for x in inputs[:3]]
                dealt = functools.partial(packed, world=world, layout=layout)
                return gradients(dealt, [*mine, *inputs[3:], sinks], [ringattn.shard(x, layout, world.rank) for x in douts])

            shards = ringattn.run_ranks(layout.world, rank)
            for at in range(3):
                assert_same_bits(ringattn.unshard([shard[at] for shard in shards], layout), expected[at])
            for shard in shards:
                for got, wanted in zip(shard[3:], expected[3:]):
                    assert_same_bits(got, wanted)

    def test_views_and_compiled_functions(self):
        q, latent, k_rope, w_uk, w_uv = tensors(60, 60)
        kv_b = torch.cat([w_uk, w_uv], 1).reshape(-1, LATENT_DIM)  # as models have them

        def layer(q, both, kv_b):
            latent, k_rope = both.split([LATENT_DIM, ROPE_DIM], -1)
            w_uk, w_uv = kv_b.view(HEADS, -1, LATENT_DIM).split([HEAD_DIM, HEAD_DIM_V], 1)
            return ringattn.mla(q * 2, latent, k_rope, w_uk, w_uv)

        inputs = q, torch.cat([latent, k_rope], -1), kv_b
        douts = normal(60, HEADS, HEAD_DIM_V, seed=6), normal(60, HEADS, seed=7)
        made = gradients(layer, inputs, douts)
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for got, wanted in zip(gradients(compiled, inputs, douts), made):
            assert_same_bits(got, wanted)
        exact = gradients(lambda q, *x: reference(q * 2, *x), (q, latent, k_rope, w_uk, w_uv), douts)
        rows = torch.cat(exact[1:3], -1), torch.cat(exact[3:], 1).reshape(kv_b.shape)
        for got, wanted in zip(made, (exact[0], *rows)):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

    def test_the_operator_keeps_pytorch_s_rules(self):
        leaves = [x.requires_grad_() for x in tensors(20, 20)]
        given = *leaves, None, None, normal(HEADS).requires_grad_(), "expanded", None, None, "causal", 0, 0, None, 3.0
        library.opcheck(torch.ops.ringattn.mla.default, (*given, None, None, None, 0, 0, 60.0, None))

    def test_what_has_no_gradient_is_refused(self):
        q, latent, k_rope, w_uk, w_uv = tensors(20, 20)
        leaf = q.clone().requires_grad_()
        for words, call in (
            ("absorbed form of MLA has no gradient", lambda: ringattn.mla(leaf, latent, k_rope, w_uk, w_uv, form="absorbed")),
            ("absorbed form of MLA has no gradient", lambda: ringattn.mla(leaf, latent, k_rope, w_uk)),
            ("memory budget", lambda: ringattn.mla(leaf, latent, k_rope, w_uk, w_uv, memory_budget=1 << 30)),
            ("Leave out= out", lambda: ringattn.mla(leaf, latent, k_rope, w_uk, w_uv, out=torch.empty(20, HEADS, HEAD_DIM_V))),
        ):  # fmt: skip
            with self.subTest(words), self.assertRaises(ringattn.UnsupportedError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        wide = normal(20, HEADS, 136, dtype=torch.bfloat16).requires_grad_()
        with self.assertRaises(ringattn.UnsupportedError) as caught:
            ringattn.mla(wide, torch.zeros(20, 148, dtype=torch.uint8), head_dim=16)
        self.assertIn("FP8 latents has no gradient", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
