# SPDX-License-Identifier: Apache-2.0
"""Gradients of causal_conv1d(): against PyTorch in fp64, with the bits of one rank on several, and in compiled functions."""

import importlib.util
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.torch_ops  # registers the operators
import torch
from ringattn.testing import assert_same_bits
from torch import library

CHANNELS, WIDTH = 16, 4


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x, weight, bias, initial, begins, activation):
    """y and final states of packed sequences in PyTorch, in the dtype of the arguments."""
    ys, states = [], []
    for rows, halo in zip(x.split([end - begin for begin, end in zip(begins, begins[1:])]), initial):
        tokens, rows = len(rows), torch.cat([halo, rows])
        states.append(rows[-(WIDTH - 1):])
        if tokens == 0:
            continue
        v = torch.nn.functional.conv1d(rows.T[None], weight[:, None], bias, groups=CHANNELS)[0].T
        ys.append(torch.nn.functional.silu(v) if activation else v)
    return torch.cat(ys), torch.stack(states)


def gradients(function, inputs, douts):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, douts)


def tensors(tokens, sequences, dtype=torch.float32):
    return (normal(tokens, CHANNELS, dtype=dtype), normal(CHANNELS, WIDTH, seed=2), normal(CHANNELS, seed=3),
            normal(sequences, WIDTH - 1, CHANNELS, seed=4, dtype=dtype))  # fmt: skip


class Conv1dTraining(unittest.TestCase):
    def test_accuracy(self):
        begins = [0, 2, 2, 3, 70]
        for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            for activation in (None, "silu"):
                inputs = tensors(70, 4, dtype)
                douts = normal(70, CHANNELS, seed=5, dtype=dtype), normal(4, WIDTH - 1, CHANNELS, seed=6, dtype=dtype)

                def call(x, weight, bias, initial, activation=activation):
                    return ringattn.causal_conv1d(x, weight, bias, activation=activation, initial_states=initial,
                                                  return_final_states=True, cu_seqlens=begins)  # fmt: skip

                def plain(*given, activation=activation):
                    return reference(*given, begins, activation)

                exact = gradients(plain, [x.double() for x in inputs], [x.double() for x in douts])
                for got, wanted, given in zip(gradients(call, inputs, douts), exact, inputs):
                    self.assertEqual((got.dtype, got.shape), (given.dtype, given.shape))
                    self.assertLess((got.double() - wanted).abs().max(), allowed * wanted.abs().max())

    def test_batches_views_and_compiled_functions(self):
        x, weight, bias, _ = tensors(60, 2)
        wide = torch.stack([x, x], -1).reshape(3, 20, 2 * CHANNELS)  # as in a fused projection

        def layer(wide, weight, bias):
            return ringattn.causal_conv1d(wide[..., :CHANNELS], weight, bias, activation="silu") * 2

        inputs = wide, weight, bias
        dout = (normal(3, 20, CHANNELS, seed=5).transpose(0, 1).contiguous().transpose(0, 1),)
        made = gradients(layer, inputs, dout)
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for got, wanted in zip(gradients(compiled, inputs, dout), made):
            assert_same_bits(got, wanted)
        zeros = x.new_zeros(3, WIDTH - 1, CHANNELS)

        def plain(wide, weight, bias):
            rows = wide[..., :CHANNELS].reshape(-1, CHANNELS)
            return reference(rows, weight, bias, zeros, [0, 20, 40, 60], "silu")[0].reshape(3, 20, -1) * 2

        for got, wanted in zip(made, gradients(plain, inputs, dout)):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)

    def test_two_and_three_ranks(self):
        segment = 65536
        lengths = [segment + 1, 3, segment + 2]
        inputs = tensors(sum(lengths), 3, torch.bfloat16)
        begins = [0, lengths[0], lengths[0] + 3, sum(lengths)]
        dy = normal(sum(lengths), CHANNELS, seed=5, dtype=torch.bfloat16)

        def call(x, weight, bias, initial=None, **named):
            return ringattn.causal_conv1d(x, weight, bias, activation="silu", initial_states=initial, cu_seqlens=begins, **named)

        expected = gradients(call, inputs[:3], dy)
        for ranks in (2, 3):
            layout = ringattn.super_segments(lengths, ranks)

            def rank(world, layout=layout):
                mine = ringattn.shard(inputs[0], layout, world.rank)

                def dealt(*given):
                    return call(*given, world=world, layout=layout)

                return gradients(dealt, (mine, *inputs[1:3]), ringattn.shard(dy, layout, world.rank))

            shards = ringattn.run_ranks(ranks, rank)
            assert_same_bits(ringattn.unshard([shard[0] for shard in shards], layout), expected[0])
            for shard in shards:
                for got, wanted in zip(shard[1:], expected[1:]):
                    assert_same_bits(got, wanted)

    def test_the_operator_keeps_pytorch_s_rules(self):
        leaves = [x.requires_grad_() for x in tensors(12, 2)]
        x, weight, bias, initial = leaves
        given = x.detach().reshape(2, 6, CHANNELS).requires_grad_(), weight, bias, "silu", initial, None, None, 0, 60.0, None
        library.opcheck(torch.ops.ringattn.causal_conv1d.default, given)

    def test_updates_and_out_are_refused(self):
        x, weight, bias, initial = tensors(2, 2)
        leaf = x.clone().requires_grad_()
        for words, call in (
            ("x requires a gradient", lambda: ringattn.causal_conv1d_update(leaf, initial, weight, bias)),
            ("Leave out= out", lambda: ringattn.causal_conv1d(leaf, weight, bias, out=torch.empty(2, CHANNELS))),
        ):
            with self.subTest(words), self.assertRaises(ringattn.UnsupportedError) as caught:
                call()
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
