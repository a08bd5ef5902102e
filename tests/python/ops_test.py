# SPDX-License-Identifier: Apache-2.0
"""Decoding, latent attention and scans from Python, over NumPy arrays: what they promise to each other bit for bit, and what
they are by their definitions."""

import functools
import pathlib
import re
import resource
import unittest

import numpy as np
import ringattn
from ringattn.testing import assert_same_bits, check_attention

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

HEADS, KV_HEADS, DIM = 4, 2, 64


def normal(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


class Decoding(unittest.TestCase):
    lengths = (70, 1, 131)

    def setUp(self):
        self.q, self.k, self.v = (
            normal(sum(self.lengths), h, DIM, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        self.cu = np.concatenate([[0], np.cumsum(self.lengths)])
        self.out, self.lse = ringattn.varlen(self.q, self.k, self.v, self.cu)
        self.last = self.cu[1:] - 1

    def paged(self, page_size, tokens_of=None):
        """Caches with keys and values in pages that lie anywhere, and the block table. tokens_of(sequence): those that the
        cache holds, in order."""
        held = [np.arange(n) if tokens_of is None else tokens_of(s, n) for s, n in enumerate(self.lengths)]
        pages_of = [-(-len(tokens) // page_size) for tokens in held]
        places = np.random.default_rng(9).permutation(sum(pages_of) + 3)
        caches = [np.full((len(places), page_size, KV_HEADS, DIM), np.nan, "float32") for _ in range(2)]
        table = np.full((len(held), max(*pages_of, 1)), -7, "int32")
        taken = 0
        for s, tokens in enumerate(held):
            for page in range(pages_of[s]):
                table[s, page] = places[taken]
                some = self.cu[s] + tokens[page * page_size : (page + 1) * page_size]
                for cache, rows in zip(caches, (self.k, self.v)):
                    cache[places[taken], : len(some)] = rows[some]
                taken += 1
        return *caches, table

    def test_rows_have_the_bits_of_attention(self):
        counts = np.array(self.lengths, "int32")
        for page_size in (16, 128):
            k, v, table = self.paged(page_size)
            out, lse = ringattn.decode(self.q[self.last], k, v, counts, block_table=table)
            assert_same_bits(out, self.out[self.last])
            assert_same_bits(lse, self.lse[self.last])
            heads_first = np.ascontiguousarray(k.swapaxes(1, 2)).swapaxes(1, 2)
            assert_same_bits(ringattn.decode(self.q[self.last], heads_first, v, counts, block_table=table)[0], out)
        dense = [np.full((3, 200, KV_HEADS, DIM), np.nan, "float32") for _ in range(2)]
        for s, n in enumerate(self.lengths):
            for cache, rows in zip(dense, (self.k, self.v)):
                cache[s, :n] = rows[self.cu[s] : self.cu[s + 1]]
        given = np.empty_like(out)
        assert_same_bits(ringattn.decode(self.q[self.last], *dense, counts, out=given)[1], lse)
        assert_same_bits(given, out)

    def test_sequences_grow_in_place(self):
        k, v, table = self.paged(16)
        some = [0, 2]
        counts = np.array(self.lengths, "int32")[some] - 3
        rows = np.stack([np.arange(self.cu[s + 1] - 3, self.cu[s + 1]) for s in some])
        for cache in (k, v):
            for s in some:
                for token in range(self.lengths[s] - 3, self.lengths[s]):
                    cache[table[s, token // 16], token % 16] = np.nan
        out, lse = ringattn.decode(self.q[rows], k, v, lengths_before=counts, block_table=np.ascontiguousarray(table[some]),
                                   k_new=self.k[rows], v_new=self.v[rows], update_lengths=True)  # fmt: skip
        self.assertEqual((out.shape, lse.shape), ((2, 3, HEADS, DIM), (2, 3, HEADS)))
        self.assertEqual(list(counts), [70, 131])
        assert_same_bits(out, self.out[rows])
        assert_same_bits(lse, self.lse[rows])

    def test_ranks_share_a_cache(self):
        def rank(world):
            given = {"world": world, "max_keys": 200}
            like = np.empty((1, 64, KV_HEADS, DIM), "float32")
            share = ringattn.decode_partition(self.q[self.last], like, like, block_table=np.zeros((3, 3), "int32"), **given)
            k, v, table = self.paged(64, lambda _, length: share.tokens(length))
            out, lse = ringattn.decode(self.q[self.last], k, v, np.array(self.lengths, "int32"), block_table=table, **given)
            own = list(share.owned)
            assert_same_bits(out, self.out[self.last[own]])
            assert_same_bits(lse, self.lse[self.last[own]])
            # A group is longer than these sequences: the first rank has their keys, and all have the others' rows.
            self.assertEqual((share.kv_split_keys, share.first, share.stride), (8192, world.rank, 2))
            return own, share.cache_tokens(70)

        own, held = zip(*ringattn.run_ranks(2, rank))
        self.assertEqual(sum(own, []), [0, 1, 2])
        self.assertEqual(held, (70, 0))

    def test_ranks_share_the_kv_splits_of_a_long_sequence(self):
        length = 20_000
        k, v, q = normal(length, 1, 16), normal(length, 1, 16, seed=2), normal(length, 1, 16, seed=3)[-3:]
        out, lse = ringattn.attention(q, k, v)

        def rank(world):
            dense = {"world": world, "max_keys": length}
            caches = [np.zeros((1, 12_288, 1, 16), "float32") for _ in "kv"]
            share = ringattn.decode_partition(q[None], *caches, **dense)
            held = share.tokens(length)
            for cache, rows in zip(caches, (k, v)):
                cache[0, : len(held)] = rows[held]
            self.assertEqual(share.cache_tokens(length), len(held))
            self.assertEqual(ringattn.decode_partition(q[None], *caches, **dense), share)
            return ringattn.decode(q[None], *caches, np.array([length], "int32"), **dense), held, share.owned

        (first, first_held, of_first), (second, second_held, of_second) = ringattn.run_ranks(2, rank)
        self.assertEqual((len(first_held), len(second_held)), (length - 8192, 8192))
        assert_same_bits(np.union1d(first_held, second_held), np.arange(length))
        for shards, expected in zip(zip(first, second), (out, lse)):
            assert_same_bits(np.concatenate(shards)[0], expected)
        self.assertEqual([*of_first, *of_second], [0])

    @unittest.skipUnless(pathlib.Path("/proc/self/statm").exists(), "needs /proc")
    def test_short_sequences_touch_little_of_a_long_cache_s_scratch(self):
        sequences, heads, pages = 64, 16, (1 << 20) // 256  # a million keys each: 35 MB of partials

        def resident():
            return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        cache = np.ones((1, 256, 1, 64), "float32")
        table = np.zeros((sequences, pages), "int32")
        before = resident()
        ringattn.decode(np.ones((sequences, heads, 64), "float32"), cache, cache, np.full(sequences, 100, "int32"),
                        block_table=table, threads=1)  # fmt: skip
        self.assertLess(resident() - before, 16 << 20)

    def test_what_is_wrong_is_refused(self):
        k, v, table = self.paged(16)
        counts = np.array(self.lengths, "int32")
        for words, change in (
            ("lengths holds int64", {"lengths": counts.astype("int64")}),
            ("sequence 2", {"lengths": np.array([70, 1, 5000], "int32")}),
            ("page", {"block_table": np.where(table < 0, table, 99).astype("int32")}),
            ("k_new and v_new", {"k_new": self.k[self.last]}),
            ("out is [3, 4, 63]", {"out": np.empty((3, 4, 63), "float32")}),
            ("block_table is [2, 9]", {"block_table": table[:2]}),
        ):
            given = {"lengths": counts, "block_table": table} | change
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.decode(self.q[self.last], k, v, **given)
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(ringattn.UnsupportedError):
            ringattn.decode(self.q[self.last], k, v, counts, block_table=table, cache_batch_idx=[0])


class Mla(unittest.TestCase):
    dims = {"head_dim": 32, "rope_dim": 16, "latent_dim": 64, "dim_v": 32}
    lengths = (90, 210)

    def setUp(self):
        tokens = sum(self.lengths)
        self.cu = np.concatenate([[0], np.cumsum(self.lengths)])
        self.q = normal(tokens, HEADS, 48)
        fused = normal(tokens, 80, seed=2)
        self.latent, self.k_rope = fused[:, :64], fused[:, 64:]
        kv_b = normal(HEADS, 64, 64, seed=3) / np.float32(8)
        self.w_uk, self.w_uv = kv_b[:, :32], kv_b[:, 32:]

    def mla(self, **given):
        return ringattn.mla(self.q, self.latent, self.k_rope, self.w_uk, self.w_uv, cu_seqlens_q=self.cu, **given)

    def test_both_forms_are_attention_over_what_latents_stand_for(self):
        latent = self.latent.astype("float64")
        k_nope, v = np.einsum("td,hnd->thn", latent, self.w_uk), np.einsum("td,hnd->thn", latent, self.w_uv)
        k = np.concatenate([k_nope, np.repeat(self.k_rope[:, None], HEADS, 1)], axis=2)
        expected, expected_lse = ringattn.varlen(self.q, k.astype("float32"), v.astype("float32"), self.cu)
        check_attention(self.q, k, v, expected, expected_lse, cu_seqlens_q=self.cu)
        for form in ("expanded", "absorbed"):
            out, lse = self.mla(form=form)
            np.testing.assert_allclose(out, expected, atol=2e-5)  # products of 64 numbers are rounded in between
            np.testing.assert_allclose(lse, expected_lse, atol=2e-5)

    def test_ranks(self):
        layout = ringattn.zigzag(self.lengths, 3)
        for form in ("expanded", "absorbed"):
            out, lse = self.mla(form=form)

            def rank(world, form=form):
                q, latent, k_rope = (ringattn.shard(x, layout, world.rank) for x in (self.q, self.latent, self.k_rope))
                given = {"form": form, "world": world, "layout": layout}
                made = ringattn.mla(q, latent, k_rope, self.w_uk, self.w_uv, **given)  # the layout says the sequences
                again = ringattn.mla(q, latent, k_rope, self.w_uk, self.w_uv, cu_seqlens_q=self.cu, **given)
                assert_same_bits(again[0], made[0])
                return made

            shards = ringattn.run_ranks(3, rank)
            assert_same_bits(ringattn.unshard([o for o, _ in shards], layout), out)
            assert_same_bits(ringattn.unshard([x for _, x in shards], layout), lse)

    def test_chunks_stand_where_q_offsets_say(self):
        for form in ("expanded", "absorbed"):
            whole, whole_lse = self.mla(form=form)
            rows = np.r_[50:90, 120:150]  # the first sequence's last tokens, and some in the middle of the second
            given = {"cu_seqlens_k": self.cu, "form": form}
            parts = self.latent, self.k_rope, self.w_uk, self.w_uv
            out, lse = ringattn.mla(self.q[rows], *parts, cu_seqlens_q=[0, 40, 70], q_offsets=np.array([50, 30]), **given)
            assert_same_bits(out, whole[rows])
            assert_same_bits(lse, whole_lse[rows])
            # Another call of the same forms.
            other, _ = ringattn.mla(self.q[rows], *parts, cu_seqlens_q=[0, 40, 70], q_offsets=[50, 31], **given)
            self.assertFalse(np.array_equal(other[40:], out[40:]))
            assert_same_bits(other[:40], out[:40])
        with self.assertRaises(ringattn.UsageError) as caught:
            self.mla(q_offsets=[3])
        self.assertIn("q_offsets has 1 numbers (there are 2 sequences)", str(caught.exception))

    def test_decoding_has_the_bits_of_the_absorbed_form(self):
        out, lse = self.mla(form="absorbed")
        cache = np.full((2, 256, 80), np.nan, "float32")
        last = self.cu[1:] - 1
        for s, n in enumerate(self.lengths):
            cache[s, : n - 1, :64] = self.latent[self.cu[s] : self.cu[s + 1] - 1]
            cache[s, : n - 1, 64:] = self.k_rope[self.cu[s] : self.cu[s + 1] - 1]
        counts = np.array(self.lengths, "int32") - 1
        got, got_lse = ringattn.mla_decode(self.q[last], cache, w_uk=self.w_uk, w_uv=self.w_uv, rope_dim=16,
                                            lengths_before=counts, update_lengths=True,
                                           latent=self.latent[last], k_rope=self.k_rope[last])  # fmt: skip
        self.assertEqual(list(counts), list(self.lengths))
        assert_same_bits(got, out[last])
        assert_same_bits(got_lse, lse[last])

    def test_ranks_share_a_cache(self):
        out, _ = self.mla(form="absorbed")
        last = self.cu[1:] - 1

        def rank(world):
            given = {"rope_dim": 16, "world": world, "max_keys": 300}
            cache = np.full((2, 256, 80), np.nan, "float32")
            share = ringattn.mla_decode_partition(self.q[last], cache, self.w_uk, self.w_uv, **given)
            for s, n in enumerate(self.lengths):
                held = share.tokens(n)
                cache[s, : len(held), :64] = self.latent[self.cu[s] + held]
                cache[s, : len(held), 64:] = self.k_rope[self.cu[s] + held]
            made, _ = ringattn.mla_decode(self.q[last], cache, np.array(self.lengths, "int32"), self.w_uk, self.w_uv, **given)
            assert_same_bits(made, out[last[list(share.owned)]])
            return share.owned

        self.assertEqual([s for owned in ringattn.run_ranks(2, rank) for s in owned], [0, 1])

    def test_gemms_may_be_the_callers(self):
        out, _ = self.mla(form="absorbed")
        absorbed = np.concatenate([np.einsum("thn,hnd->thd", self.q[:, :, :32], self.w_uk), self.q[:, :, 32:]], axis=2)
        inside, _ = ringattn.mla(absorbed, self.latent, self.k_rope, cu_seqlens_q=self.cu, form="absorbed", head_dim=32)
        self.assertEqual(inside.shape, (300, HEADS, 64))
        np.testing.assert_allclose(np.einsum("thd,hvd->thv", inside, self.w_uv), out, atol=2e-5)
        # By the product of the package: with its bits.
        made = np.empty((300, HEADS, 80), "float32")
        ringattn.batched_gemm(self.q[:, :, :32], self.w_uk.swapaxes(1, 2), out=made[..., :64])
        made[..., 64:] = self.q[:, :, 32:]
        inside, _ = ringattn.mla(made, self.latent, self.k_rope, cu_seqlens_q=self.cu, form="absorbed", head_dim=32)
        assert_same_bits(ringattn.batched_gemm(inside, self.w_uv), out)
        last = self.cu[1:] - 1
        cache, counts = np.zeros((2, 256, 80), "float32"), np.array(self.lengths, "int32")
        for s in (0, 1):
            cache[s, : self.lengths[s], :64] = self.latent[self.cu[s] : self.cu[s + 1]]
            cache[s, : self.lengths[s], 64:] = self.k_rope[self.cu[s] : self.cu[s + 1]]
        step, _ = ringattn.mla_decode(made[last], cache, counts, rope_dim=16, head_dim=32)
        assert_same_bits(ringattn.batched_gemm(step, self.w_uv), out[last])
        for words, given in (("head_dim", {"form": "absorbed"}), ("form 'both'", {"form": "both", "head_dim": 32})):
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.mla(absorbed, self.latent, self.k_rope, **given)
            self.assertIn(words, str(caught.exception))


def rows_of_8_bits(latent, k_rope):
    """FlashMLA's rows of bf16 latents and rotary keys, and the latents that they are unpacked to."""
    blocks = latent.astype("float32").reshape(len(latent), -1, 128)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(448)
    codes = (blocks / scales).astype(ml_dtypes.float8_e4m3fn)
    back = (codes.astype("float32") * scales).astype(ml_dtypes.bfloat16).reshape(latent.shape)
    parts = codes, scales, np.ascontiguousarray(k_rope)
    return np.concatenate([x.reshape(len(latent), -1).view("uint8") for x in parts], axis=1), back


@unittest.skipIf(ml_dtypes is None, "needs ml_dtypes")
class Fp8Latents(unittest.TestCase):
    lengths = (90, 210)

    def setUp(self):
        bf16 = ml_dtypes.bfloat16
        self.cu = np.concatenate([[0], np.cumsum(self.lengths)])
        self.q = normal(300, HEADS, 48).astype(bf16)
        self.made, self.k_rope = normal(300, 128, seed=2).astype(bf16), normal(300, 16, seed=3).astype(bf16)
        kv_b = (normal(HEADS, 64, 128, seed=4) / np.float32(8)).astype(bf16)
        self.w_uk, self.w_uv = kv_b[:, :32], kv_b[:, 32:]
        self.rows, self.latent = rows_of_8_bits(self.made, self.k_rope)
        self.assertEqual(self.rows.shape, (300, 164))

    def mla(self, latent, k_rope, **given):
        return ringattn.mla(self.q, latent, k_rope, self.w_uk, self.w_uv, cu_seqlens_q=self.cu, **given)

    def test_have_the_bits_of_what_they_are_dequantized_to(self):
        layout = ringattn.zigzag(self.lengths, 3)
        for form in ("expanded", "absorbed"):
            out, lse = self.mla(self.latent, self.k_rope, form=form)
            wide = np.zeros((300, 1, 170), "uint8")  # rows with a gap after them
            wide[:, 0, :164] = self.rows
            for rows in (self.rows, wide[:, :, :164]):
                made, made_lse = self.mla(rows, None, form=form)
                assert_same_bits(made, out)
                assert_same_bits(made_lse, lse)

            def rank(world, form=form):
                q, rows = (ringattn.shard(x, layout, world.rank) for x in (self.q, self.rows))
                return ringattn.mla(q, rows, None, self.w_uk, self.w_uv, form=form, world=world, layout=layout)[0]

            assert_same_bits(ringattn.unshard(ringattn.run_ranks(3, rank), layout), out)

    def test_are_decoded_and_joined(self):
        out, lse = self.mla(self.latent, self.k_rope, form="absorbed")
        last = self.cu[1:] - 1
        cache = np.zeros((2, 256, 164), "uint8")
        for s, n in enumerate(self.lengths):
            cache[s, :n] = self.rows[self.cu[s] : self.cu[s + 1]]
        counts = np.array(self.lengths, "int32")
        got, got_lse = ringattn.mla_decode(self.q[last], cache, counts, self.w_uk, self.w_uv, rope_dim=16)
        assert_same_bits(got, out[last])
        assert_same_bits(got_lse, lse[last])
        # New rows are packed as they join the cache.
        whole = cache.copy()
        for s, n in enumerate(self.lengths):
            cache[s, n - 1 :] = 255
        counts -= 1
        got, _ = ringattn.mla_decode(self.q[last], cache, w_uk=self.w_uk, w_uv=self.w_uv, rope_dim=16,
                                            lengths_before=counts, update_lengths=True,
                                     latent=self.made[last], k_rope=self.k_rope[last])  # fmt: skip
        assert_same_bits(got, out[last])
        for s, n in enumerate(self.lengths):
            np.testing.assert_array_equal(cache[s, :n], whole[s, :n])
            self.assertTrue((cache[s, n:] == 255).all())

    def test_queries_in_the_latent_say_the_dims(self):
        absorbed = normal(300, HEADS, 144, seed=5).astype(ml_dtypes.bfloat16)
        given = {"form": "absorbed", "head_dim": 32, "cu_seqlens_q": self.cu}
        expected, _ = ringattn.mla(absorbed, self.latent, self.k_rope, **given)
        assert_same_bits(ringattn.mla(absorbed, self.rows, **given)[0], expected)

    def test_what_is_wrong_is_refused(self):
        fp32 = {name: getattr(self, name).astype("float32") for name in ("q", "w_uk", "w_uv")}
        for words, call in (
            ("k_rope of mla is given", lambda: self.mla(self.rows, self.k_rope)),
            ("k_rope of mla is missing", lambda: self.mla(self.latent, None)),
            ("latent has rows of 163 bytes (with a rotary key of 16 numbers it is 132 · n + 32",
             lambda: self.mla(self.rows[:, :163], None)),
            ("latent is [4, 64] (each of its rows is [128])",
             lambda: ringattn.mla_decode(self.q[:2], np.zeros((2, 256, 164), "uint8"), lengths=np.array([9, 9], "int32"),
                                         w_uk=self.w_uk, w_uv=self.w_uv, rope_dim=16, latent=self.made[:2].reshape(4, 64),
                                         k_rope=self.k_rope[:2])),
            ("rope_dim is None",
             lambda: ringattn.mla_decode(self.q[:2], np.zeros((2, 256, 164), "uint8"), np.array([9, 9], "int32"), self.w_uk,
                                         self.w_uv, rope_dim=None)),
            ("latent is float8_e4m3fn (FP8 rows hold more than quantized values)",
             lambda: self.mla(self.rows.view(ml_dtypes.float8_e4m3fn), None)),
            ("FP8 latents in a job of fp32", lambda: ringattn.mla(fp32["q"], self.rows, None, fp32["w_uk"], fp32["w_uv"])),
            ("cache has rows of 163 bytes", lambda: ringattn.mla_decode(self.q[:1], np.zeros((1, 256, 163), "uint8"),
                                                                    np.array([9], "int32"), self.w_uk, self.w_uv, rope_dim=16)),
        ):  # fmt: skip
            with self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn(words, str(caught.exception))


def ssm_by_definition(x, dt, A, B, C, state):
    """Of one sequence, in fp64: x [tokens, heads, head_dim], A [heads, 1 or state_dim]."""
    y = np.zeros(x.shape)
    group = x.shape[1] // B.shape[1]
    B, C = np.repeat(B, group, axis=1), np.repeat(C, group, axis=1)
    for t in range(len(x)):
        state = np.exp(dt[t, :, None] * A)[:, None] * state + (dt[t, :, None] * x[t])[:, :, None] * B[t][:, None]
        y[t] = np.einsum("hds,hs->hd", state, C[t])
    return y, state


class SsmOps(unittest.TestCase):
    def inputs(self, tokens, heads=4, dim=32, states=16, groups=2):
        return (normal(tokens, heads, dim), np.abs(normal(tokens, heads, seed=2)) / 10, -np.exp(normal(heads, seed=3)),
                normal(tokens, groups, states, seed=4), normal(tokens, groups, states, seed=5))  # fmt: skip

    def test_ssd_is_its_definition(self):
        x, dt, A, B, C = self.inputs(300)
        D, z, bias = normal(4, seed=6), normal(300, 4, 32, seed=7), normal(4, seed=8)
        initial = normal(2, 4, 32, 16, seed=9)
        y, states = ringattn.ssd(x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True, dt_limit=(0.3, 2.0),
                                 cu_seqlens=[0, 100, 300], initial_states=initial, return_final_states=True)  # fmt: skip
        step = np.clip(np.log1p(np.exp(dt.astype("float64") + bias)), 0.3, 2.0)
        for s, rows in enumerate((slice(0, 100), slice(100, 300))):
            expected, state = ssm_by_definition(x[rows], step[rows], A[:, None], B[rows], C[rows], initial[s])
            expected = (expected + D[:, None] * x[rows]) * z[rows] / (1 + np.exp(-z[rows].astype("float64")))
            np.testing.assert_allclose(y[rows], expected, rtol=1e-4, atol=1e-4)  # fp32 over decayed sums of 300
            np.testing.assert_allclose(states[s], state, rtol=1e-4, atol=1e-4)

    def test_batches_are_their_sequences(self):
        x, dt, A, B, C = self.inputs(260)
        fold = [array.reshape(2, 130, *array.shape[1:]) for array in (x, dt, B, C)]
        y = ringattn.ssd(fold[0], fold[1], A, fold[2], fold[3])
        assert_same_bits(y.reshape(x.shape), ringattn.ssd(x, dt, A, B, C, cu_seqlens=[0, 130, 260]))
        assert_same_bits(y[1], ringattn.ssd(x[130:], dt[130:], A, B[130:], C[130:]))

    def test_ranks(self):
        lengths = (0, 70000, 0, 300, 66000, 0)  # the states of empty sequences pass through
        x, dt, A, B, C = self.inputs(sum(lengths), heads=1, groups=1)
        cu = np.concatenate([[0], np.cumsum(lengths)])
        y, states = ringattn.ssd(x, dt, A, B, C, cu_seqlens=cu, return_final_states=True)
        dealt = ringattn.super_segments(lengths, 2)
        cut = ringattn.Layout(lengths, [[(1, 0, 65536)], [(1, 65536, 70000), (3, 0, 300), (4, 0, 66000)]])
        initial = normal(6, 1, 32, 16, seed=6)
        moved, moved_states = ringattn.ssd(x, dt, A, B, C, cu_seqlens=cu, initial_states=initial, return_final_states=True)
        assert_same_bits(moved_states[[0, 2, 5]], initial[[0, 2, 5]])

        def rank(world, layout):
            mine = [ringattn.shard(array, layout, world.rank) for array in (x, dt, B, C)]
            given = {"cu_seqlens": cu, "world": world, "return_final_states": True, "layout": None if layout is dealt else layout}
            rows, ending = ringattn.ssd(mine[0], mine[1], A, mine[2], mine[3], **given)
            assert_same_bits(ending, states[layout.ends(world.rank)])
            beginning = initial[layout.begins(world.rank)]
            after, ending = ringattn.ssd(mine[0], mine[1], A, mine[2], mine[3], initial_states=beginning, **given)
            assert_same_bits(ending, moved_states[layout.ends(world.rank)])
            return rows, after

        halves = [[0, 1, 2], [3, 4, 5]]
        for layout, begins, ends in ((dealt, halves, halves), (cut, [[0, 1], [2, 3, 4, 5]], [[0], [1, 2, 3, 4, 5]])):
            shards = ringattn.run_ranks(2, functools.partial(rank, layout=layout))
            self.assertGreater(min(len(rows) for rows, _ in shards), 300)
            assert_same_bits(ringattn.unshard([rows for rows, _ in shards], layout), y)
            assert_same_bits(ringattn.unshard([rows for _, rows in shards], layout), moved)
            self.assertEqual([layout.begins(0), layout.begins(1)], begins)
            self.assertEqual([layout.ends(0), layout.ends(1)], ends)

    def test_selective_scan_is_its_definition(self):
        u, delta = normal(200, 24), np.abs(normal(200, 24, seed=2)) / 10
        A, B, C = -np.exp(normal(24, 16, seed=3)), normal(200, 16, seed=4), normal(200, 16, seed=5)
        y, last = ringattn.selective_scan(u, delta, A, B, C, return_last_state=True)
        expected, state = ssm_by_definition(u[..., None], delta, A, B[:, None], C[:, None], np.zeros((24, 1, 16)))
        np.testing.assert_allclose(y, expected[..., 0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(last[0], state[:, 0], rtol=1e-4, atol=1e-4)

    def test_what_is_wrong_is_refused(self):
        x, dt, A, B, C = self.inputs(50)
        for kind, words, arguments in (
            (ringattn.UsageError, "A holds", (x, dt, A.astype("float16"), B, C)),
            (ringattn.UsageError, "c is fp32 [50, 2, 16]", (x, dt, A, B[:, :, :8], C)),
            (ringattn.UsageError, "axes", (x[:, :, 0], dt, A, B, C)),
        ):
            self.assertRaisesRegex(kind, "(?i)" + re.escape(words), ringattn.ssd, *arguments)
        self.assertRaises(ringattn.UnsupportedError, ringattn.ssd, x, dt, A, B, C, seq_idx=1)


if __name__ == "__main__":
    unittest.main()
