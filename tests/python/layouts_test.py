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

    def test_rows_move_between_layouts(self):
        for lengths, ranks in itertools.product(([13], [5, 0, 29], [5000, 3, 40]), (1, 2, 3, 5)):
            zigzag, segments = ringattn.zigzag(lengths, ranks), ringattn.segments(lengths, ranks)
            whole = np.random.default_rng(1).standard_normal((sum(lengths), 2, 3), "float32")

            def move(world, whole=whole, zigzag=zigzag, segments=segments):
                x = ringattn.shard(whole, zigzag, world.rank)[:, ::-1]  # with strides
                there = ringattn.reshard(x, zigzag, segments, world=world)
                back = np.zeros_like(x)
                ringattn.reshard(there, "segments", zigzag, world=world, out=back)
                flags = ringattn.reshard(x[:, 0, 0] > 0, zigzag, "packed", world=world)  # of another type and shape
                return there, back, flags

            there, back, flags = zip(*ringattn.run_ranks(ranks, move))
            expected = whole[:, ::-1]
            self.assertEqual(ringattn.unshard(there, segments).tobytes(), expected.tobytes())
            self.assertEqual(ringattn.unshard(back, zigzag).tobytes(), expected.tobytes())
            np.testing.assert_array_equal(ringattn.unshard(flags, ringattn.packed(lengths, ranks)), whole[:, 1, 0] > 0)
        self.assertIn(0, [len(rows) for rows in there], "a rank without tokens")

    def test_what_can_t_be_moved_is_refused_by_name(self):
        x, one = np.zeros((5, 2), "float32"), ringattn.zigzag([5], 1)
        for words, given, named in (
            ("from_layout is 'zigzag' and to_layout 'packed' (names have", (x, "zigzag", "packed"), {}),
            ("to_layout is 'even' (it is a ringattn.Layout, or the name", (x, one, "even"), {}),
            ("from_layout is None (it is a", (x, None, one), {}),
            ("to_layout is a layout of 2 ranks (the world has 1)", (x, one, ringattn.zigzag([5], 2)), {}),
            ("from_layout has lengths [5] and to_layout [2, 3] (", (x, one, ringattn.packed([2, 3], 1)), {}),
            ("x is [4, 2] (rank 0 has 5 tokens of from_layout)", (x[:4], one, one), {}),
            ("x is [5, 0] (its rows have no elements)", (x[:, :0], one, one), {}),
            ("x is list (", ([1], one, one), {}),
            ("out is float32 [5] (the result is float32 [5, 2])", (x, one, one), {"out": x[:, 0]}),
            ("out is not contiguous (", (x, one, one), {"out": np.zeros((2, 5), "float32").T}),
            ("out overlaps x (", (x, one, one), {"out": x}),
            ("reshard has no layout (", (x, one, one), {"layout": one}),
        ):  # fmt: skip
            with self.subTest(words):
                with self.assertRaises(ringattn.UsageError) as caught:
                    ringattn.reshard(*given, **named)
                self.assertIn(words, str(caught.exception))
                self.assertTrue(caught.exception.problem and caught.exception.why and caught.exception.suggestion)
        layout, rows = ringattn.zigzag([8], 2), np.zeros((4, 6), "float32")
        for words, move in (
            ("bytes of a token's row", lambda world: ringattn.reshard(rows[:, world.rank :], layout, "packed", world=world)),
            ("differ in layouts", lambda world: ringattn.reshard(rows, layout, ("packed", "zigzag")[world.rank], world=world)),
        ):
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                ringattn.run_ranks(2, move)
            self.assertIn(words, str(caught.exception))

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
        for words, call in (  # the large numbers would take hours, or all memory
            ("a stripe of 0 tokens", lambda: ringattn.striped([9], 2, stripe=0)),
            ("are 1099511627776 stripes of 1", lambda: ringattn.striped([2**40], 2, stripe=1)),
            *(("a world of 1099511627776 ranks", lambda make=make: make([9], 2**40))
              for make in (ringattn.contiguous, ringattn.zigzag, ringattn.packed, ringattn.striped, ringattn.segments)),
            ("world is 2.5", lambda: ringattn.zigzag([9], 2.5)),
            ("layout is 'zigzag' (it should be a ringattn.Layout", lambda: ringattn.positions("zigzag", 0)),
            ("layout is None", lambda: ringattn.unshard([], None)),
            ("an array of shape ()", lambda: ringattn.shard(np.float32(1)[...], ringattn.zigzag([9], 1), 0)),
            ("shards are ndarray", lambda: ringattn.unshard(np.array(3), ringattn.zigzag([9], 1))),
            ("rank 0 has no rows", lambda: ringattn.unshard([np.float32(1)[...]], ringattn.zigzag([9], 1))),
        ):  # fmt: skip
            with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
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
