# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention() and varlen(): against fp64 and finite differences, with the bits of one rank on several, in compiled
and checkpointed functions, and by the names of other libraries. What has no gradient is refused."""

import functools
import importlib.util
import mmap
import subprocess
import sys
import unittest
import warnings
from unittest import mock

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.flash_attn
import ringattn.ring_flash_attn as names
import ringattn.torch_ops
import torch
from ringattn._attention_backward import AttentionBackward
from ringattn.testing import assert_same_bits
from torch import library
from torch.autograd import forward_ad
from torch.utils import checkpoint

MAP_NORESERVE = 0x4000  # of Linux; mmap has it from Python 3.13 on
SETTINGS = {"mask": "causal", "softmax_scale": None, "softcap": 0.0, "q_offset": None}


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def visible(queries, keys, mask, offset):
    left, right = {"causal": (-1, 0), "full": (-1, -1)}.get(mask, mask)
    place = torch.arange(queries)[:, None] + offset - torch.arange(keys)
    return (place <= left if left >= 0 else True) & (place >= -right if right >= 0 else torch.ones_like(place) > 0)


def reference(q, k, v, sinks=None, *, mask, softmax_scale, softcap, q_offset):
    """One sequence in PyTorch, in the dtype of the arguments."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    offset = k.shape[0] - q.shape[0] if q_offset is None else q_offset
    seen = visible(q.shape[0], k.shape[0], mask, offset)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -1e4)
    logits = [] if sinks is None else [sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[0], 1)]
    lse = torch.cat([scores, *logits], -1).logsumexp(-1, keepdim=True)
    out = torch.einsum("hqk,khd->qhd", (scores - lse).exp().masked_fill(~seen, 0), v)
    if sinks is None:
        lse = lse.masked_fill(~seen.any(-1)[:, None], -torch.inf)
    return out, lse[..., 0].T


def gradients(function, inputs, douts):
    """The results of a function, and its gradients of all inputs, which become leaves of their own."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*leaves)
    kept = [(out, dout) for out, dout in zip(outs, douts) if dout is not None]
    return outs, torch.autograd.grad([out for out, _ in kept], leaves, [dout for _, dout in kept])


def bound(made, exact, cancelled):
    """What FlashAttention's tests allow: twice the error of the same computation in this precision, and of a rounding. cancelled:
    allowed where the exact gradients cancel each other."""
    rounding = ((exact + 0.3).to(made.dtype) - 0.3).to(made.dtype)
    return 2 * (made.double() - exact).abs().max() + 2 * (rounding.double() - exact).abs().max() + cancelled


def norm(*rows):
    """The product of the tensors' largest norms of a row, times 2^-20."""
    return functools.reduce(lambda product, x: product * x.double().norm(dim=-1).max().item(), rows, 2**-20)


class Accuracy(unittest.TestCase):
    def compare(self, dtype, q, k, v, sinks=None, function=ringattn.attention, dlse=None, **settings):
        inputs = [x for x in (q, k, v, sinks) if x is not None]
        settings = SETTINGS | settings
        dout = normal(*q.shape[:2], v.shape[-1], seed=9, dtype=dtype)
        call = functools.partial(self.with_sinks, function, settings, sinks is not None)
        plain = functools.partial(self.with_sinks, reference, settings, sinks is not None)
        _, exact = gradients(plain, [x.double() for x in inputs], [dout.double(), None if dlse is None else dlse.double()])
        _, same = gradients(plain, inputs, [dout, None if dlse is None else dlse.to(dtype)])
        _, made = gradients(call, inputs, [dout, dlse])
        for name, got, near, wanted, given in zip(("dq", "dk", "dv", "dsinks"), made, same, exact, inputs):
            self.assertEqual((got.dtype, got.shape), (given.dtype, given.shape), name)
            error = (got.double() - wanted).abs().max()
            scale = settings["softmax_scale"] or q.shape[-1] ** -0.5
            self.assertLessEqual(error, bound(near, wanted, scale * max(norm(dout, v, k), norm(dout, v, q))), name)

    @staticmethod
    def with_sinks(function, settings, has_sinks, q, k, v, *sinks):
        return function(q, k, v, **({"sinks": sinks[0]} if has_sinks else {}), **settings)

    def test_types_heads_and_masks(self):
        fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
        for dtype, heads, kv_heads, dim_v, mask in (
            (fp32, 4, 4, 64, "causal"), (fp32, 6, 2, 64, "full"), (fp32, 3, 1, 32, (40, 0)), (fp32, 6, 2, 64, (-1, 5)),
            (bf16, 6, 2, 64, "causal"), (bf16, 2, 2, 64, (30, 20)), (fp16, 6, 2, 64, "causal"), (fp16, 3, 1, 32, "full"),
        ):  # fmt: skip
            with self.subTest(dtype=dtype, heads=heads, mask=mask):
                q = normal(90, heads, 64, dtype=dtype)
                k = normal(90, kv_heads, 64, seed=2, dtype=dtype)
                self.compare(dtype, q, k, normal(90, kv_heads, dim_v, seed=3, dtype=dtype), mask=mask)

    def test_scales_softcaps_sinks_offsets_and_lse(self):
        sinks, dlse = normal(4, seed=4), normal(70, 4, seed=5)
        every = {"softcap": 3.0, "softmax_scale": 0.3, "sinks": sinks, "dlse": dlse, "q_offset": 20}
        for dtype, words in ((torch.float32, {"softcap": 5.0}), (torch.float32, {"softmax_scale": 0.3}),
                             (torch.float32, {"sinks": sinks}), (torch.float32, {"dlse": dlse}),
                             (torch.float32, {"q_offset": -30, "sinks": sinks}), (torch.float32, {"mask": (30, 5)}),
                             (torch.float32, every), (torch.bfloat16, every)):  # fmt: skip
            rows = normal(70, 4, 64, dtype=dtype), *(normal(110, 2, 64, seed=seed, dtype=dtype) for seed in (2, 3))
            with self.subTest(dtype=dtype, words=[*words]):
                self.compare(dtype, *rows, **words)

    def test_one_query_and_one_key(self):
        q, k, v = (normal(1, heads, 64, seed=heads) for heads in (4, 2, 1))
        v = v.expand(1, 2, 64)
        for words in ({}, {"sinks": normal(4)}, {"softcap": 5.0, "dlse": normal(1, 4, seed=5)}):
            self.compare(torch.float32, q, k, v, **words)

    def test_queries_without_keys(self):
        q, k, v = normal(60, 2, 64), normal(20, 2, 64, seed=2), normal(20, 2, 64, seed=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.compare(torch.float32, q, k, v)
            _, (dq, dk, dv) = gradients(lambda *x: ringattn.attention(*x, q_offset=-100), (q, k, v), (torch.ones(60, 2, 64),))
        self.assertFalse(dq.any() or dk.any() or dv.any())

    def test_packed_sequences(self):
        q_lengths, k_lengths = [0, 1, 70, 64, 0], [0, 90, 70, 1, 30]
        q, k, v = normal(135, 4, 64), normal(191, 2, 64, seed=2), normal(191, 2, 64, seed=3)
        begins = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (q_lengths, k_lengths)]
        douts = normal(135, 4, 64, seed=4), normal(135, 4, seed=5)

        def packed(q, k, v, sinks):
            return ringattn.varlen(q, k, v, *begins, mask="full", sinks=sinks)

        def apart(q, k, v, sinks):
            rows = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths))
            made = [reference(*row, sinks, **SETTINGS | {"mask": "full"}) for row in rows]
            return [torch.cat(parts) for parts in zip(*made)]

        inputs = q, k, v, normal(4, seed=6)
        _, made = gradients(packed, inputs, douts)
        _, exact = gradients(apart, [x.double() for x in inputs], [x.double() for x in douts])
        for got, near, wanted in zip(made, gradients(apart, inputs, douts)[1], exact):
            self.assertLessEqual((got.double() - wanted).abs().max(), bound(near, wanted, norm(douts[0], v, k) / 8))
        self.assertFalse(made[1][-30:].any(), "keys that no query sees")

    def test_finite_differences(self):
        q, k, v, sinks = normal(5, 2, 8), normal(7, 1, 8, seed=2), normal(7, 1, 8, seed=3), normal(2, seed=4)
        douts = normal(5, 2, 8, seed=5), normal(5, 2, seed=6)

        def loss(*inputs):
            out, lse = ringattn.attention(*inputs[:3], sinks=inputs[3], softcap=4.0)
            return (out * douts[0]).double().sum() + (lse * douts[1]).double().sum()

        inputs = [q, k, v, sinks]
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss(*leaves).backward()
        for place, leaf in enumerate(leaves):
            direction = normal(*leaf.shape, seed=7 + place)
            steps = [[x + side * direction if at == place else x for at, x in enumerate(inputs)] for side in (0.01, -0.01)]
            with torch.no_grad():
                slope = (loss(*steps[0]) - loss(*steps[1])) / 0.02
            torch.testing.assert_close((leaf.grad * direction).double().sum(), slope, atol=3e-3, rtol=1e-3)


class Autograd(unittest.TestCase):
    def setUp(self):
        self.rows = normal(2, 60, 4, 64), normal(2, 60, 2, 64, seed=2), normal(2, 60, 2, 64, seed=3)

    def test_gradients_of_any_strides(self):
        dout = normal(2, 60, 4, 64, seed=4)
        call = functools.partial(ringattn.attention, mask="full")
        _, made = gradients(call, self.rows, (dout,))
        wide = torch.zeros(2, 60, 4, 128)
        wide[..., 64:] = dout
        heads_first = dout.transpose(1, 2).contiguous().transpose(1, 2)
        spread = torch.zeros(2, 60, 4, 64, 2)
        spread[..., 0] = dout
        for strided in (wide[..., 64:], heads_first, spread[..., 0]):
            for got, expected in zip(gradients(call, self.rows, (strided,))[1], made):
                assert_same_bits(got, expected)
        ones = gradients(call, self.rows, (torch.ones(2, 60, 4, 64),))[1]
        leaves = [x.clone().requires_grad_() for x in self.rows]
        call(*leaves)[0].sum().backward()
        for leaf, expected in zip(leaves, ones):
            assert_same_bits(leaf.grad, expected)

    def test_only_what_is_asked_for(self):
        q, k, v = self.rows
        whole = gradients(ringattn.attention, self.rows, (torch.ones(2, 60, 4, 64),))[1]
        for place in range(3):
            inputs = [x.clone().requires_grad_(at == place) for at, x in enumerate(self.rows)]
            out, lse = ringattn.attention(*inputs)
            self.assertTrue(out.requires_grad and lse.requires_grad)
            out.sum().backward()
            for at, (leaf, expected) in enumerate(zip(inputs, whole)):
                self.assertEqual(leaf.grad is None, at != place)
                if at == place:
                    assert_same_bits(leaf.grad, expected)
        leaf = q.clone().requires_grad_()
        ringattn.attention(leaf, k, v)[1].sum().backward()
        self.assertTrue(leaf.grad.any())
        with torch.no_grad():
            self.assertFalse(ringattn.attention(leaf, k, v)[0].requires_grad)
        with torch.inference_mode():
            ringattn.attention(leaf, k, v)

    def test_what_autograd_records_has_the_bits_of_what_it_does_not(self):
        leaf = self.rows[0].clone().requires_grad_()
        for got, expected in zip(ringattn.attention(leaf, *self.rows[1:]), ringattn.attention(*self.rows)):
            assert_same_bits(got.detach(), expected)

    def test_a_backward_pass_is_prepared_once(self):
        made = []
        with mock.patch.object(AttentionBackward, "__init__", autospec=True,
                               side_effect=lambda *given, init=AttentionBackward.__init__: (made.append(1), init(*given))[1]):
            for _ in range(2):
                leaf = normal(33, 2, 64).requires_grad_()
                ringattn.attention(leaf, leaf, leaf)[0].sum().backward()
                ringattn.varlen(leaf, leaf, leaf, [0, 33])[0].sum().backward()
        self.assertEqual(len(made), 1)

    def test_operators_keep_pytorch_s_rules(self):
        q, k = normal(30, 4, 64).requires_grad_(), normal(30, 2, 64, seed=2).requires_grad_()
        sinks, cu = normal(4).requires_grad_(), torch.tensor([0, 10, 30])
        plain = "", 0, "", 0
        for op, given in (
            ("attention", (q, [k], [k], *plain, sinks, "causal", 0, 0, None, 3.0, None, None, None, None, None, 0, 0, 60.0)),
            ("varlen", (q, [k], [k], *plain, cu, None, None, "window", 9, 3, 0.2, 0.0, None, None, None, None, 0, 0, 60.0)),
        ):
            library.opcheck(getattr(torch.ops.ringattn, op).default, given)

    def test_compiled_it_is_one_graph(self):
        sinks, cu = normal(4, seed=5), torch.tensor([0, 50, 120])
        flat = [x.flatten(0, 1) for x in self.rows]
        for function, inputs in (
            (lambda q, k, v: ringattn.attention(q * 2, k, v, mask=(30, 3)), self.rows),
            (lambda q, k, v, sinks: (ringattn.attention(q, k, v, sinks=sinks, softcap=9.0)[0] + 1,), (*self.rows, sinks)),
            (lambda q, k, v: ringattn.varlen(q, k, v, cu, mask="full"), flat),
            (lambda q, k, v: (names.zigzag_ring_flash_attn_func(q, k, v, causal=True) * 2,), self.rows),
        ):  # fmt: skip
            torch.compiler.reset()
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            outs, expected = gradients(function, inputs, [torch.ones(2, 60, 4, 64).reshape(inputs[0].shape)])
            got_outs, got = gradients(compiled, inputs, [torch.ones(2, 60, 4, 64).reshape(inputs[0].shape)])
            for a, b in (*zip(got_outs, outs), *zip(got, expected)):
                assert_same_bits(a.detach(), b.detach())

    def test_other_lengths_need_no_other_graph(self):
        graphs = []

        def keep(graph, _):
            graphs.append(graph)
            return graph

        torch.compiler.reset()
        function = torch.compile(lambda q: ringattn.attention(q, q, q), fullgraph=True, dynamic=True, backend=keep)
        for tokens in (50, 70, 33):
            q = normal(tokens, 2, 64)
            _, (got,) = gradients(function, (q,), (torch.ones(tokens, 2, 64),))
            assert_same_bits(got, gradients(lambda q: ringattn.attention(q, q, q), (q,), (torch.ones(tokens, 2, 64),))[1][0])
        self.assertEqual(len(graphs), 1)

    def test_checkpoints(self):
        calls = []
        real = ringattn.Attention._do

        def counted(*given, **named):
            calls.append(1)
            return real(*given, **named)

        def layer(q, k, v):
            return ringattn.attention(q * 1, k * 1, v * 1)

        keep = functools.partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.ringattn.attention.default])
        douts = normal(2, 60, 4, 64, seed=4), normal(2, 60, 4, seed=5)
        with mock.patch.object(ringattn._job.Call, "__call__", lambda *_: None), mock.patch.object(
                ringattn.Attention, "_do", counted):  # fmt: skip
            expected = gradients(layer, self.rows, douts)[1]
            for runs, named in ((2, {}), (1, {"context_fn": keep})):
                calls.clear()

                def saved(*inputs, named=named):
                    return checkpoint.checkpoint(layer, *inputs, use_reentrant=False, **named)

                for got, wanted in zip(gradients(saved, self.rows, douts)[1], expected):
                    assert_same_bits(got, wanted)
                self.assertEqual(len(calls), runs)


class Ranks(unittest.TestCase):
    """Each rank has the gradients of its rows, with the bits of one rank."""

    def compare(self, function, rows, sinks, layout, key_layout, douts):
        _, expected = gradients(function, (*rows, sinks), douts)

        def rank(world):
            deals = layout, key_layout, key_layout
            mine = [ringattn.shard(x, deal, world.rank) for x, deal in zip(rows, deals)]
            dealt = functools.partial(function, world=world, layout=layout, key_layout=key_layout)
            return gradients(dealt, (*mine, sinks), [ringattn.shard(x, layout, world.rank) for x in douts])[1]

        shards = ringattn.run_ranks(layout.world, rank)
        for at, deal in enumerate((layout, key_layout, key_layout)):
            assert_same_bits(ringattn.unshard([shard[at] for shard in shards], deal), expected[at])
        for shard in shards:
            assert_same_bits(shard[3], expected[3])

    def test_two_and_three_ranks(self):
        rows = [normal(300, heads, 64, seed=heads + at, dtype=torch.bfloat16) for at, heads in enumerate((4, 2, 2))]
        douts = normal(300, 4, 64, seed=8, dtype=torch.bfloat16), normal(300, 4, seed=9)

        def one(q, k, v, sinks, **named):
            return ringattn.attention(q, k, v, sinks=sinks, mask=(200, 0), **named)

        for layout in (ringattn.zigzag([300], 2), ringattn.contiguous([300], 3), ringattn.striped([300], 3, stripe=64)):
            self.compare(one, rows, normal(4), layout, layout, douts)
        self.compare(one, rows, normal(4), ringattn.zigzag([300], 3), ringattn.contiguous([300], 3), douts)

        def packed(q, k, v, sinks, **named):
            return ringattn.varlen(q, k, v, [0, 0, 1, 120, 300], sinks=sinks, **named)

        layout = ringattn.packed([0, 1, 119, 180], 3)
        self.compare(packed, rows, normal(4), layout, layout, douts)

    def test_ring_flash_attn_s_functions(self):
        rows = [normal(2, 60, 2, 64, seed=seed) for seed in range(3)]
        douts = normal(2, 60, 2, 64, seed=4), normal(2, 2, 60, seed=5)
        packed_rows = [x.flatten(0, 1) for x in rows]
        packed_douts = douts[0].flatten(0, 1), normal(2, 120, seed=6)
        cu = torch.tensor([0, 40, 120], dtype=torch.int32)
        named = {"causal": True, "return_attn_probs": True, "deterministic": True}

        def llama3(q, k, v, group):
            rank = (0, 1) if group is None else (group.rank, group.size)
            made = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, *rank)
            return names.llama3_flash_attn_varlen_func(q, k, v, *made[:4], 1, made[4], group=group, **named)

        def varlen(q, k, v, group):
            local = cu if group is None else cu // group.size
            return names.zigzag_ring_flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), local, 80, group=group, **named)

        def batched(function):
            return lambda q, k, v, group: function(q, k, v, group=group, **named)

        def fused(q, k, v, group):
            return names.zigzag_ring_flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), group=group, **named)

        two = [60, 60]
        for function, layout in ((batched(names.ring_flash_attn_func), ringattn.contiguous(two, 2)),
                                 (batched(names.zigzag_ring_flash_attn_func), ringattn.zigzag(two, 2)),
                                 (fused, ringattn.zigzag(two, 2)), (llama3, ringattn.packed([40, 80], 2)),
                                 (varlen, ringattn.zigzag([40, 80], 2))):  # fmt: skip
            flat = function in (llama3, varlen)
            inputs, (dout, dlse) = (packed_rows, packed_douts) if flat else (rows, douts)
            (out, lse, _), expected = gradients(functools.partial(function, group=None), inputs, (dout, dlse))
            self.assertEqual(lse.shape, dlse.shape)

            def rank(world, function=function, layout=layout, inputs=inputs, dout=dout, dlse=dlse):
                def shard(x):
                    mine = ringattn.shard(x if x.ndim == 3 else x.flatten(0, 1), layout, world.rank)
                    return mine if x.ndim == 3 else mine.unflatten(0, (2, -1))

                stats = (dlse.T if dlse.ndim == 2 else dlse.transpose(1, 2))[..., None]
                dlse = shard(stats)[..., 0].transpose(-1, -2)
                call = functools.partial(function, group=world)
                return [x if x.ndim == 3 else x.flatten(0, 1)
                        for x in gradients(call, [shard(x) for x in inputs], (shard(dout), dlse))[1]]  # fmt: skip

            shards = ringattn.run_ranks(2, rank)
            for at, wanted in enumerate(expected):
                joined = ringattn.unshard([shard[at] for shard in shards], layout)
                assert_same_bits(joined, wanted if wanted.ndim == 3 else wanted.flatten(0, 1))

    def test_flash_attn_s_functions(self):
        q, k, v = (normal(2, 60, 2, 64, seed=seed) for seed in range(3))
        dout = normal(2, 60, 2, 64, seed=4)
        _, expected = gradients(ringattn.attention, (q, k, v), (dout,))
        for call, turned in (
            (lambda q, k, v: (ringattn.flash_attn.flash_attn_func(q, k, v, causal=True),), False),
            (lambda q, k, v: (ringattn.scaled_dot_product_attention(q, k, v, is_causal=True),), True),
        ):
            given = [x.transpose(1, 2) if turned else x for x in (q, k, v, dout)]
            for got, wanted in zip(gradients(call, given[:3], given[3:])[1], expected):
                assert_same_bits((got.transpose(1, 2) if turned else got).contiguous(), wanted)


class KnownBugs(unittest.TestCase):
    """Kinds of bugs that backward passes of other libraries have had. More of them: gradients of padding and of rows between
    sequences (poisoned memory in the kernels' tests), windows whose backward is not bounded (BackwardTables)."""

    def test_keys_of_an_earlier_step(self):
        def step(number, world=None, layout=None):
            rows = [normal(130, heads, 64, seed=10 * number + heads + at) for at, heads in enumerate((4, 2, 2))]
            dout = normal(130, 4, 64, seed=number)
            shard = (lambda x: x) if world is None else lambda x: ringattn.shard(x, layout, world.rank)
            call = functools.partial(ringattn.attention, world=world, layout=layout)
            return gradients(call, [shard(x) for x in rows], (shard(dout),))[1]

        layout = ringattn.striped([130], 3, stripe=16)
        steps = ringattn.run_ranks(3, lambda world: [step(number, world, layout) for number in range(3)])
        for number in range(3):
            for at, expected in enumerate(step(number)):
                assert_same_bits(ringattn.unshard([rank[number][at] for rank in steps], layout), expected)

    def test_no_queries(self):
        q, k, v = normal(0, 4, 64), normal(70, 2, 64, seed=2), normal(70, 2, 64, seed=3)
        dout = torch.zeros(0, 4, 64)
        for call in (lambda *x: ringattn.attention(*x, lengths=(0, 70)), lambda *x: ringattn.varlen(*x, [0, 0, 0], [0, 30, 70])):
            for _ in range(2):  # memory that was used before
                dq, dk, dv = gradients(call, (q, k, v), (dout,))[1]
                self.assertEqual(dq.shape, q.shape)
                self.assertFalse(dk.any() or dv.any())

    def test_padded_tails(self):
        leaf = normal(40, 2, 64).requires_grad_()
        with self.assertRaisesRegex(ringattn.UsageError, "cu_seqlens_q ends at 30, and q has 40 tokens"):
            ringattn.varlen(leaf, leaf, leaf, [0, 30])

    def test_strides_beyond_32_bits(self):
        stride = 2**32 + 64  # elements between two tokens
        rows = [normal(2, heads, 64, seed=at, dtype=torch.bfloat16) for at, heads in enumerate((2, 1, 1, 2))]
        sizes = [x[0].numel() for x in rows]

        def far(whole):
            places = [sum(sizes[:at]) for at in range(4)]
            views = [whole.as_strided(x.shape, (stride, 64, 1), place) for x, place in zip(rows, places)]
            for view, x in zip(views, rows):
                view.copy_(x)
            return views

        def run(q, k, v, dout):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(ringattn.attention(*leaves)[0], leaves, dout)

        # Pages of the map that nobody touches take no memory.
        try:
            memory = mmap.mmap(-1, 2 * (stride + sum(sizes)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except OSError as error:
            self.skipTest(f"needs 8 GiB of addresses: {error}")
        for got, expected in zip(run(*far(torch.frombuffer(memory, dtype=torch.bfloat16))), run(*rows)):
            assert_same_bits(got, expected)
        if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 3 * stride:
            return
        whole = torch.empty(stride + sum(sizes), dtype=torch.bfloat16, device="cuda")
        for got, expected in zip(run(*far(whole)), run(*(x.cuda() for x in rows))):
            assert_same_bits(got, expected)


class Costs(unittest.TestCase):
    def test_eager_gradients_do_not_import_the_compiler(self):
        code = """if True:
            import sys, torch, ringattn
            x = torch.ones(4, 1, 16, requires_grad=True)
            ringattn.attention(x, x, x)[0].sum().backward()
            assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules"""
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_queries_without_keys_are_warned_of_once(self):
        q, k = normal(40, 2, 64).requires_grad_(), normal(20, 2, 64)
        world = ringattn.self_world()
        with warnings.catch_warnings(record=True) as met:
            warnings.simplefilter("always")
            for _ in range(2):
                ringattn.attention(q, k, k, world=world)[0].sum().backward()
        self.assertEqual([warning.filename for warning in met], [__file__])


class Refusals(unittest.TestCase):
    def refused(self, problem, call, kind=ringattn.UnsupportedError):
        with self.subTest(problem), self.assertRaises(kind) as caught:
            call()
        self.assertRegex(str(caught.exception), rf"^{problem} \(.+\)\. [A-Z].*\.$")

    def test_transforms_of_torch_func_and_tangents(self):
        x = normal(40, 2, 64)

        def loss(q):
            return ringattn.attention(q, x, x)[0].sum()

        def dual(q, k):
            with forward_ad.dual_level():
                return ringattn.attention(q, forward_ad.make_dual(k, k), k)

        for call in (lambda: torch.func.grad(loss)(x), lambda: torch.func.jvp(loss, (x,), (x,)),
                     lambda: torch.func.vmap(loss)(x[None]), lambda: torch.func.vjp(loss, x)):  # fmt: skip
            self.refused("ringattn is called inside a transform of torch.func", call)
        for q in (x, x.clone().requires_grad_()):
            self.refused("an array has a tangent", functools.partial(dual, q, x))

    def test_what_has_no_gradient(self):
        q, k = normal(40, 2, 64, dtype=torch.bfloat16), normal(40, 2, 64, seed=2, dtype=torch.bfloat16)
        leaf = q.clone().requires_grad_()
        small, _ = ringattn.compress(k, k, "int8")
        kept = ringattn.evict(k[None], k[None], "knorm")
        lengths, cache = torch.tensor([20, 20], dtype=torch.int32), k.reshape(2, 20, 2, 64)
        cases = (
            ("q requires a gradient", lambda: ringattn.attention(leaf, small, small)),
            ("q requires a gradient", lambda: ringattn.varlen(leaf, small, k, [0, 40])),
            ("q requires a gradient", lambda: ringattn.attention(leaf[None], kept.k, kept.v, k_positions=kept.k_positions,
                                                                 k_lengths=kept.k_lengths)),
            ("v requires a gradient", lambda: ringattn.attention(q, k, leaf, out=torch.empty_like(q))),
            ("q requires a gradient", lambda: ringattn.decode(leaf[:2], cache, cache, lengths)),
        )  # fmt: skip
        for problem, call in cases:
            self.refused(problem, call)
            with torch.no_grad():
                call()
        plain = "", 0, small.format, 64
        with self.assertRaises(ringattn.UnsupportedError):
            torch.ops.ringattn.attention(leaf, [k], small.parts, *plain, None, "causal", 0, 0, None, 0.0, None, None, None, None,
                                         None, 0, 0, 60.0)  # fmt: skip

    def test_stripes(self):
        x = normal(1, 40, 2, 64).requires_grad_()
        self.refused("ringattn has no stripe_flash_attn functions", lambda: names.stripe_flash_attn_func(x, x, x, causal=True))

    def test_second_derivatives(self):
        leaf = normal(40, 2, 64).requires_grad_()
        out, _ = ringattn.attention(leaf, leaf, leaf)
        with self.assertRaises(ringattn.UnsupportedError) as caught:
            torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        self.assertIn("(gradients have no gradients, which create_graph=True asks for)", str(caught.exception))

    def test_ranks_that_do_not_agree(self):
        def some(world):
            q = normal(20, 2, 64).requires_grad_(world.rank == 1)
            ringattn.attention(q, q.detach(), q.detach(), world=world, layout="zigzag")

        def turned(world):
            outs = []
            for tokens in (20, 40):
                leaf = normal(tokens, 2, 64).requires_grad_()
                outs.append(ringattn.attention(leaf, leaf, leaf, world=world, layout="zigzag")[0].sum())
            for out in outs if world.rank == 0 else outs[::-1]:
                out.backward()

        self.refused("rank 1 and rank 0 differ in op", lambda: ringattn.run_ranks(2, some))
        self.refused("rank 1 and rank 0 run different jobs", lambda: ringattn.run_ranks(2, turned), ringattn.UsageError)

    def test_a_job_without_a_backward_pass_is_refused_before_it_runs(self):
        leaf = normal(40, 2, 64).requires_grad_()
        with self.assertRaises(ringattn.OutOfMemory):
            ringattn.attention(leaf, leaf, leaf, memory_budget=100)


if __name__ == "__main__":
    unittest.main()
