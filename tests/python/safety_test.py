# SPDX-License-Identifier: Apache-2.0
"""What would read or write memory that is not the caller's, if it were not refused: lists of other lengths than the sequences,
and arrays that can't be written to."""

import unittest

import numpy as np
import ringattn


def normal(*shape, dtype="float32"):
    return np.random.default_rng(1).standard_normal(shape, dtype="float32").astype(dtype)


class Sequences(unittest.TestCase):
    def refuses(self, words, call, *arguments, **named):
        with self.assertRaises(ringattn.UsageError) as caught:
            call(*arguments, **named)
        self.assertIn(words, str(caught.exception))

    def test_queries_and_keys_are_of_as_many_sequences(self):
        heads = (normal(2, 16, 64), normal(2, 16, 64))
        for count in (2, 5, 100, 3000):
            cu_q, wrong = range(count + 1), f"there are {count} sequences of queries and 1 of keys (each has both)"
            q, k = normal(count, 2, 64), normal(100, 2, 64)
            self.refuses(wrong, ringattn.evict, k, k, "snapkv", q=q, cu_seqlens=[0, 100], cu_seqlens_q=cu_q)
            self.refuses(wrong, ringattn.varlen, q, k, k, cu_q, [0, 100])
            self.refuses(wrong, ringattn.mla, normal(count, 2, 24), normal(100, 64), normal(100, 8), *heads, cu_seqlens_q=cu_q,
                         cu_seqlens_k=[0, 100])  # fmt: skip
        self.refuses("there are 1 sequences of queries and 2 of keys", ringattn.mla, normal(5, 2, 24), normal(100, 64),
                     normal(100, 8), *heads, cu_seqlens_k=[0, 50, 100])  # fmt: skip

    def test_lists_have_a_number_for_each_sequence(self):
        q, places = normal(6, 2, 64), np.arange(6, dtype="int32")[:, None]
        cu = [0, 2, 4, 6]
        for given in ([0], [0, 0], [0, 0, 0, 0]):
            wrong = f"has {len(given)} numbers (there are 3 sequences)"
            self.refuses(f"q_offsets {wrong}", ringattn.varlen, q, q, q, cu, q_offsets=given)
            self.refuses(f"k_lengths {wrong}", ringattn.varlen, q, q, q, cu, k_positions=places, k_lengths=given)
        self.refuses("k_lengths has 1 numbers", ringattn.attention, normal(2, 3, 2, 64), normal(2, 3, 2, 64), normal(2, 3, 2, 64),
                     k_positions=places.reshape(2, 3, 1), k_lengths=[3])  # fmt: skip


if __name__ == "__main__":
    unittest.main()
