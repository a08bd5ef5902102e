# SPDX-License-Identifier: Apache-2.0
"""The parity kit finds what is wrong, and names the first wrong row."""

import unittest

import numpy as np
import ringattn
from ringattn import testing


class Parity(unittest.TestCase):
    def setUp(self):
        draw = np.random.default_rng(3).standard_normal
        self.q, self.k, self.v = (draw((200, heads, 32), dtype="float32") for heads in (4, 2, 2))
        self.out, self.lse = ringattn.attention(self.q, self.k, self.v)

    def wrong(self, words, out=None, lse=None, **given):
        with self.assertRaises(ringattn.WrongResult) as caught:
            testing.check_attention(self.q, self.k, self.v, self.out if out is None else out, lse, rows=None, **given)
        self.assertIn(words, str(caught.exception))

    def test_a_right_result_passes_with_its_errors(self):
        seen = testing.check_attention(self.q, self.k, self.v, self.out, self.lse, rows=50)
        self.assertIn(seen.rows, range(50, 53))
        self.assertTrue(0 < seen.out_part <= 1 and 0 < seen.lse_part <= 1, seen)

    def test_large_scores_in_fp32_are_right(self):
        q = self.q[:40] * 8  # by the reference's errors alone about every second such job is wrong
        for softcap in (0.0, 50.0):
            out, lse = ringattn.attention(q, self.k[:40], self.v[:40], softcap=softcap)
            testing.check_attention(q, self.k[:40], self.v[:40], out, lse, softcap=softcap)

    def test_the_first_wrong_row_is_named(self):
        spoiled = self.out.copy()
        spoiled[150, 1, 7] += 1e-3
        spoiled[170] = 0
        self.wrong("out is wrong in row 150 (token 150 of sequence 0), head 1, number 7", out=spoiled)
        spoiled[20, 3, 0] = np.nan
        self.wrong("row 20 (token 20 of sequence 0), head 3", out=spoiled)
        spoiled = self.lse.copy()
        spoiled[5, 2] *= np.float32(1 / np.log(2))  # base 2
        self.wrong("lse is wrong in row 5 (token 5 of sequence 0), head 2", lse=spoiled)

    def test_a_small_job_is_checked_whole(self):
        spoiled = self.out[:100].copy()
        spoiled[37, 3, 11] += 0.1
        first = slice(0, 100)
        with self.assertRaises(ringattn.WrongResult) as caught:
            testing.check_attention(self.q[first], self.k[first], self.v[first], spoiled)
        self.assertIn("out is wrong in row 37 (token 37 of sequence 0), head 3, number 11", str(caught.exception))
        whole = testing.check_attention(self.q, self.k, self.v, self.out, self.lse)
        self.assertEqual(whole.rows, 800)
        long = np.zeros((60_000, 1, 8), "float32")  # sampled where there is more to do
        self.assertIn(testing.check_attention(long[:200], long, long, long[:200], mask="full").rows, range(64, 67))
        short = {"cu_seqlens_q": range(0, 9001, 10), "mask": "full"}  # rows take a while however few keys they see
        self.assertIn(testing.check_attention(*[long[:9000]] * 4, **short).rows, range(8192, 8195))

    def test_a_scale_of_0_is_not_the_usual_one(self):
        with self.assertRaises(ringattn.WrongResult):
            testing.check_attention(self.q, self.k, self.v, self.out, softmax_scale=0.0)
        out = ringattn.attention(self.q, self.k, self.v, softmax_scale=0.0)[0]
        testing.check_attention(self.q, self.k, self.v, out, softmax_scale=0.0)

    def test_nan_and_infinity_are_right_where_fp64_has_them(self):
        for dtype in ("float32", "float16"):
            q, k, v = (x.astype(dtype) for x in (self.q, self.k, self.v))
            q[10, 1, 3] = np.nan
            k[50, 0, 7] = np.inf
            v[120, 1, 5] = -np.inf
            out, lse = ringattn.attention(q, k, v, mask=(30, 0))
            self.assertTrue(np.isnan(out[10, 1]).all() and np.isnan(lse[10, 1]))
            self.assertTrue(np.isneginf(out[130, 3, 5]) and np.isfinite(out[130, 3, 4]))
            given = {"mask": (30, 0), "rows": None}
            testing.check_attention(q, k, v, out, lse, **given)
            for words, array, place, value in (
                ("out is wrong in row 10 (token 10 of sequence 0), head 1, number 3", out, (10, 1, 3), 0.0),
                ("out is wrong in row 10 (token 10 of sequence 0), head 1, number 0", out, (10, 1, 0), np.inf),
                ("lse is wrong in row 10 (token 10 of sequence 0), head 1", lse, (10, 1), 0.0),
                ("out is wrong in row 130 (token 130 of sequence 0), head 3, number 5", out, (130, 3, 5), np.inf),
                ("out is wrong in row 130 (token 130 of sequence 0), head 3, number 5", out, (130, 3, 5), 1.0),
                ("out is wrong in row 130 (token 130 of sequence 0), head 3, number 4", out, (130, 3, 4), 7.0),
                ("out is wrong in row 9 (token 9 of sequence 0), head 1, number 0", out, (9, 1, 0), np.nan),
            ):
                right, array[place] = array[place], value
                with self.assertRaises(ringattn.WrongResult) as caught:
                    testing.check_attention(q, k, v, out, lse, **given)
                self.assertIn(words, str(caught.exception))
                array[place] = right

    def test_rows_that_see_no_key(self):
        given = {"q_offsets": [-5], "rows": None}
        out, lse = ringattn.attention(self.q, self.k, self.v, q_offset=-5)
        testing.check_attention(self.q, self.k, self.v, out, lse, **given)
        self.assertTrue(np.isneginf(lse[4, 2]))
        lse[4, 2] = 0
        with self.assertRaises(ringattn.WrongResult) as caught:
            testing.check_attention(self.q, self.k, self.v, out, lse, **given)
        self.assertIn("lse is wrong in row 4 (token 4 of sequence 0), head 2", str(caught.exception))

    def test_large_numbers_are_told_apart_as_far_as_their_type_does(self):
        self.v[60, 0, 7] = 1e4
        out, lse = ringattn.attention(self.q, self.k, self.v)
        testing.check_attention(self.q, self.k, self.v, out, lse, rows=None)
        out[60, 0, 7] *= np.float32(1 + 1e-5)
        self.wrong("row 60 (token 60 of sequence 0), head 0, number 7", out=out)

    def test_rows_of_another_form_are_refused(self):
        q, k, v, out, lse = self.q, self.k, self.v, self.out, self.lse
        for words, given, named in (
            ("q has 3 heads, and k and v have 2", (q[:, :3], k, v, out[:, :3]), {}),
            ("q has 2 heads, and k and v have 4", (k, q, q, out[:, :2]), {}),
            ("q has 4 heads, and k and v have 0", (q, k[:, :0], v[:, :0], out), {}),
            ("q has 2 axes", (q[:, 0], k, v, out), {}),
            ("q, k and v are [200, 4, 32], [200, 2, 32] and [199, 2, 32]", (q, k, v[1:], out), {}),
            ("q, k and v are [200, 4, 32], [200, 2, 31]", (q, k[..., 1:], v, out), {}),
            ("out is [199, 4, 32]", (q, k, v, out[1:]), {}),
            ("lse is [4, 200]", (q, k, v, out, lse.T), {}),
            ("sinks is [2]", (q, k, v, out), {"sinks": np.zeros(2)}),
            ("q has 200 tokens (the sequences have 150)", (q, k, v, out), {"cu_seqlens_q": [0, 50, 150]}),
            ("k has 200 tokens", (q, k, v, out), {"cu_seqlens_k": [0, 190]}),
            ("1 sequences of queries, 2 of keys", (q, k, v, out), {"cu_seqlens_k": [0, 190, 200]}),
            ("q is list", (q.tolist(), k, v, out), {}),
            ("out is int32", (q, k, v, out.astype("int32")), {}),
        ):
            with self.assertRaises(ringattn.UsageError) as caught:
                testing.check_attention(*given, **named)
            self.assertIn(words, str(caught.exception))

    def test_another_mask_scale_or_cut_is_found(self):
        self.wrong("row 0 ", mask="full")
        self.wrong("row 1 ", softmax_scale=0.2)
        self.wrong("row 100 (token 0 of sequence 1)", cu_seqlens_q=[0, 100, 200])

    def test_bits(self):
        self.assertIsNone(testing.first_difference(self.out, self.out.copy()))
        other = self.out.copy()
        other[77, 2, 3] = -other[77, 2, 3]
        self.assertEqual(testing.first_difference(self.out, other), (77, 2, 3))
        with self.assertRaises(ringattn.WrongResult) as caught:
            testing.assert_same_bits(self.out, other, "two runs")
        self.assertIn("two runs differ at [77, 2, 3] (row 77 is the first", str(caught.exception))
        self.assertEqual(testing.first_difference(np.float32([0.0]), np.float32([-0.0])), (0,))
        with self.assertRaises(ringattn.UsageError):
            testing.first_difference(self.out, other[:10])
        with self.assertRaises(ringattn.UsageError):
            testing.check_bits(self.out, self.out, self.out, layouts=("zag",))


if __name__ == "__main__":
    unittest.main()
