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

    def test_a_scale_of_0_is_not_the_usual_one(self):
        with self.assertRaises(ringattn.UsageError) as caught:
            testing.check_attention(self.q, self.k, self.v, self.out, softmax_scale=0.0)
        self.assertIn("softmax_scale is 0", str(caught.exception))

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


if __name__ == "__main__":
    unittest.main()
