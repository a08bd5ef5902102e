# SPDX-License-Identifier: Apache-2.0
"""ring_flash_attn's names over ringattn: results of the whole sequence, and refusals."""

import importlib.util
import inspect
import itertools
import pathlib
import re
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import numpy as np
import ringattn
import ringattn.ring_flash_attn as names
import torch
from ringattn.testing import assert_same_bits

RANKS = 2


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def on_ranks(layout, function, *tensors):
    """function(world, *this rank's rows) on all ranks, and what it returns of the first tensor's form together again."""

    def rank(world):
        return function(world, *(ringattn.shard(x, layout, world.rank) for x in tensors))

    return ringattn.run_ranks(layout.world, rank)


class Signatures(unittest.TestCase):
    """The arguments of ring_flash_attn's functions, in their order."""

    rest = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "alibi_slopes": None,
            "deterministic": False, "return_attn_probs": False, "group": None}  # fmt: skip
    rows = {"": ("q", "k", "v"), "kvpacked_": ("q", "kv"), "qkvpacked_": ("qkv",)}
    lengths = {"": (), "varlen_": ("cu_seqlens", "max_seqlen")}
    llama3 = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice")

    def expect(self, name, *words, rest=()):
        given = inspect.signature(getattr(names, name)).parameters
        self.assertEqual([*given], [*words, *rest], name)
        self.assertEqual({word: given[word].default for word in rest}, dict(rest), name)
        for word, parameter in given.items():
            self.assertIs(parameter.kind, inspect.Parameter.POSITIONAL_OR_KEYWORD, name)
            self.assertTrue(word in rest or parameter.default is inspect.Parameter.empty, name)

    def test_they_are_upstream_s(self):
        for form, rows in self.rows.items():
            for (kind, lengths), deal in itertools.product(self.lengths.items(), ("ring", "zigzag_ring")):
                self.expect(f"{deal}_flash_attn_{kind}{form}func", *rows, *lengths, rest=self.rest)
            self.expect(f"llama3_flash_attn_varlen_{form}func", *rows, *self.llama3, rest=self.rest)
        self.expect("llama3_flash_attn_prepare_cu_seqlens", "cu_seqlens", "causal", "rank", "world_size")
        self.expect("substitute_hf_flash_attn", "process_group", "heads_k_stride")
        self.expect("update_ring_flash_attn_params", "cu_seqlens", "process_group")

    def test_each_place_means_its_name(self):
        """All arguments by their places, with values of which each changes the result or is refused."""
        world = ringattn.self_world()
        q, k, v = (normal(40, 2, 64, seed=i) for i in range(3))
        cu = torch.tensor([0, 10, 40], dtype=torch.int32)
        made = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 1)
        rest = 0.0, 0.2, True, (7, 7), None, True, True, world
        out, lse = ringattn.varlen(q, k, v, cu, mask=(7, 0), softmax_scale=0.2)
        whole, whole_lse = ringattn.attention(q, k, v, mask=(7, 0), softmax_scale=0.2)
        fused = {"": (q, k, v), "kvpacked_": (q, torch.stack([k, v], 1)), "qkvpacked_": (torch.stack([q, k, v], 1),)}
        for form, rows in fused.items():
            for kind, deal in itertools.product(self.lengths, ("ring", "zigzag_ring")):
                given = (*rows, cu, 30) if kind else tuple(x[None] for x in rows)
                self.check(f"{deal}_flash_attn_{kind}{form}func", given, rest, (out, lse.T) if kind else (whole, whole_lse.T))
            self.check(f"llama3_flash_attn_varlen_{form}func", (*rows, *made[:4], 1, made[4]), rest, (out, lse.T))

    def check(self, name, given, rest, expected):
        function = getattr(names, name)
        *results, nothing = function(*given, *rest)
        self.assertIsNone(nothing)
        for result, right in zip(results, expected, strict=True):
            assert_same_bits(result.reshape(right.shape), right.contiguous())
        for place, (word, value) in {0: ("dropout_p", 0.1), 4: ("alibi_slopes", torch.ones(2))}.items():
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                function(*given, *rest[:place], value, *rest[place + 1 :])
            self.assertIn(word, str(caught.exception), name)
        with self.assertRaises(TypeError):
            function(*given, *rest, None)


class RingFlashAttn(unittest.TestCase):
    def test_batches(self):
        q, k, v = normal(2, 120, 4, 64), normal(2, 120, 2, 64, seed=2), normal(2, 120, 2, 64, seed=3)
        for deal, function in (
            (ringattn.contiguous, names.ring_flash_attn_func),
            (ringattn.zigzag, names.zigzag_ring_flash_attn_func),
        ):
            layout = deal([120, 120], RANKS)
            for causal, window, mask in ((True, (-1, -1), "causal"), (False, (-1, -1), "full"), (True, (30, 30), (30, 0)),
                                         (False, (9, 4), (9, 4))):  # fmt: skip
                out, lse = ringattn.attention(q, k, v, mask=mask, softmax_scale=0.2)

                def call(world, q, k, v, function=function, causal=causal, window=window):
                    return function(q, k, v, 0.0, 0.2, causal, window, None, False, True, world)

                shards = on_ranks(layout, call, q, k, v)
                self.assertTrue(all(len(shard) == 3 and shard[2] is None for shard in shards))
                assert_same_bits(ringattn.unshard([o for o, _, _ in shards], layout).reshape(out.shape), out)
                self.assertEqual(tuple(shards[0][1].shape), (2, 4, 60), "[batch, heads, tokens]")
                rows = ringattn.unshard([x.transpose(1, 2) for _, x, _ in shards], layout)
                assert_same_bits(rows.reshape(lse.shape), lse)

    def test_packed_sequences_and_packed_tensors(self):
        lengths = [40, 0, 80]
        q, k, v = (normal(120, 2, 64, seed=i) for i in range(3))
        out, _ = ringattn.varlen(q, k, v, [0, 40, 40, 120])
        local = torch.tensor([0, 20, 20, 60], dtype=torch.int32)
        for deal, prefix in ((ringattn.contiguous, "ring"), (ringattn.zigzag, "zigzag_ring")):
            layout = deal(lengths, RANKS)
            plain, kv, qkv = (
                getattr(names, f"{prefix}_flash_attn_varlen{form}_func") for form in ("", "_kvpacked", "_qkvpacked")
            )
            for call in (
                lambda w, q, k, v, f=plain: f(q, k, v, local, 40, causal=True, group=w),
                lambda w, q, k, v, f=kv: f(q, torch.stack([k, v], 1), local, 40, causal=True, group=w),
                lambda w, q, k, v, f=qkv: f(torch.stack([q, k, v], 1), local, 40, causal=True, group=w),
            ):
                assert_same_bits(ringattn.unshard(on_ranks(layout, call, q, k, v), layout), out)
        fused = torch.stack([q, k, v], 1)[None]
        alone = names.zigzag_ring_flash_attn_qkvpacked_func(fused, causal=True)
        assert_same_bits(names.ring_flash_attn_kvpacked_func(q[None], fused[:, :, 1:], causal=True), alone)
        assert_same_bits(alone[0], ringattn.attention(q, k, v)[0])

    def test_llama3(self):
        cu = torch.tensor([0, 10, 55, 100, 120], dtype=torch.int32)
        second = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, 1, 2)
        self.assertEqual([x.tolist() for x in second[:2]], [[0, 40, 60], [0, 45, 65]])
        self.assertEqual(second[2:], (40, 45, slice(55, 120)))
        first = names.llama3_flash_attn_prepare_cu_seqlens(cu, False, 0, 2)
        self.assertEqual(
            [first[0].tolist(), first[1].tolist(), first[4]], [[0, 10, 55, 60], [0, 10, 55, 100], slice(0, 100)]
        )
        q, k, v = (normal(120, 2, 64, seed=i) for i in range(3))
        layout = ringattn.packed([10, 45, 45, 20], RANKS)
        for causal in (True, False):
            out, lse = ringattn.varlen(q, k, v, cu, mask="causal" if causal else "full")

            def call(world, q, k, v, causal=causal):
                prepared = names.llama3_flash_attn_prepare_cu_seqlens(cu, causal, world.rank, world.size)
                return names.llama3_flash_attn_varlen_func(q, k, v, *prepared[:4], 1, prepared[4], causal=causal,
                                                           return_attn_probs=True, group=world)  # fmt: skip

            shards = on_ranks(layout, call, q, k, v)
            assert_same_bits(ringattn.unshard([o for o, _, _ in shards], layout), out)
            assert_same_bits(ringattn.unshard([x.T for _, x, _ in shards], layout), lse)

    def test_llama3_takes_what_was_prepared_together(self):
        q, cu = normal(40, 2, 64), torch.tensor([0, 10, 40], dtype=torch.int32)
        prepare = names.llama3_flash_attn_prepare_cu_seqlens
        cu_q, cu_k, longest_q, longest_k, local = prepare(cu, True, 0, 1)
        changed = prepare(cu, True, 0, 1)[1]
        changed[1] = 20

        def call(cu_q=cu_q, cu_k=cu_k, local=local, causal=True, group=None):
            longest = longest_q, longest_k
            return names.llama3_flash_attn_varlen_func(q, q, q, cu_q, cu_k, *longest, 1, local, causal=causal, group=group)

        expected = ringattn.varlen(q, q, q, cu)[0]
        assert_same_bits(call(), expected)
        assert_same_bits(call(cu_q=cu_q.clone()), expected)
        for words, given in (
            ("cu_seqlens_q is [0, 20, 40]", {"cu_q": torch.tensor([0, 20, 40])}),
            ("cu_seqlens_q is [0, 40]", {"cu_q": torch.tensor([0, 40])}),
            ("cu_seqlens_k is [0, 20, 40]", {"cu_k": changed}),
            ("local_k_slice is slice(0, 39, None)", {"local": slice(0, 39)}),
            ("local_k_slice is None", {"local": None}),
            ("causal is False (cu_seqlens_k was prepared with causal=True)", {"causal": False}),
            ("this is rank 0 of 1 (cu_seqlens_k was prepared for rank 1 of 2)",
             {"cu_k": prepare(cu, True, 1, 2)[1], "group": ringattn.self_world()}),
        ):  # fmt: skip
            for function in (call, torch.compile(call, backend="aot_eager")):
                torch.compiler.reset()
                with self.subTest(words), torch.no_grad():
                    with self.assertRaises(ringattn.UsageError) as caught:
                        function(**given)
                    self.assertIn(words, str(caught.exception))
        torch.compiler.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert_same_bits(compiled(), expected)
        cu_k[1] = 11  # a graph looks at it whenever it runs
        with self.assertRaises(ringattn.UsageError) as caught:
            compiled()
        self.assertIn("cu_seqlens_k is [0, 11, 40]", str(caught.exception))

    def test_llama3_of_no_tokens_and_of_no_such_rank(self):
        none = normal(0, 2, 64)
        for cu in ([0], [0, 0, 0]):
            for rank in range(2):
                prepared = names.llama3_flash_attn_prepare_cu_seqlens(torch.tensor(cu), True, rank, 2)
                self.assertEqual([x.tolist() for x in prepared[:2]], [[0], [0]])
                self.assertEqual(prepared[2:], (0, 0, slice(0, 0)))
        prepared = names.llama3_flash_attn_prepare_cu_seqlens([0, 0], True, 0, 1)
        out = names.llama3_flash_attn_varlen_func(none, none, none, *prepared[:4], 1, prepared[4], causal=True)
        self.assertEqual(tuple(out.shape), (0, 2, 64))
        for rank, size in ((2, 2), (-1, 2), (0, 0)):
            with self.assertRaises(ringattn.UsageError) as caught:
                names.llama3_flash_attn_prepare_cu_seqlens([0, 40], True, rank, size)
            self.assertIn(f"there is no rank {rank} of {size}", str(caught.exception))

    def test_compiled_they_are_in_one_graph(self):
        """Of this rank alone, with and without a World, and of ranks with one."""
        q, k = normal(1, 60, 4, 64), normal(1, 60, 2, 64, seed=2)
        cu = torch.tensor([0, 20, 60], dtype=torch.int32)
        prepared = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 1)
        for group in (None, ringattn.self_world()):
            for function in (
                lambda q, k, g=group: names.zigzag_ring_flash_attn_func(q, k, k, causal=True, group=g),
                lambda q, k, g=group: names.ring_flash_attn_func(q, k, k, return_attn_probs=True, group=g)[1],
                lambda q, k, g=group: names.ring_flash_attn_varlen_func(q[0], k[0], k[0], cu, 40, causal=True, group=g),
                lambda q, k, g=group: names.llama3_flash_attn_varlen_func(
                    q[0], k[0], k[0], *prepared[:4], 1, prepared[4], causal=True, group=g),
            ):  # fmt: skip
                torch.compiler.reset()
                assert_same_bits(torch.compile(function, backend="aot_eager", fullgraph=True)(q, k), function(q, k))

    def test_what_is_not_computed_is_refused(self):
        q = normal(1, 20, 2, 64)
        for words, named in (
            ("dropout_p is 0.1", {"dropout_p": 0.1}),
            ("alibi_slopes", {"alibi_slopes": torch.ones(2)}),
        ):
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                names.zigzag_ring_flash_attn_func(q, q, q, **named)
            self.assertIn(words, str(caught.exception))
        cu = torch.tensor([0, 20])
        prepared = names.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 1)
        with self.assertRaises(ringattn.UsageError) as caught:
            names.llama3_flash_attn_varlen_func(
                q[0], q[0], q[0], prepared[0], prepared[1].clone(), 20, 20, 1, prepared[4]
            )
        self.assertIn("cu_seqlens_k", str(caught.exception))

    def refuses(self, words, call):
        with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
            call()
        self.assertIn(words, str(caught.exception))

    def test_arguments_that_mean_nothing_are_refused(self):
        q, kv = normal(40, 4, 64), normal(40, 2, 64, seed=2)
        cu = torch.tensor([0, 10, 40], dtype=torch.int32)
        prepare = names.llama3_flash_attn_prepare_cu_seqlens
        made = prepare(cu, True, 0, 1)

        def llama3(stride=1, k=kv, longest=made[2:4], **named):
            return names.llama3_flash_attn_varlen_func(q, k, k, *made[:2], *longest, stride, made[4],
                                                       **{"causal": True} | named)

        for stride in (0, -1, 3, 4, 1.5, "1", None):
            self.refuses(f"heads_k_stride is {stride} (", lambda: llama3(stride))
        self.refuses("k has 2 axes", lambda: llama3(k=kv[0]))
        expected = ringattn.varlen(q, kv, kv, cu)[0]
        for stride in (1, 2):
            assert_same_bits(llama3(stride), expected)
        for longest in ((0, 0), (1, 1), (10**9, 10**9)):  # these numbers are never read
            assert_same_bits(llama3(longest=longest), expected)
            assert_same_bits(names.ring_flash_attn_varlen_func(q, kv, kv, cu, longest[0], causal=True), expected)
        for window in ((5,), (1, 2, 3), 5, None, "55", ("5", 0), (1.5, 0)):
            words = "a side of window_size" if window in (("5", 0), (1.5, 0)) else "window_size is"
            self.refuses(words, lambda: llama3(window_size=window))
            self.refuses(words, lambda: names.ring_flash_attn_func(q[None], kv[None], kv[None], window_size=window))
        for causal in ("no", "False", 1, None, torch.tensor(True)):
            self.refuses(f"causal is {causal!r} (it is True or False)", lambda: prepare(cu, causal, 0, 1))
            self.refuses("causal is", lambda: llama3(causal=causal))
            self.refuses("causal is",
                         lambda: names.zigzag_ring_flash_attn_func(q[None], kv[None], kv[None], causal=causal))
        made = prepare(cu, np.bool_(True), 0, 1)
        assert_same_bits(llama3(window_size=[-1, -1]), expected)

    def test_rows_that_are_none(self):
        q, cu = normal(1, 20, 2, 64), torch.tensor([0, 20], dtype=torch.int32)
        made = names.llama3_flash_attn_prepare_cu_seqlens(cu, False, 0, 1)
        for kind, form in itertools.product(("ring", "zigzag_ring"), ("", "varlen_")):
            rest, rows = ((cu, 20), q[0]) if form else ((), q)
            plain, kv, qkv = (getattr(names, f"{kind}_flash_attn_{form}{packed}func") for packed in ("", "kvpacked_",
                                                                                                     "qkvpacked_"))
            self.refuses("q is NoneType", lambda: plain(None, rows, rows, *rest))
            self.refuses("v is list", lambda: plain(rows, rows, [1], *rest))
            for of in (None, rows, torch.stack([rows] * 3, -3)):
                self.refuses("kv is", lambda: kv(rows, of, *rest))
            for of in (None, rows, torch.stack([rows] * 2, -3), torch.stack([rows] * 3, -3)[None]):
                self.refuses("qkv is", lambda: qkv(of, *rest))
        self.refuses("q has 3 axes (it is [batch, tokens", lambda: names.ring_flash_attn_func(q[0], q[0], q[0]))
        self.refuses("return_attn_probs is 1", lambda: names.ring_flash_attn_func(q, q, q, return_attn_probs=1,
                                                                                 group=ringattn.self_world()))  # fmt: skip
        self.refuses("k is NoneType",
                     lambda: names.llama3_flash_attn_varlen_func(q[0], None, q[0], *made[:4], 1, made[4]))
        self.refuses("kv is [20, 2, 64]",
                     lambda: names.llama3_flash_attn_varlen_kvpacked_func(q[0], q[0], *made[:4], 1, made[4]))

    def test_groups_that_are_not_there(self):
        q = normal(1, 20, 2, 64)
        for call in (ringattn.torch_world, lambda: ringattn.torch_world(device="cpu")):
            self.refuses("Call torch.distributed.init_process_group() first", call)
        self.refuses("group is a (torch.distributed says", lambda: names.ring_flash_attn_func(q, q, q, group="a"))
        other = torch.distributed.GroupMember.NON_GROUP_MEMBER
        self.refuses("this rank is not in the group", lambda: names.ring_flash_attn_func(q, q, q, group=other))

    def test_the_page_says_which_names_are_there(self):
        page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
        text = page.read_text(encoding="utf-8")
        rows = re.findall(r"^\| (`\w*flash_attn\w*`.*) \| (.*) \|$", text, re.MULTILINE)
        said = {name: there for some, there in rows for name in re.findall(r"`(\w+)`", some)}
        self.assertEqual(len(said), 7, said)
        for name, there in said.items():
            self.assertTrue(hasattr(names, name), name)
            self.assertIn(re.split("[,: ]", there)[0], ("available", "refused"))
        for form in ("kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked"):
            for deal in ("ring", "zigzag_ring"):
                self.assertTrue(hasattr(names, f"{deal}_flash_attn_{form}_func"), form)
        for form in ("kvpacked", "qkvpacked"):
            self.assertTrue(hasattr(names, f"llama3_flash_attn_varlen_{form}_func"), form)


if __name__ == "__main__":
    unittest.main()
