# SPDX-License-Identifier: Apache-2.0
"""Attention from Python, over NumPy arrays: right, with the same bits over ranks, layouts, strides and batches, and what is
refused."""

import unittest

import numpy as np
import ringattn
from ringattn import testing

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
            return ringattn.attention(*mine, world=world, layout=of_q, key_layout=of_k, lengths=(100, 700))

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
        self.assertRegex(str(caught.exception), r"^[^()].* \(.+\)\. .+\.$", "problem (why). remedy.")
        self.assertIsInstance(caught.exception, ringattn.Error)

    def test_what_contradicts_itself_or_is_not_computed(self):
        q, k, v = arrays(40)
        usage, unsupported = ringattn.UsageError, ringattn.UnsupportedError
        attention = ringattn.attention
        self.expect(unsupported, "dropout_p", attention, q, k, v, dropout_p=0.1)
        self.expect(unsupported, "alibi_slopes", ringattn.varlen, q, k, v, [0, 40], alibi_slopes=None)
        self.expect(usage, "mask 'casual'", attention, q, k, v, mask="casual")
        self.expect(usage, "dtype is fp64", attention, q.astype("float64"), k, v)
        self.expect(usage, "k is fp16", attention, q, k.astype("float16"), v)
        self.expect(usage, "K has 3 heads", attention, q, k[:, [0, 0, 1]], v[:, [0, 0, 1]])
        self.expect(usage, "v is list", attention, q, k, v.tolist())
        self.expect(usage, "axes", attention, q[None], k, v)
        self.expect(usage, "cu_seqlens", ringattn.varlen, q, k, v, [0, 50, 40])
        self.expect(usage, "[41, 4, 64]", ringattn.varlen, q, k, v, [0, 41])
        self.expect(usage, "out is read-only", attention, q, k, v, out=np.broadcast_to(np.float32(0), (40, 4, 32)))
        batches = np.empty((40, 2, 4, 32), "float32").swapaxes(0, 1)
        self.expect(usage, "out of shape", attention, np.stack([q, q]), np.stack([k, k]), np.stack([v, v]), out=batches)
        self.expect(ringattn.OutOfMemory, "budget", attention, q, k, v, memory_budget=10)
        self.expect(usage, "layout", attention, q, k, v, layout="snake")

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


if __name__ == "__main__":
    unittest.main()
