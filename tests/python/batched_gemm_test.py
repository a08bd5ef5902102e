# SPDX-License-Identifier: Apache-2.0
"""batched_gemm() over NumPy arrays: the sum by its definition, the same bits however rows, heads and strides are, and refusals.
What latent attention makes of it is in ops_test.py."""

import unittest

import numpy as np
import ringattn
from ringattn.testing import assert_same_bits

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

HEADS = 4


def normal(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


class BatchedGemms(unittest.TestCase):
    def test_it_is_the_sum_rounded_once(self):
        types = ["float32", "float16"] if ml_dtypes is None else ["float32", "float16", ml_dtypes.bfloat16]
        for dtype in types:
            rows, weights = normal(30, HEADS, 64, dtype=dtype), normal(HEADS, 24, 64, seed=2, dtype=dtype)
            out = ringattn.batched_gemm(rows, weights)
            self.assertEqual((out.shape, out.dtype), ((30, HEADS, 24), rows.dtype))
            exact = np.einsum("thi,hoi->tho", rows.astype("float64"), weights.astype("float64"))
            step = {"float32": 2**-24, "float16": 2**-11}.get(dtype, 2**-8)
            np.testing.assert_allclose(out.astype("float64"), exact, rtol=1.01 * step, atol=64 * 2**-20)
            # Small integers: a sum is exact, and what is left is one rounding to even.
            whole = [np.rint(3 * x.astype("float32")) for x in (rows, weights)]
            assert_same_bits(ringattn.batched_gemm(*(x.astype(dtype) for x in whole)),
                             (np.einsum("thi,hoi->tho", *whole) + np.float32(0)).astype(dtype))  # fmt: skip

    def test_rows_and_heads_and_strides_change_no_bit(self):
        rows, weights = normal(2, 35, HEADS, 96)[..., :64], normal(HEADS, 24, 64, seed=2)
        self.assertFalse(rows.flags.c_contiguous)
        out = ringattn.batched_gemm(rows, weights)
        self.assertEqual(out.shape, (2, 35, HEADS, 24))
        flat = rows.reshape(70, HEADS, 64)
        assert_same_bits(ringattn.batched_gemm(flat, weights).reshape(out.shape), out)
        for row in (0, 1, 69):
            assert_same_bits(ringattn.batched_gemm(flat[row : row + 1], weights), out.reshape(70, HEADS, 24)[row : row + 1])
        for head in range(HEADS):
            assert_same_bits(ringattn.batched_gemm(flat[:, head : head + 1], weights[head : head + 1])[:, 0],
                             out[..., head, :].reshape(70, 24))  # fmt: skip
        turned = np.ascontiguousarray(weights.swapaxes(1, 2)).swapaxes(1, 2)
        assert_same_bits(ringattn.batched_gemm(rows, turned), out)
        assert_same_bits(ringattn.batched_gemm(rows.swapaxes(0, 1), weights), out.swapaxes(0, 1))
        assert_same_bits(ringattn.batched_gemm(rows, weights, threads=2), out)
        given = np.full((2, 35, HEADS, 32), np.nan, "float32")
        into = given.reshape(70, HEADS, 32)[..., :24]
        self.assertIs(ringattn.batched_gemm(flat, weights, out=into), into)
        assert_same_bits(np.ascontiguousarray(given[..., :24]), out)
        self.assertTrue(np.isnan(given[..., 24:]).all())
        dense = np.empty_like(out)
        self.assertIs(ringattn.batched_gemm(rows, weights, out=dense), dense)
        assert_same_bits(dense, out)
        self.assertEqual(ringattn.batched_gemm(flat[:0], weights).shape, (0, HEADS, 24))

    def test_heads_may_share_a_row(self):
        latent, w_uv = normal(50, 64), normal(HEADS, 24, 64, seed=2)
        out = ringattn.batched_gemm(latent, w_uv)
        self.assertEqual(out.shape, (50, HEADS, 24))
        assert_same_bits(ringattn.batched_gemm(latent[:, None], w_uv), out)
        again = np.empty_like(out)  # a call of known forms, with arrays that lie elsewhere
        for rows, expected in ((latent.copy(), out), (latent[::-1].copy(), out[::-1]), (latent.copy(), out)):
            assert_same_bits(ringattn.batched_gemm(rows, w_uv.copy()), expected)
            self.assertIs(ringattn.batched_gemm(rows, w_uv, out=again), again)
            assert_same_bits(again, expected)
        assert_same_bits(ringattn.batched_gemm(np.repeat(latent[:, None], HEADS, 1), w_uv), out)

    def test_nan_stays_in_its_row_and_column(self):
        rows, weights = normal(9, HEADS, 64), normal(HEADS, 24, 64, seed=2)
        clean = ringattn.batched_gemm(rows, weights)
        rows[3, 1, 63], weights[2, 5, 0] = np.nan, np.nan
        out = ringattn.batched_gemm(rows, weights)
        touched = np.zeros(out.shape, bool)
        touched[3, 1], touched[:, 2, 5] = True, True
        assert_same_bits(np.isnan(out), touched)
        assert_same_bits(out[~touched], clean[~touched])

    def test_ranks_multiply_the_rows_that_they_have(self):
        rows, weights = normal(101, HEADS, 64), normal(HEADS, 24, 64, seed=2)
        layout = ringattn.zigzag([101], 3)
        shards = ringattn.run_ranks(
            3, lambda world: ringattn.batched_gemm(ringattn.shard(rows, layout, world.rank), weights)
        )
        assert_same_bits(ringattn.unshard(shards, layout), ringattn.batched_gemm(rows, weights))

    def test_what_does_not_fit_is_refused(self):
        rows, weights = normal(9, HEADS, 64), normal(HEADS, 24, 64, seed=2)
        product = ringattn.batched_gemm
        for words, call in (
            ("rows are fp32 [9, 4, 64] (they should be fp32 [rows, 4 or 1, 24])", lambda: product(rows, weights.swapaxes(1, 2))),
            ("rows are fp32 [9, 3, 64]", lambda: product(rows[:, :3], weights)),
            ("weights are fp16 [4, 24, 64] (the batched GEMM was made for fp32",
             lambda: product(rows, weights.astype("float16"))),
            ("axis 2 of weights has a stride of 2", lambda: product(rows[..., :32], weights[..., ::2])),
            ("out is [9, 4, 64]", lambda: product(rows, weights, out=np.empty((9, 4, 64), "float32"))),
            ("out is fp16 [9, 4, 24]", lambda: product(rows, weights, out=np.empty((9, 4, 24), "float16"))),
            ("out is read-only", lambda: product(rows, weights, out=np.broadcast_to(np.float32(0), (9, 4, 24)))),
            ("a batched GEMM of 0 heads", lambda: product(rows[:, :0], weights[:0])),
            ("rows are int32", lambda: product(rows.astype("int32"), weights.astype("int32"))),
        ):
            with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        for words, some in (("k 63 (supported: multiples of 8)", weights[..., :63]), ("n 23", weights[:, :23])):
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                product(rows[..., : some.shape[-1]], some)
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
