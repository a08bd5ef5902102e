# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors on the CPU: the bits of NumPy's arrays, operators that torch.compile keeps whole, and refused gradients."""

import importlib.util
import sys
import types
import unittest
from unittest import mock

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import numpy as np
import ringattn
import ringattn.torch_ops  # noqa: F401, registers the operators
import torch
from ringattn import _streams
from ringattn.testing import assert_same_bits, check_attention


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Eager(unittest.TestCase):
    def test_tensors_have_the_bits_of_arrays(self):
        q, k, v = normal(200, 4, 64), normal(200, 2, 64, seed=2), normal(200, 2, 32, seed=3)
        out, lse = ringattn.attention(q, k, v, mask=(50, 0))
        self.assertEqual((out.dtype, lse.dtype, tuple(lse.shape)), (torch.float32, torch.float32, (200, 4)))
        expected = ringattn.attention(q.numpy(), k.numpy(), v.numpy(), mask=(50, 0))
        assert_same_bits(out.numpy(), expected[0])
        assert_same_bits(lse.numpy(), expected[1])

    def test_it_agrees_with_sdpa_in_every_type(self):
        for dtype, atol in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
            q, k, v = (normal(2, heads, 300, 64, seed=heads, dtype=dtype) for heads in (4, 2, 2))
            out, lse = ringattn.attention(*(x.transpose(1, 2) for x in (q, k, v)))
            wide = [x.float().repeat_interleave(4 // x.shape[1], 1) for x in (q, k, v)]
            expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
            torch.testing.assert_close(out.transpose(1, 2).float(), expected, atol=atol, rtol=0)
            check_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), out[0], lse[0])

    def test_shards_of_tensors(self):
        q, k, v = (normal(400, heads, 64, seed=heads, dtype=torch.bfloat16) for heads in (4, 2, 2))
        out, lse = ringattn.attention(q, k, v)
        layout = ringattn.striped([400], 3, stripe=64)

        def rank(world):
            return ringattn.attention(*(ringattn.shard(x, layout, world.rank) for x in (q, k, v)), world=world,
                                      layout=layout)  # fmt: skip

        shards = ringattn.run_ranks(3, rank)
        assert_same_bits(ringattn.unshard([o for o, _ in shards], layout), out)
        assert_same_bits(ringattn.unshard([x for _, x in shards], layout), lse)

    def test_gradients_and_other_devices_are_refused(self):
        q, k, v = (normal(40, 2, 64, seed=i) for i in range(3))
        with torch.no_grad():
            x, state, weight = normal(3, 8), torch.zeros(3, 3, 8), torch.nn.Parameter(normal(8, 4))
            y = [ringattn.causal_conv1d_update(x, state.clone(), weight) for _ in range(2)]
            assert_same_bits(*y)
        with self.assertRaises(ringattn.UnsupportedError) as caught:
            ringattn.causal_conv1d_update(x, state, weight)
        self.assertIn(f"weight requires a gradient ({ringattn._gradients.WITHOUT}", str(caught.exception))
        with self.assertRaises(ringattn.UnsupportedError):
            ringattn.attention(*(x.detach().to("meta") for x in (q, k, v)))
        with self.assertRaises(ringattn.UsageError):
            ringattn.attention(q, k.detach().numpy(), v)
        for place in range(3):
            rows = [x.detach().to_sparse() if i == place else x.detach() for i, x in enumerate((q, k, v))]
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.attention(*rows)
            self.assertIn(f"{'qkv'[place]} is of layout torch.sparse_coo", str(caught.exception))


class Event:
    passed = frozenset()

    def record(self, stream):
        self.passed = frozenset(stream.passed)


class Stream:
    """A stream of a GPU that is not there. passed: the work after which its next work begins."""

    def __init__(self, handle, stream_id=1):
        self.handle, self.stream_id, self.passed = handle, stream_id, set()

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.passed |= event.passed


class Streams(unittest.TestCase):
    def setUp(self):
        self.default, self.order, self.done, self.graphs = Stream(0, 0), _streams.StreamOrder(), 0, []
        self.prepared = types.SimpleNamespace(in_graph=False, world=lambda: None)
        self.cuda = types.SimpleNamespace(
            Event=Event, current_device=lambda: 0, current_stream=lambda _: self.current, default_stream=lambda _: self.default,
            is_current_stream_capturing=lambda: self.captured)  # fmt: skip
        for name, value in (("loaded_torch", lambda: types.SimpleNamespace(cuda=self.cuda)), ("_in_graphs", self.graphs)):
            patch = mock.patch.object(_streams, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def call(self, stream, error=None, captured=False):
        """A call of work that must begin after all before it."""
        self.current, self.captured = stream, captured

        def work(handle):
            self.assertEqual(handle, stream.handle)
            if not captured:
                self.assertEqual(stream.passed, set(range(self.done)))
                stream.passed.add(self.done)
                self.done += 1
            if error is not None:
                raise error

        self.order.call(self.prepared, types.SimpleNamespace(index=0), stream.handle, work)

    def test_calls_on_several_streams_are_ordered(self):
        streams = self.default, Stream(7), Stream(8)
        for i in (0, 1, 2, 1, 1, 0, 2, 2, 0, 1):
            self.call(streams[i])

    def test_work_of_a_call_that_fails_is_waited_for(self):
        for error in (ringattn.PeerError("a rank is gone"), KeyboardInterrupt()):
            with self.assertRaises(type(error)):
                self.call(Stream(7), error)
            self.call(Stream(8))

    def test_a_handle_may_be_another_stream_s(self):
        for _ in range(3):  # one after the other, or cudaStreamPerThread of several threads
            self.call(Stream(0x7F00, 0x7F00))

    def test_graphs_keep_what_they_hold(self):
        with self.assertRaises(ringattn.UnsupportedError):
            self.call(Stream(7), ringattn.UnsupportedError("a graph can't hold this run"), captured=True)
        self.assertEqual((self.prepared.in_graph, self.graphs), (False, []))
        for _ in range(2):
            self.call(Stream(7), captured=True)
        self.assertEqual((self.prepared.in_graph, self.graphs), (True, [(self.prepared, None)]))


class Compiled(unittest.TestCase):
    """Each op inside of a compiled function, in one graph, with its eager bits."""

    def check(self, function, *inputs):
        with torch.no_grad():
            expected = function(*[x.clone() for x in inputs])
            torch.compiler.reset()
            compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
            got = compiled(*[x.clone() for x in inputs])
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(a, b)

    def test_attention_and_varlen(self):
        q, k, v = normal(2, 100, 4, 64), normal(2, 100, 2, 64, seed=2), normal(2, 100, 2, 32, seed=3)
        sinks = normal(4)
        self.check(lambda q, k, v: ringattn.attention(q * 2, k, v, mask="full", softcap=20.0), q, k, v)
        self.check(lambda q, k, v, sinks: ringattn.attention(q, k, v, mask=(9, 2), sinks=sinks), q, k, v, sinks)
        cu = torch.tensor([0, 30, 100])
        self.check(lambda q, k, v: ringattn.varlen(q + 1, k, v, cu, out=torch.empty(100, 4, 32)), q[0], k[0], v[0])

    def test_decoding_writes_into_the_cache(self):
        q, new = normal(3, 4, 64), normal(3, 2, 64, seed=2)

        def step(q, new, k, v, lengths):
            out, lse = ringattn.decode(q, k, v, lengths_before=lengths, k_new=new, v_new=new, update_lengths=True)
            return out + 1, lse, k, v, lengths

        caches = normal(3, 50, 2, 64, seed=3), normal(3, 50, 2, 64, seed=4)
        self.check(step, q, new, *caches, torch.tensor([7, 20, 49], dtype=torch.int32))

    def test_compressed_keys_and_values(self):
        q, k, v = (normal(2, 70, heads, 64, seed=heads, dtype=torch.bfloat16) for heads in (4, 2, 2))
        small = ringattn.compress(k, v, ("fp8 head", "int4_token group 32"))
        parts = [part for x in small for part in x.parts]
        steps = torch.tensor([7, 69], dtype=torch.int32)

        def keys(parts):
            made = []
            for x in small:
                names = [*x.streams, *x.tables]
                named, parts = dict(zip(names, parts)), parts[len(names) :]
                tables = {name: named.pop(name) for name in x.tables}
                made.append(ringattn.Compressed(x.format, x.shape, x.dtype, named, tables, x.lengths))
            return made

        def whole(q, *parts):
            k, v = keys(parts)
            out, lse = ringattn.attention(q * 2, k, v)
            return out + 1, lse, ringattn.decompress(k)

        def step(q, new, lengths, *parts):
            k, v = keys(parts)
            out, lse = ringattn.decode(q, k, v, lengths_before=lengths, k_new=new, v_new=new, update_lengths=True)
            return out, lse, lengths, *parts

        def squeeze(k, v):
            return [part for x in ringattn.compress(k, v, "int4") for part in x.parts]

        self.check(whole, q, *parts)
        self.check(step, q[:, 0], k[:, 0], steps, *parts)
        self.check(squeeze, k, v)

    def test_latents(self):
        q, latent, k_rope = normal(40, 2, 48), normal(40, 64, seed=2), normal(40, 16, seed=3)
        w_uk, w_uv = normal(2, 32, 64, seed=4), normal(2, 24, 64, seed=5)
        self.check(lambda *given: ringattn.mla(*given, form="expanded"), q, latent, k_rope, w_uk, w_uv)
        cache, lengths = normal(5, 64, 80, seed=6), torch.tensor([3, 64, 1, 9, 30], dtype=torch.int32)
        self.check(
            lambda *given: ringattn.mla_decode(*given, rope_dim=16), normal(5, 2, 48), cache, lengths, w_uk, w_uv
        )

    def test_batched_gemm(self):
        rows, matrices = normal(2, 20, 4, 64), normal(4, 128, 64, seed=2)

        def there_and_back(rows, matrices):
            out = ringattn.batched_gemm(rows * 2, matrices)
            back = ringattn.batched_gemm(out[0], matrices.transpose(1, 2)) + 1
            return out, back, ringattn.batched_gemm(rows[0, :, 0], matrices)

        self.check(there_and_back, rows, matrices)
        self.check(there_and_back, rows.bfloat16(), matrices.bfloat16())

    def test_ssm(self):
        x, dt, A = normal(100, 4, 32), normal(100, 4, seed=2).abs(), -normal(4, seed=3).exp()
        B, C = normal(100, 2, 16, seed=4), normal(100, 2, 16, seed=5)
        self.check(lambda *given: ringattn.ssd(*given, return_final_states=True), x, dt, A, B, C)
        self.check(lambda *given: (ringattn.ssd(*given, dt_softplus=True, dt_limit=(0.1, 1.0)) * 2,), x, dt, A, B, C)
        # Tokens after heads, as a view: what operators give is contiguous.
        turned = x.transpose(0, 1).contiguous().transpose(0, 1)
        self.check(lambda *given: (ringattn.ssd(*given).transpose(0, 1) + 1,), turned, dt, A, B, C)
        u, delta, A = normal(2, 50, 24), normal(2, 50, 24, seed=2).abs(), -normal(24, 16, seed=3).exp()
        B, C, z = normal(2, 50, 16, seed=4), normal(2, 50, 16, seed=5), normal(2, 50, 24, seed=6)

        def selective(u, delta, A, B, C, z):
            return ringattn.selective_scan(u * 2, delta, A, B, C, z=z, return_last_state=True)

        self.check(selective, u, delta, A, B, C, z)

    def test_conv1d(self):
        x, weight, bias, front = normal(2, 50, 16), normal(16, 4, seed=2), normal(16, seed=3), normal(2, 3, 16, seed=4)

        def layer(x, weight, bias, front):
            y, states = ringattn.causal_conv1d(x, weight, bias, activation="silu", initial_states=front,
                                               return_final_states=True)  # fmt: skip
            return y + 1, states, ringattn.causal_conv1d(x.reshape(100, 16), weight, cu_seqlens=[0, 30, 100])

        def step(x, weight, bias, front):
            y = ringattn.causal_conv1d_update(x[:, 0] * 2, front, weight, bias, activation="silu")
            return y + 1, front

        self.check(layer, x, weight, bias, front)
        self.check(step, x, weight, bias, front)

    def test_updates_write_into_the_states(self):
        x, dt, A, state = normal(3, 4, 32), normal(3, 4, seed=2).abs(), -normal(4, seed=3).exp(), normal(5, 4, 32, 16, seed=7)
        B, C, slots = normal(3, 2, 16, seed=4), normal(3, 2, 16, seed=5), torch.tensor([4, -1, 0], dtype=torch.int32)

        def step(state, x, dt, A, B, C, slots):
            out = torch.zeros_like(x)
            y = ringattn.ssd_update(state, x * 2, dt, A, B, C, dt_softplus=True, state_batch_indices=slots, out=out)
            return torch.where((slots >= 0)[:, None, None], y + 1, 0), state

        def channels(state, u, delta, A, B, C):
            return ringattn.selective_update(state, u, delta, A, B, C, z=u) + 1, state

        self.check(step, state, x, dt, A, B, C, slots)
        u, delta, A = normal(3, 24), normal(3, 24, seed=2).abs(), -normal(24, 16, seed=3).exp()
        self.check(channels, normal(3, 24, 16, seed=7), u, delta, A, B[:, 0], C[:, 0])

    def test_evictions(self):
        q, k, v = (normal(2, 60, heads, 64, seed=heads) for heads in (4, 2, 3))

        def shorten(q, k, v):
            kept = ringattn.evict(k, v, "snapkv:window=8", ratio=0.5, q=q)
            placed = {"k_positions": kept.k_positions, "k_lengths": kept.k_lengths}
            out, lse = ringattn.attention(q, kept.k, kept.v, mask=(20, 0), **placed)
            return kept.k, kept.v, kept.k_positions, out + 1, lse

        def packed(k, v):
            kept = ringattn.evict(k, v, "knorm", ratio=0.25, cu_seqlens=[0, 20, 60])
            placed = {"k_positions": kept.k_positions, "k_lengths": kept.k_lengths}
            return ringattn.varlen(k, kept.k, kept.v, [0, 20, 60], kept.cu_seqlens, **placed)

        v = v[:, :, :2].contiguous()
        self.check(shorten, q, k, v)
        self.check(packed, k[0], v[0])
        self.assertEqual(ringattn.evict(k, v, "knorm").k_positions.dtype, torch.int32)

    def test_other_lengths_need_no_other_graph(self):
        function = torch.compile(
            lambda q: ringattn.attention(q, q, q)[0], fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for tokens in (50, 70, 33):
            q = normal(tokens, 2, 64)
            assert_same_bits(function(q), ringattn.attention(q, q, q)[0])

        def shorten(k):
            kept = ringattn.evict(k, k, "knorm")
            return kept.k, torch.tensor(kept.cu_seqlens)

        function = torch.compile(shorten, fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (50, 70, 33):
            k = normal(tokens, 2, 64)
            for got, expected in zip(function(k), shorten(k)):
                self.assertTrue(torch.equal(got, expected))

    def test_what_eager_refuses_is_refused(self):
        q = normal(40, 2, 64)
        with self.assertRaises(Exception) as caught:
            torch.compile(lambda q: ringattn.attention(q, q, q, dropout_p=0.1), backend="eager")(q)
        self.assertIn("dropout_p", str(caught.exception))
        with self.assertRaises(Exception) as caught:
            torch.compile(lambda q: ringattn.batched_gemm(q, q), backend="eager")(q.requires_grad_())
        self.assertIn("requires a gradient", str(caught.exception))


class Bfloat16(unittest.TestCase):
    def test_numpy_s_bfloat16_has_the_same_bits(self):
        if importlib.util.find_spec("ml_dtypes") is None:
            self.skipTest("needs ml_dtypes")
        import ml_dtypes

        q = normal(90, 2, 64, dtype=torch.bfloat16)
        array = q.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        out, _ = ringattn.attention(array, array, array)
        assert_same_bits(out.view(np.int16), ringattn.attention(q, q, q)[0].view(torch.int16).numpy())


if __name__ == "__main__":
    unittest.main()
