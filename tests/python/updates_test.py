# SPDX-License-Identifier: Apache-2.0
"""The convolution in front of scans and the updates of one token, from Python over NumPy arrays: what they are by their
definitions, and what they promise to each other."""

import unittest

import numpy as np
import ringattn
from ringattn.testing import assert_same_bits


def normal(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


def conv1d_by_definition(x, weight, bias, silu, front=None):
    """Of one sequence, in fp64. front: [width - 1, channels]."""
    width = weight.shape[1]
    front = np.zeros((width - 1, x.shape[1])) if front is None else front
    rows = np.concatenate([front, x]).astype("float64")
    y = sum(weight[:, i] * rows[i : i + len(x)] for i in range(width)) + (0 if bias is None else bias)
    return y / (1 + np.exp(-y)) if silu else y


class Conv1d(unittest.TestCase):
    def test_it_is_its_definition(self):
        for width in (2, 3, 4):
            x, weight, bias = normal(50, 16), normal(16, width, seed=2), normal(16, seed=3)
            front = normal(2, width - 1, 16, seed=4)
            y, states = ringattn.causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=[0, 2, 50], initial_states=front,
                                               return_final_states=True)  # fmt: skip
            for s, rows in enumerate((slice(0, 2), slice(2, 50))):
                expected = conv1d_by_definition(x[rows], weight, bias, True, front[s])
                np.testing.assert_allclose(y[rows], expected, atol=1e-5)  # fp32 sums of five numbers
                assert_same_bits(states[s], np.concatenate([front[s], x[rows]])[1 - width :])
            np.testing.assert_allclose(
                ringattn.causal_conv1d(x, weight), conv1d_by_definition(x, weight, None, False), atol=1e-5
            )

    def test_batches_and_columns_of_a_projection(self):
        fused, weight = normal(3, 40, 40, dtype="float16"), normal(16, 4, seed=2)
        x = fused[:, :, 8:24]
        y = ringattn.causal_conv1d(x, weight)
        for i in range(3):
            assert_same_bits(y[i], ringattn.causal_conv1d(np.ascontiguousarray(x[i]), weight))
        given = np.empty_like(y)
        self.assertIs(ringattn.causal_conv1d(x, weight, out=given), given)
        assert_same_bits(given, y)

    def test_ranks(self):
        # Empty sequences, whose last tokens pass through, are among them; one job has no tokens at all.
        for lengths in ((0, 70000, 0, 3, 66000, 0), (0, 0)):
            x, weight, bias = normal(sum(lengths), 8), normal(8, 4, seed=2), normal(8, seed=3)
            cu, initial = np.concatenate([[0], np.cumsum(lengths)]), normal(len(lengths), 3, 8, seed=4)
            y, states = ringattn.causal_conv1d(x, weight, bias, cu_seqlens=cu, initial_states=initial, return_final_states=True)
            layout = ringattn.super_segments(lengths, 3)
            for s in (s for s, length in enumerate(lengths) if length == 0):
                assert_same_bits(states[s], initial[s])

            def rank(world, x=x, weight=weight, bias=bias, cu=cu, initial=initial, layout=layout):
                mine, beginning = ringattn.shard(x, layout, world.rank), initial[layout.begins(world.rank)]
                return ringattn.causal_conv1d(mine, weight, bias, cu_seqlens=cu, initial_states=beginning, world=world,
                                              layout=layout, return_final_states=True)  # fmt: skip

            shards = ringattn.run_ranks(3, rank)
            assert_same_bits(ringattn.unshard([rows for rows, _ in shards], layout), y)
            assert_same_bits(np.concatenate([ending for _, ending in shards]), states)

    def test_updates_have_the_bits_of_runs(self):
        x, weight, bias = normal(5, 30, 16, dtype="float16"), normal(16, 4, seed=2), normal(16, seed=3)
        expected, _ = ringattn.causal_conv1d(x, weight, bias, activation="swish", return_final_states=True)
        _, state = ringattn.causal_conv1d(x[:, :20], weight, bias, return_final_states=True)
        for token in range(20, 30):
            y = ringattn.causal_conv1d_update(x[:, token], state, weight, bias, activation="silu")
            assert_same_bits(y, expected[:, token])
        assert_same_bits(state, x[:, -3:])

    def test_slots(self):
        x, weight = normal(4, 16), normal(16, 4, seed=2)
        states = normal(7, 3, 16, seed=3)
        before, slots = states.copy(), np.array([5, -1, 0, 2], "int32")
        y = np.full_like(x, 7)
        ringattn.causal_conv1d_update(x, states, weight, conv_state_indices=slots, out=y)
        for row, slot in enumerate(slots):
            if slot < 0:
                assert_same_bits(y[row], np.zeros_like(y[row]))
                continue
            alone = before[slot : slot + 1].copy()
            assert_same_bits(ringattn.causal_conv1d_update(x[row : row + 1], alone, weight)[0], y[row])
            assert_same_bits(alone[0], states[slot])
        for slot in {1, 3, 4, 6}:
            assert_same_bits(states[slot], before[slot])

    def test_what_is_wrong_is_refused(self):
        x, weight = normal(10, 16), normal(16, 4, seed=2)
        state = np.zeros((10, 3, 16), "float32")
        call, update = ringattn.causal_conv1d, ringattn.causal_conv1d_update
        slots = np.arange(10, dtype="int32")
        for kind, words, do in (
            (ringattn.UsageError, "weight is [8, 4]", lambda: call(x, weight[:8])),
            (ringattn.UsageError, "weight is [16, 1, 4]", lambda: call(x, weight[:, None])),
            (ringattn.UsageError, "weight holds fp16", lambda: call(x, weight.astype("float16"))),
            (ringattn.UsageError, "width 5", lambda: call(x, normal(16, 5))),
            (ringattn.UsageError, "activation is 'gelu'", lambda: call(x, weight, activation="gelu")),
            (ringattn.UsageError, "out is [9, 16]", lambda: call(x, weight, out=x[:9])),
            (ringattn.UsageError, "initial_states is float32 [2, 3, 16]", lambda: call(x, weight, initial_states=state[:2])),
            (ringattn.UsageError, "initial_states is float32 [1, 3, 16] (it should be float16",
             lambda: call(x.astype("float16"), weight, initial_states=state[:1])),
            (ringattn.UnsupportedError, "12 channels", lambda: call(x[:, :12], weight[:12])),
            (ringattn.UnsupportedError, "no seq_idx", lambda: call(x, weight, seq_idx=1)),
            (ringattn.UsageError, "conv_state is float32 [10, 2, 16]", lambda: update(x, state[:, :2], weight)),
            (ringattn.UsageError, "conv_state is float32 [9, 3, 16]", lambda: update(x, state[:9], weight)),
            (ringattn.UsageError, "conv_state is not contiguous",
             lambda: update(x, np.zeros((10, 16, 3), "float32").swapaxes(1, 2), weight)),
            (ringattn.UsageError, "conv_state_indices[9] is 9 (there are 9 slots)",
             lambda: update(x, state[:9], weight, conv_state_indices=slots)),
            (ringattn.UsageError, "conv_state_indices[3] is 1, as conv_state_indices[1] is",
             lambda: update(x, state, weight, conv_state_indices=np.where(slots == 3, 1, slots).astype("int32"))),
            (ringattn.UsageError, "conv_state_indices holds int64",
             lambda: update(x, state, weight, conv_state_indices=slots.astype("int64"))),
            (ringattn.UnsupportedError, "no cache_seqlens", lambda: update(x, state, weight, cache_seqlens=1)),
        ):  # fmt: skip
            with self.assertRaises(kind) as caught:
                do()
            self.assertIn(words, str(caught.exception))
        self.assertFalse(state.any())


class Flags(unittest.TestCase):
    def test_they_are_true_or_false(self):
        token, state = (normal(1, 2, 8), abs(normal(1, 2)), -abs(normal(2)), normal(1, 1, 8), normal(1, 1, 8)), normal(1, 2, 8, 8)
        rows, old = (normal(1, 8), abs(normal(1, 8)), -abs(normal(8, 8)), normal(1, 8), normal(1, 8)), normal(1, 8, 8)
        x, weight = normal(10, 16), normal(16, 4, seed=2)
        k, q = np.zeros((2, 16, 2, 64), "float32"), normal(2, 4, 64)
        step = {"lengths_before": np.array([8, 6], "int32"), "k_new": q[:, :2], "v_new": q[:, :2]}
        before = step["lengths_before"].copy()
        for name, call in (
            ("dt_softplus", lambda **flag: ringattn.ssd(*token, **flag)),
            ("return_final_states", lambda **flag: ringattn.ssd(*token, **flag)),
            ("dt_softplus", lambda **flag: ringattn.ssd_update(state, *token, **flag)),
            ("delta_softplus", lambda **flag: ringattn.selective_scan(*rows, **flag)),
            ("return_last_state", lambda **flag: ringattn.selective_scan(*rows, **flag)),
            ("delta_softplus", lambda **flag: ringattn.selective_update(old, *rows, **flag)),
            ("return_final_states", lambda **flag: ringattn.causal_conv1d(x, weight, **flag)),
            ("update_lengths", lambda **flag: ringattn.decode(q, k, k.copy(), **step, **flag)),
        ):  # fmt: skip
            call(**{name: True})
            step["lengths_before"][:] = before
            for value in (0.5, 1, "0", "no", None):  # also after a call with True, which is kept
                with self.subTest(name, value=value), self.assertRaises(ringattn.UsageError) as caught:
                    call(**{name: value})
                self.assertEqual(str(caught.exception), f"{name} is {value!r} (it is True or False). Pass one of them.")
        assert_same_bits(step["lengths_before"], before)


class EmptySequences(unittest.TestCase):
    def test_their_states_pass_through(self):
        x, dt, A = np.zeros((0, 4, 32), "float32"), np.zeros((0, 4), "float32"), -np.ones(4, "float32")
        B = C = np.zeros((0, 2, 16), "float32")
        for initial in (None, normal(2, 4, 32, 16)):
            y, states = ringattn.ssd(x, dt, A, B, C, cu_seqlens=[0, 0, 0], initial_states=initial, return_final_states=True)
            self.assertEqual(y.shape, x.shape)
            assert_same_bits(states, np.zeros((2, 4, 32, 16), "float32") if initial is None else initial)
        empty = [array[None].repeat(2, 0) for array in (x, dt, B, C)]
        self.assertEqual(ringattn.ssd(empty[0], empty[1], A, empty[2], empty[3]).shape, (2, 0, 4, 32))
        u, rows = np.zeros((3, 24), "float32"), np.zeros((3, 16), "float32")
        initial = normal(3, 24, 16)
        _, last = ringattn.selective_scan(u, u, -np.ones((24, 16), "float32"), rows, rows, cu_seqlens=[0, 0, 3, 3],
                                          initial_states=initial, return_last_state=True)  # fmt: skip
        assert_same_bits(last[[0, 2]], initial[[0, 2]])


class Updates(unittest.TestCase):
    def inputs(self, tokens, sequences=3, heads=4, dim=32, states=16, groups=2):
        return (normal(sequences, tokens, heads, dim), np.abs(normal(sequences, tokens, heads, seed=2)) / 10,
                -np.exp(normal(heads, seed=3)), normal(sequences, tokens, groups, states, seed=4),
                normal(sequences, tokens, groups, states, seed=5))  # fmt: skip

    def test_steps_go_on_where_an_ssm_ended(self):
        x, dt, A, B, C = self.inputs(90)
        named = {"D": normal(4, seed=6), "dt_bias": normal(4, seed=8), "dt_softplus": True, "dt_limit": (0.1, 2.0)}
        z = normal(3, 90, 4, 32, seed=7)
        expected, last = ringattn.ssd(x, dt, A, B, C, z=z, return_final_states=True, **named)
        _, state = ringattn.ssd(*(rows[:, :70] for rows in (x, dt)), A, B[:, :70], C[:, :70], return_final_states=True, **named)
        for t in range(70, 90):
            y = ringattn.ssd_update(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], z=z[:, t], **named)
            np.testing.assert_allclose(y, expected[:, t], rtol=1e-4, atol=1e-4)  # as scans to their definition
        np.testing.assert_allclose(state, last, rtol=1e-4, atol=1e-4)
        self.assertFalse(np.array_equal(state, normal(*state.shape)))

    def test_mamba_1(self):
        u, delta = normal(3, 40, 24), np.abs(normal(3, 40, 24, seed=2)) / 10
        A, B, C = -np.exp(normal(24, 16, seed=3)), normal(3, 40, 16, seed=4), normal(3, 40, 16, seed=5)
        named = {"D": normal(24, seed=6), "delta_bias": normal(24, seed=7), "delta_softplus": True}
        z = normal(3, 40, 24, seed=8)
        expected, last = ringattn.selective_scan(u, delta, A, B, C, z=z, return_last_state=True, **named)
        state = np.zeros((3, 24, 16), "float32")
        for t in range(40):
            y = ringattn.selective_update(state, u[:, t], delta[:, t], A, B[:, t], C[:, t], z=z[:, t], **named)
            np.testing.assert_allclose(y, expected[:, t], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state, last, rtol=1e-4, atol=1e-4)
        given = np.empty_like(y)
        ringattn.selective_update(state.copy(), u[:, 0], delta[:, 0], A, B[:, 0], C[:, 0], out=given)
        again = ringattn.selective_update(state, u[:, 0], delta[:, 0], A, B[:, 0, None], C[:, 0, None])
        assert_same_bits(given, again)

    def test_a_row_keeps_its_bits_in_any_slot_and_batch(self):
        x, dt, A, B, C = (rows[:, 0] if rows.ndim > 1 else rows for rows in self.inputs(1, sequences=4))
        states = normal(9, 4, 32, 16, seed=9)
        before, slots = states.copy(), np.array([8, 3, -5, 0], "int32")
        y = np.full_like(x, 7)
        ringattn.ssd_update(states, x, dt, A, B, C, state_batch_indices=slots, out=y)
        for row, slot in enumerate(slots):
            if slot < 0:
                assert_same_bits(y[row], np.zeros_like(y[row]))
                continue
            one = slice(row, row + 1)
            alone = before[slot : slot + 1].copy()
            assert_same_bits(ringattn.ssd_update(alone, x[one], dt[one], A, B[one], C[one])[0], y[row])
            assert_same_bits(alone[0], states[slot])
        untouched = [slot for slot in range(9) if slot not in slots]
        assert_same_bits(states[untouched], before[untouched])

    def test_what_is_wrong_is_refused(self):
        x, dt, A, B, C = (rows[:, 0] if rows.ndim > 1 else rows for rows in self.inputs(1))
        state = normal(3, 4, 32, 16)
        before, sealed = state.copy(), state.copy()
        sealed.flags.writeable = False
        slots = np.array([0, 1, 3], "int32")
        for kind, words, state_of, more in (
            (ringattn.UsageError, "state is float32 [2, 4, 32, 16]", state[:2], {}),
            (ringattn.UsageError, "state is float16", state.astype("float16"), {}),
            (ringattn.UsageError, "[slots, 4, 32, 16]", state[:, :3], {"state_batch_indices": slots}),
            (ringattn.UsageError, "state_batch_indices[2] is 3 (there are 3 slots)", state, {"state_batch_indices": slots}),
            (ringattn.UsageError, "state is not contiguous", normal(3, 4, 16, 32).swapaxes(2, 3), {}),
            (ringattn.UsageError, "state_batch_indices is [2]", state, {"state_batch_indices": slots[:2]}),
            (ringattn.UsageError, "out is [3, 4, 31]", state, {"out": x[:, :, 1:]}),
            (ringattn.UsageError, "state is read-only", sealed, {}),
            (ringattn.CallError, "no cu_seqlens", state, {"cu_seqlens": [0, 3]}),
        ):
            with self.assertRaises(kind) as caught:
                ringattn.ssd_update(state_of, x, dt, A, B, C, **more)
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(ringattn.UsageError) as caught:
            ringattn.ssd_update(state, x[:, None], dt, A, B, C)
        self.assertIn("Pass one token of each sequence", str(caught.exception))
        assert_same_bits(state, before)


if __name__ == "__main__":
    unittest.main()
