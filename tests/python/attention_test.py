# SPDX-License-Identifier: Apache-2.0
"""Attention from Python, over NumPy arrays: right, with the same bits over ranks, layouts, strides and batches, and what is
refused."""

import unittest

import numpy as np
import ringattn
from ringattn import testing
from ringattn.testing import assert_same_bits

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

TYPES = ["float32", "float16"] + (["bfloat16"] if ml_dtypes else [])


def arrays(tokens, heads=4, kv_heads=2, dim=64, dim_v=32, dtype="float32", seed=1):
    """q, k and v of normal numbers."""
    draw = np.random.default_rng(seed).standard_normal
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shapes = (tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim_v)
    return [draw(shape, dtype="float32").astype(dtype) for shape in shapes]


class Right(unittest.TestCase):
    def test_every_mask_and_type_agrees_with_fp64(self):
        sinks = np.array([0.5, -1.0, 2.0, 0.0], "float32")
        for dtype in TYPES:
            q, k, v = arrays(300, dtype=dtype)
            for given in ({"mask": "causal"}, {"mask": "full"}, {"mask": (40, 3)}, {"mask": (-1, 9), "softcap": 5.0},
                          {"sinks": sinks}, {"softmax_scale": 0.3}):  # fmt: skip
                with self.subTest(dtype=dtype, **given):
                    out, lse = ringattn.attention(q, k, v, **given)
                    self.assertEqual((out.shape, lse.shape), ((300, 4, 32), (300, 4)))
                    self.assertEqual((out.dtype, lse.dtype), (q.dtype, np.float32))
                    testing.check_attention(q, k, v, out, lse, rows=200, **given)

    def test_packed_batches_and_offsets(self):
        q, _, _ = arrays(150)
        _, k, v = arrays(400, seed=2)
        cu_q, cu_k = [0, 50, 50, 150], np.array([0, 90, 95, 400])
        for offsets in (None, [3, 0, 205]):
            out, lse = ringattn.varlen(q, k, v, cu_q, cu_k, q_offsets=offsets)
            testing.check_attention(
                q, k, v, out, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, q_offsets=offsets, rows=None
            )

    def test_no_rows_at_all(self):
        q, k, v = arrays(8)
        out, lse = ringattn.attention(q[:0], k[:0], v[:0])
        self.assertEqual((out.shape, lse.shape), ((0, 4, 32), (0, 4)))
        out, lse = ringattn.attention(q, k[:0], v[:0], mask="full")
        self.assertTrue(np.all(out == 0) and np.all(lse == -np.inf))

    def test_a_row_without_keys(self):
        q, k, v = arrays(8)
        out, lse = ringattn.attention(q, k, v, mask="causal", q_offset=-4)
        self.assertTrue(np.all(out[:4] == 0) and np.all(lse[:4] == -np.inf) and np.all(np.isfinite(lse[4:])))


class Bits(unittest.TestCase):
    def test_ranks_and_layouts(self):
        for dtype in TYPES:
            q, k, v = arrays(1500, dtype=dtype)
            testing.check_bits(q, k, v, [0, 700, 713, 1500], ranks=(1, 2, 3, 5))

    def test_keys_may_have_a_layout_of_their_own(self):
        q, _, _ = arrays(100)
        _, k, v = arrays(700, seed=3)
        out, lse = ringattn.attention(q, k, v)
        of_q, of_k = (
            ringattn.zigzag([100], 3),
            ringattn.Layout([700], [[(0, 5, 9)], [(0, 0, 5), (0, 600, 700)], [(0, 9, 600)]]),
        )

        def rank(world):
            mine = [ringattn.shard(x, y, world.rank) for x, y in ((q, of_q), (k, of_k), (v, of_k))]
            return ringattn.attention(*mine, world=world, layout=of_q, key_layout=of_k)

        shards = ringattn.run_ranks(3, rank)
        testing.assert_same_bits(ringattn.unshard([o for o, _ in shards], of_q), out)
        testing.assert_same_bits(ringattn.unshard([x for _, x in shards], of_q), lse)

    def test_a_layout_by_name_takes_the_ranks_times_the_rows(self):
        q, k, v = arrays(400)
        batched = [np.stack([x, x[::-1]]) for x in (q, k, v)]
        out, lse = ringattn.attention(*batched)
        layout = ringattn.zigzag([400, 400], 4)

        def rank(world):
            return ringattn.attention(
                *[ringattn.shard(x, layout, world.rank) for x in batched], world=world, layout="zigzag"
            )

        shards = ringattn.run_ranks(4, rank)
        self.assertEqual(shards[0][0].shape, (2, 100, 4, 32))
        testing.assert_same_bits(ringattn.unshard([o for o, _ in shards], layout).reshape(out.shape), out)
        testing.assert_same_bits(ringattn.unshard([x for _, x in shards], layout).reshape(lse.shape), lse)

    def test_neither_strides_nor_neighbours_matter(self):
        fused = np.random.default_rng(4).standard_normal((2, 200, 8, 64), dtype="float32")
        q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
        out, lse = ringattn.attention(q, k, v)
        for i in range(2):
            alone, alone_lse = ringattn.attention(*(np.ascontiguousarray(x[i]) for x in (q, k, v)))
            testing.assert_same_bits(out[i], alone)
            testing.assert_same_bits(lse[i], alone_lse)
        heads_first = np.ascontiguousarray(
            np.swapaxes(q, 1, 2)
        )  # [batch, heads, tokens, dim], as PyTorch's SDPA has it
        given = np.empty_like(out)
        same, _ = ringattn.attention(np.swapaxes(heads_first, 1, 2), k, v, out=given)
        testing.assert_same_bits(given, out)
        self.assertTrue(np.shares_memory(same, given))
        columns = np.asfortranarray(q[0])  # numbers of a head apart
        testing.assert_same_bits(ringattn.attention(columns, k[0], v[0])[0], out[0])

    def test_the_number_of_threads_does_not_matter(self):
        q, k, v = arrays(600)
        testing.assert_same_bits(ringattn.attention(q, k, v, threads=1)[0], ringattn.attention(q, k, v, threads=2)[0])


class Refused(unittest.TestCase):
    def expect(self, kind, words, function, *arguments, **named):
        with self.assertRaises(kind) as caught:
            function(*arguments, **named)
        self.assertIn(words, str(caught.exception))
        self.assertRegex(str(caught.exception), r"^[^()].* \(.+\)\. .+\.$", "problem (why). suggestion.")
        self.assertIsInstance(caught.exception, ringattn.Error)

    def test_what_contradicts_itself_or_is_not_computed(self):
        q, k, v = arrays(40)
        usage, unsupported = ringattn.UsageError, ringattn.UnsupportedError
        attention = ringattn.attention
        self.expect(unsupported, "dropout_p", attention, q, k, v, dropout_p=0.1)
        self.expect(unsupported, "alibi_slopes", ringattn.varlen, q, k, v, [0, 40], alibi_slopes=q)
        self.expect(usage, "mask 'casual'", attention, q, k, v, mask="casual")
        self.expect(usage, "q is float64", attention, q.astype("float64"), k, v)
        self.expect(usage, "k is float16 but q is float32", attention, q, k.astype("float16"), v)
        self.expect(usage, "K has 3 heads", attention, q, k[:, [0, 0, 1]], v[:, [0, 0, 1]])
        self.expect(usage, "v is list", attention, q, k, v.tolist())
        self.expect(usage, "axes", attention, q[None], k, v)
        self.expect(usage, "cu_seqlens", ringattn.varlen, q, k, v, [0, 50, 40])
        self.expect(usage, "cu_seqlens_q ends at 41, and q has 40 tokens", ringattn.varlen, q, k, v, [0, 41])
        self.expect(usage, "out is read-only", attention, q, k, v, out=np.broadcast_to(np.float32(0), (40, 4, 32)))
        batches = np.empty((40, 2, 4, 32), "float32").swapaxes(0, 1)
        self.expect(usage, "out of shape", attention, np.stack([q, q]), np.stack([k, k]), np.stack([v, v]), out=batches)
        self.expect(ringattn.OutOfMemory, "budget", attention, q, k, v, memory_budget=10)
        self.expect(usage, "layout", attention, q, k, v, layout="snake")
        for lengths, words in (([39], "share of the job is fp32 [39, 4, 64]"), ([40, 1], "lengths [40, 1]"), ([], "lengths []")):
            self.expect(usage, words, attention, q, k, v, layout=ringattn.contiguous(lengths, 1))

    def test_ranks_that_differ_end_together(self):
        q, k, v = arrays(64)

        def rank(world):
            return ringattn.attention(q, k, v, world=world, layout="contiguous", softcap=float(world.rank))

        self.expect(ringattn.UnsupportedError, "differ in job", ringattn.run_ranks, 2, rank)
        self.expect(
            ringattn.UsageError,
            "the layout of 2 ranks",
            ringattn.run_ranks,
            2,
            lambda w: ringattn.attention(q, k, v, world=w),
        )

    def test_a_rank_that_fails_ends_the_others(self):
        q, k, v = arrays(64)

        def rank(world):
            if world.rank == 1:
                raise KeyError("of its own")
            return ringattn.attention(q, k, v, world=world, layout="zigzag")

        with self.assertRaises(KeyError):
            ringattn.run_ranks(3, rank)


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32")


class KnownForms(unittest.TestCase):
    """A call with arrays of forms that were there before only names addresses. Nothing tells it from the first one."""

    def test_other_arrays_of_the_same_forms(self):
        fused = [normal(2, 60, 8, 64, seed=seed) for seed in range(4)]
        expected = [ringattn.attention(*(x.copy() for x in (f[:, :, :4], f[:, :, 4:6], f[:, :, 6:]))) for f in fused]
        for f, (out, lse) in zip(fused, expected):
            for _ in range(2):  # views of a fused tensor
                got, got_lse = ringattn.attention(f[:, :, :4], f[:, :, 4:6], f[:, :, 6:])
                assert_same_bits(got, out)
                assert_same_bits(got_lse, lse)
            mine = np.full_like(out, np.nan)
            for _ in range(2):
                mine[...] = np.nan
                same, _ = ringattn.attention(f[:, :, :4], f[:, :, 4:6], f[:, :, 6:], out=mine)
                assert_same_bits(mine, out)
                self.assertTrue(np.shares_memory(same, mine))

    def test_results_are_nobody_else_s(self):
        q = normal(40, 2, 64)
        first, _ = ringattn.attention(q, q, q)
        kept = first.copy()
        second, _ = ringattn.attention(-q, q, q)
        self.assertFalse(np.shares_memory(first, second))
        assert_same_bits(first, kept)

    def test_what_is_shown_as_a_copy_is_copied_each_time(self):
        q = normal(40, 64, 2).transpose(0, 2, 1)  # the numbers of a head lie apart
        for factor in (1, 2, 3):
            x = np.asarray(q) * np.float32(factor)
            x = np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)
            out, _ = ringattn.attention(x, x, x)
            assert_same_bits(out, ringattn.attention(*[np.ascontiguousarray(x)] * 3)[0])

    def test_objects_that_were_dropped_are_made_anew(self):
        q = normal(50, 2, 64)
        out, _ = ringattn.attention(q, q, q)
        for tokens in range(1, 40):  # more than a world keeps
            some = normal(tokens, 2, 64)
            ringattn.attention(some, some, some)
        assert_same_bits(ringattn.attention(q, q, q)[0], out)

    def test_a_world_that_is_closed_is_refused(self):
        (world,) = ringattn.threads_worlds(1)
        q = normal(50, 2, 64)
        for _ in range(2):
            ringattn.attention(q, q, q, world=world)
        world.close()
        with self.assertRaises(ringattn.UsageError):
            ringattn.attention(q, q, q, world=world)

    def test_refusals_are_not_forgotten(self):
        q = normal(50, 2, 64)
        ringattn.attention(q, q, q)
        for _ in range(2):
            for given in ({"mask": "causal "}, {"dropout_p": 0.1}, {"out": np.empty((50, 2, 32), "float32")}):
                with self.assertRaises(ringattn.Error):
                    ringattn.attention(q, q, q, **given)
            readonly = np.empty_like(q)
            readonly.flags.writeable = False
            with self.assertRaises(ringattn.UsageError):
                ringattn.attention(q, q, q, out=readonly)

    def test_steps(self):
        k, v = (normal(3, 40, 2, 64, seed=seed) for seed in (2, 3))
        q, new = normal(30, 3, 4, 64), normal(30, 3, 2, 64, seed=4)
        lengths, other = np.full(3, 5, "int32"), np.full(3, 5, "int32")
        k_other, v_other = k.copy(), v.copy()
        for t in range(30):
            out, lse = ringattn.decode(q[t], k, v, lengths_before=lengths, k_new=new[t], v_new=new[t], update_lengths=True)
            # The query has other strides at each step, so that each step is the first of its form.
            wide = np.empty((3, 4 + t, 64), "float32")[:, :4]
            wide[...] = q[t]
            expected, expected_lse = ringattn.decode(wide, k_other, v_other, lengths_before=other, k_new=new[t], v_new=new[t],
                                                     update_lengths=True)  # fmt: skip
            assert_same_bits(out, expected)
            assert_same_bits(lse, expected_lse)
        self.assertEqual(list(lengths), [35] * 3)
        assert_same_bits(k, k_other)


if __name__ == "__main__":
    unittest.main()
