# SPDX-License-Identifier: Apache-2.0
"""Layouts: who has which tokens, as other systems deal them, and shards that come together again."""

import itertools
import unittest

import numpy as np
import ringattn


class Layouts(unittest.TestCase):
    def test_runs_are_those_of_other_systems(self):
        self.assertEqual(ringattn.contiguous([8, 6], 2).runs, (((0, 0, 4), (1, 0, 3)), ((0, 4, 8), (1, 3, 6))))
        self.assertEqual(ringattn.zigzag([8], 2).runs, (((0, 0, 2), (0, 6, 8)), ((0, 2, 6),)))
        self.assertEqual(
            ringattn.packed([3, 7, 2], 3).runs, (((0, 0, 3), (1, 0, 1)), ((1, 1, 5),), ((1, 5, 7), (2, 0, 2)))
        )
        self.assertEqual(ringattn.striped([10, 3], 2, stripe=2).runs, (((0, 0, 2), (0, 6, 10)), ((0, 2, 6), (1, 0, 3))))
        # Uneven: the first parts have one token more.
        self.assertEqual(ringattn.contiguous([7], 3).runs, (((0, 0, 3),), ((0, 3, 5),), ((0, 5, 7),)))
        self.assertEqual(ringattn.zigzag([2], 4).tokens(3), 0)

    def test_shards_come_together_again(self):
        for lengths, world, deal in itertools.product(
            ([13], [5, 0, 29], [64, 64]),
            (1, 2, 3, 7),
            (ringattn.contiguous, ringattn.zigzag, ringattn.striped, ringattn.packed),
        ):
            layout = deal(lengths, world, **({"stripe": 4} if deal is ringattn.striped else {}))
            whole = np.arange(sum(lengths) * 6).reshape(-1, 2, 3)
            shards = [ringattn.shard(whole, layout, rank) for rank in range(world)]
            self.assertEqual([len(rows) for rows in shards], [layout.tokens(rank) for rank in range(world)])
            np.testing.assert_array_equal(ringattn.unshard(shards, layout), whole)
            tokens = np.concatenate([np.arange(n) for n in lengths])
            np.testing.assert_array_equal(
                ringattn.unshard([ringattn.positions(layout, r) for r in range(world)], layout), tokens
            )

    def test_batches_keep_their_axis_where_shards_are_equal(self):
        whole = np.arange(2 * 12 * 3).reshape(2, 12, 3)
        layout = ringattn.zigzag([12, 12], 2)
        first = ringattn.shard(whole, layout, 0)
        np.testing.assert_array_equal(first, whole[:, [0, 1, 2, 9, 10, 11]])
        np.testing.assert_array_equal(
            ringattn.unshard([first, ringattn.shard(whole, layout, 1)], layout), whole.reshape(24, 3)
        )
        uneven = ringattn.striped([12, 12], 2, stripe=8)
        self.assertEqual(ringattn.shard(whole, uneven, 0).shape, (8 + 4, 3))

    def test_runs_that_are_no_layout_are_refused(self):
        for runs, words in (
            ([[(0, 0, 4)], [(0, 5, 9)]], "tokens 4 to 5"),
            ([[(0, 0, 5)], [(0, 4, 9)]], "belong to no rank, or to two"),
            ([[(0, 4, 9), (0, 0, 4)], []], "comes before"),
            ([[(0, 0, 9)], [(1, 0, 2)]], "sequence 1"),
            ([[(0, 0, 8)], []], "end at 8"),
            ([[(0, 0, 8.5)], [(0, 8.5, 9)]], "whole numbers (sequence, begin, end)"),
            ([0, 9], "runs are [0, 9]"),
        ):
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.Layout([9], runs)
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(ringattn.UsageError):
            ringattn.striped([9], 2, stripe=0)
        layout = ringattn.contiguous([9], 3)
        with self.assertRaises(ringattn.UsageError):
            ringattn.shard(np.zeros((8, 2)), layout, 0)
        for wrong_layout, rank in (("zigzag", 0), (layout, 3), (layout, -1)):
            with self.assertRaises(ringattn.UsageError):
                ringattn.shard(np.zeros((9, 2)), wrong_layout, rank)
        with self.assertRaises(ringattn.UsageError):
            ringattn.unshard([np.zeros((3, 2))] * 2, layout)


if __name__ == "__main__":
    unittest.main()
