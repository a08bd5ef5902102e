# SPDX-License-Identifier: Apache-2.0
"""gated_delta() and gated_delta_update(): right by the recurrence in fp64, the same bits on ranks and in graphs."""

import unittest

import numpy as np

import ringattn

try:
    import torch
except ImportError:
    torch = None

KEY, VALUE = 16, 24


def rows(tokens: int, key_decays: bool, seed: int = 0, key_heads: int = 1, value_heads: int = 2):
    made = np.random.default_rng(seed)
    q, k = (made.standard_normal((tokens, key_heads, KEY), np.float32) for _ in range(2))
    v = made.standard_normal((tokens, value_heads, VALUE), np.float32)
    decays = (tokens, value_heads, KEY) if key_decays else (tokens, value_heads)
    log_decay = -0.2 * made.random(decays, np.float32)
    return q, k, v, log_decay, made.random((tokens, value_heads), np.float32)


def recurrence(q, k, v, log_decay, beta, state=None):
    """(out, state) in fp64, with rows of q and k divided by their norms."""
    q, k = (x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    heads = v.shape[1]
    state = np.zeros((heads, KEY, VALUE)) if state is None else state.astype(np.float64)
    out = np.zeros(v.shape)
    for t in range(len(q)):
        for h in range(heads):
            shared = h * q.shape[1] // heads
            decay = np.exp(log_decay[t, h].astype(np.float64))
            state[h] = state[h] * (decay[:, None] if log_decay.ndim == 3 else decay)
            state[h] += beta[t, h] * np.outer(k[t, shared], v[t, h] - state[h].T @ k[t, shared])
            out[t, h] = state[h].T @ q[t, shared] / np.sqrt(KEY)
    return out, state


class GatedDelta(unittest.TestCase):
    def test_values_of_both_rules(self):
        for key_decays in (False, True):
            given = rows(150, key_decays)
            out, states = ringattn.gated_delta(*given, qk_l2norm=True, return_final_states=True)
            expected, state = recurrence(*given)
            np.testing.assert_allclose(out, expected, atol=2e-5)
            np.testing.assert_allclose(states[0], state, atol=2e-5)
            packed, both = ringattn.gated_delta(*given, qk_l2norm=True, cu_seqlens=[0, 40, 40, 150], return_final_states=True,
                                                initial_states=np.stack([states[0]] * 3))  # fmt: skip
            np.testing.assert_allclose(packed[40:], recurrence(*(x[40:] for x in given), states[0])[0], atol=5e-5)
            self.assertEqual(both[1].tobytes(), states[0].tobytes(), "an empty sequence passes its state through")

    def test_a_batch_axis_is_one_of_sequences(self):
        given = rows(40, False)
        out = ringattn.gated_delta(*(np.stack([x[:20], x[20:]]) for x in given), qk_l2norm=True)
        packed = ringattn.gated_delta(*given, qk_l2norm=True, cu_seqlens=[0, 20, 40])
        self.assertEqual(out.tobytes(), packed.tobytes())

    def test_update_goes_on(self):
        for key_decays in (False, True):
            given = rows(30, key_decays, 3)
            _, state = ringattn.gated_delta(*(x[:29] for x in given), qk_l2norm=True, return_final_states=True)
            out = ringattn.gated_delta_update(state, *(x[29:] for x in given), qk_l2norm=True)
            expected, after = recurrence(*given)
            np.testing.assert_allclose(out[0], expected[29], atol=2e-5)
            np.testing.assert_allclose(state[0], after, atol=2e-5)

    def test_ranks_have_the_bits_of_one(self):
        given = rows(3 * 2048 + 5, False, 4)
        one, state = ringattn.gated_delta(*given, qk_l2norm=True, return_final_states=True)
        layout = ringattn.segments([len(one)], 3)
        shards = [[ringattn.shard(x, layout, rank) for x in given] for rank in range(3)]

        def rank_main(world):
            return ringattn.gated_delta(*shards[world.rank], qk_l2norm=True, layout=layout, world=world, return_final_states=True)

        made = ringattn.run_ranks(3, rank_main)
        self.assertEqual(np.concatenate([out for out, _ in made]).tobytes(), one.tobytes())
        self.assertEqual(made[2][1].tobytes(), state.tobytes())

    def test_names_and_shapes_are_refused(self):
        given = rows(10, False)
        with self.assertRaisesRegex(ringattn.UsageError, "log_decay"):
            ringattn.gated_delta(*given[:3], given[3], given[4], g=given[3])
        with self.assertRaisesRegex(ringattn.UsageError, "beta"):
            ringattn.gated_delta(*given[:4], given[4][:9])
        with self.assertRaisesRegex(ringattn.UsageError, "scale is 0"):
            ringattn.gated_delta(*given, scale=0.0)
        for dtype in (np.float64, np.int32, np.complex64):
            for place, name in ((3, "log_decay"), (4, "beta")):
                with self.assertRaisesRegex(ringattn.UsageError, f"{name} is {np.dtype(dtype).name} "):
                    ringattn.gated_delta(*(x.astype(dtype) if i == place else x for i, x in enumerate(given)))
        with self.assertRaisesRegex(ringattn.UsageError, "a job has at most 1,048,576"):
            ringattn.segments([2**62], 2)
        state = np.zeros((10, 2, KEY, VALUE), np.float32)
        for named, text in (({"initial_state": state}, "it is called state there"),
                            ({"out": given[2].astype(np.float16)}, "out is fp16"),
                            ({"state_batch_indices": np.zeros(10, np.int32)}, r"state_batch_indices\[1\] is 0")):  # fmt: skip
            with self.assertRaisesRegex(ringattn.UsageError, text):
                ringattn.gated_delta_update(state, *given, **named)

    @unittest.skipIf(torch is None, "needs PyTorch")
    def test_gates_lie_together(self):
        gates = [torch.zeros(shape) for shape in ((10, 2), (10, 2), (2,), (2,))]
        with self.assertRaisesRegex(ringattn.UsageError, "dt_bias is on meta .a is on cpu.. Move it"):
            ringattn.gated_delta_gates(*gates[:3], gates[3].to("meta"))
        with self.assertRaisesRegex(ringattn.UsageError, "A_log is of layout torch.sparse_coo"):
            ringattn.gated_delta_gates(*gates[:2], gates[2].to_sparse(), gates[3])

    @unittest.skipIf(torch is None, "needs PyTorch")
    def test_rows_of_a_stack_move_between_layouts_with_gradients(self):
        lengths = [2048 + 70, 30, 0]
        x = torch.randn(sum(lengths), 2, 16, generator=torch.Generator().manual_seed(1))
        q, _, _, log_decay, beta = (torch.from_numpy(rows) for rows in rows(len(x), False))

        def stack(world):
            zigzag, segments = ringattn.zigzag(lengths, world.size), ringattn.segments(lengths, world.size)
            mine = ringattn.shard(x, zigzag, world.rank).requires_grad_()
            keys, decays, factors = (ringattn.shard(rows, segments, world.rank) for rows in (q, log_decay, beta))

            def attention(rows):
                return ringattn.varlen(rows, rows, rows, np.cumsum([0, *lengths]), layout=zigzag, world=world)[0]

            def across(rows):  # what is between two layers of attention; the rule has no gradients
                rows = ringattn.reshard(rows, zigzag, "segments", world=world)
                with torch.no_grad():
                    out = ringattn.gated_delta(keys, keys, rows, decays, factors, qk_l2norm=True, layout=segments, world=world)
                return ringattn.reshard(rows * out, segments, zigzag, world=world)

            out = attention(mine)
            out = attention(out + across(out))
            out.square().sum().backward()
            moved = ringattn.reshard(mine, zigzag, "segments", world=world)
            (twice,) = torch.autograd.grad(moved.pow(3).sum(), mine, create_graph=True)
            (second,) = torch.autograd.grad(twice.sum(), mine)
            assert torch.equal(twice.detach(), 3 * mine.detach() ** 2) and torch.equal(second, 6 * mine.detach())
            return out.detach(), mine.grad

        ((one, gradient),) = ringattn.run_ranks(1, stack)
        for ranks in (2, 3, 5):
            parts, gradients = zip(*ringattn.run_ranks(ranks, stack))
            zigzag = ringattn.zigzag(lengths, ranks)
            self.assertTrue(torch.equal(ringattn.unshard(parts, zigzag), one), ranks)
            self.assertTrue(torch.equal(ringattn.unshard(gradients, zigzag), gradient), ranks)

        whole = ringattn.zigzag(lengths, 1)
        graph = torch.compile(lambda rows: ringattn.reshard(2 * rows, whole, "segments") + 1, fullgraph=True, backend="aot_eager")
        given = x.clone().requires_grad_()
        graph(given).sum().backward()
        self.assertTrue(torch.equal(given.grad, torch.full_like(x, 2.0)))
        with self.assertRaisesRegex(ringattn.UnsupportedError, "x requires a gradient .results that autograd records"):
            ringattn.reshard(given, whole, "segments", out=torch.empty_like(x))

    @unittest.skipIf(torch is None, "needs PyTorch")
    def test_gradients_are_refused_by_name(self):
        given = [torch.from_numpy(x) for x in rows(10, False)]
        given[2].requires_grad_()
        with self.assertRaisesRegex(ringattn.UnsupportedError, "v requires a gradient"):
            ringattn.gated_delta(*given)
        with torch.no_grad():
            self.assertEqual(ringattn.gated_delta(*given).shape, given[2].shape)


if __name__ == "__main__":
    unittest.main()
