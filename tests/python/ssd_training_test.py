# SPDX-License-Identifier: Apache-2.0
"""Gradients of ssd(): against fp64 autograd of the recurrence, with the bits of one rank on several, and in compiled functions.
Selective scans are refused."""

import functools
import importlib.util
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.torch_ops
import torch
from ringattn.testing import assert_same_bits
from torch import library

NAMES = "x dt A B C D z dt_bias initial_states".split()


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(tokens, sequences=1, heads=4, groups=2, dtype=torch.float32):
    """Inputs by name."""
    seeds = iter(range(1, 20))

    def new(*shape, dtype=torch.float32):
        return normal(*shape, seed=next(seeds), dtype=dtype)

    return {
        "x": new(tokens, heads, 8, dtype=dtype), "dt": new(tokens, heads, dtype=dtype) * 0.5, "A": -new(heads).exp(),
        "B": new(tokens, groups, 16, dtype=dtype), "C": new(tokens, groups, 16, dtype=dtype), "D": new(heads),
        "z": new(tokens, heads, 8, dtype=dtype), "dt_bias": new(heads), "initial_states": new(sequences, heads, 8, 16),
    }  # fmt: skip


def reference(cu, limits, x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, softplus=True):
    """The recurrence, token by token, over packed sequences."""
    heads = x.shape[1]
    B, C = (rows.repeat_interleave(heads // rows.shape[1], 1) for rows in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if softplus else dt
    dt = dt if limits is None else dt.clamp(*limits)
    ys, finals = [], []
    for s, (begin, end) in enumerate(zip(cu, cu[1:])):
        state = x.new_zeros(heads, 8, 16) if initial_states is None else initial_states[s]
        for t in range(begin, end):
            state = (dt[t] * A).exp()[:, None, None] * state + (dt[t, :, None] * x[t])[..., None] * B[t][:, None]
            y = (state * C[t][:, None]).sum(-1)
            ys.append(y if D is None else y + D[:, None] * x[t])
        finals.append(state)
    y = torch.stack(ys)
    return y if z is None else y * torch.nn.functional.silu(z), torch.stack(finals)


def gradients(function, inputs, douts):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    outs = function(**leaves)
    kept = [(out, dout) for out, dout in zip(outs, douts) if dout is not None]
    made = torch.autograd.grad([out for out, _ in kept], [*leaves.values()], [dout for _, dout in kept])
    return outs, dict(zip(leaves, made))


class Accuracy(unittest.TestCase):
    def compare(self, inputs, cu, dstates=True, limits=None, softplus=True):
        dtype, tokens = inputs["x"].dtype, inputs["x"].shape[0]
        douts = normal(*inputs["x"].shape, seed=30, dtype=dtype), normal(len(cu) - 1, 4, 8, 16, seed=31) if dstates else None
        exact = {name: x.double() for name, x in inputs.items()}
        _, wanted = gradients(functools.partial(reference, cu, limits, softplus=softplus), exact,
                              [None if dout is None else dout.double() for dout in douts])  # fmt: skip
        call = functools.partial(ringattn.ssd, dt_softplus=softplus, dt_limit=limits, return_final_states=True,
                                 cu_seqlens=torch.tensor(cu) if len(cu) > 2 else None)  # fmt: skip
        _, made = gradients(call, inputs, douts)
        for name, given in inputs.items():
            self.assertEqual((made[name].dtype, made[name].shape), (given.dtype, given.shape), name)
            rounding = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[given.dtype]
            error = (made[name].double() - wanted[name]).abs().max()
            self.assertLessEqual(error, 2 * rounding * wanted[name].abs().max(), (name, dtype, tokens))

    def test_all_inputs_and_types(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.compare(layer(90, dtype=dtype), (0, 90))
        self.compare(layer(90, 3), (0, 20, 20, 90))
        self.compare(layer(70), (0, 70), dstates=False, limits=(0.3, 1.0))

    def test_without_what_is_optional(self):
        inputs = layer(66)
        for left_out in (("D",), ("z", "initial_states"), ("D", "z", "dt_bias", "initial_states")):
            with self.subTest(left_out):
                self.compare({name: x for name, x in inputs.items() if name not in left_out}, (0, 66))
        inputs["dt"] = inputs["dt"].abs()
        self.compare({name: x for name, x in inputs.items() if name != "dt_bias"}, (0, 66), softplus=False)


class Autograd(unittest.TestCase):
    def call(self, **inputs):
        return ringattn.ssd(**inputs, dt_softplus=True, return_final_states=True)

    def test_batches_strides_and_what_is_asked_for(self):
        inputs = layer(80, 2)
        dy = normal(80, 4, 8, seed=30)
        packed = functools.partial(self.call, cu_seqlens=torch.tensor([0, 40, 80]))
        outs, expected = gradients(packed, inputs, (dy, None))
        rows = ("x", "dt", "B", "C", "z")
        batch = {name: x.unflatten(0, (2, 40)) if name in rows else x for name, x in inputs.items()}
        batch_outs, made = gradients(self.call, batch, (dy.unflatten(0, (2, 40)), None))
        assert_same_bits(batch_outs[0].flatten(0, 1).detach(), outs[0].detach())
        for name, gradient in made.items():
            assert_same_bits(gradient.flatten(0, 1) if name in rows else gradient, expected[name])
        wide = torch.zeros(80, 4, 16)
        wide[..., 8:] = dy
        for name, gradient in gradients(packed, inputs, (wide[..., 8:], None))[1].items():
            assert_same_bits(gradient, expected[name])
        for asked in NAMES:
            leaves = {name: x.clone().requires_grad_(name == asked) for name, x in inputs.items()}
            packed(**leaves)[0].backward(dy)
            for name, leaf in leaves.items():
                self.assertEqual(leaf.grad is not None, name == asked)
            assert_same_bits(leaves[asked].grad, expected[asked])
        plain = ringattn.ssd(**inputs, dt_softplus=True, cu_seqlens=torch.tensor([0, 40, 80]))
        assert_same_bits(outs[0].detach(), plain)

    def test_compiled_it_is_one_graph(self):
        inputs, douts = layer(40), (normal(40, 4, 8, seed=30), normal(1, 4, 8, 16, seed=31))

        def function(x, **others):
            y, states = self.call(x=x * 2, **others)
            return y + 1, states

        torch.compiler.reset()
        outs, expected = gradients(function, inputs, douts)
        compiled_outs, made = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), inputs, douts)
        for got, wanted in (*zip(compiled_outs, outs), *((made[name], expected[name]) for name in inputs)):
            assert_same_bits(got.detach(), wanted.detach())

    def test_the_operator_keeps_pytorch_s_rules(self):
        x, dt, A, B, C, D, z, bias, states = (array.requires_grad_() for array in layer(20).values())
        given = x, dt, A, B, C, D, z, bias, True, None, states, None, None, 0, 0, 60.0
        library.opcheck(torch.ops.ringattn.ssd.default, given)

    def test_what_has_no_gradient_is_refused(self):
        u, A, B = normal(9, 8).requires_grad_(), -torch.ones(8, 16), normal(9, 16)
        inputs = layer(9) | {"x": normal(9, 4, 8).requires_grad_()}
        for call in (lambda: ringattn.selective_scan(u, torch.ones(9, 8), A, B, B),
                     lambda: ringattn.torch_ops.selective_scan(u, torch.ones(9, 8), A, B, B),
                     lambda: ringattn.ssd(**inputs, out=normal(9, 4, 8))):  # fmt: skip
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                call()
            self.assertRegex(str(caught.exception), "^[ux] requires a gradient")


class Ranks(unittest.TestCase):
    def test_two_and_three_ranks(self):
        lengths = [65_536 + 70, 300, 0, 65_536]
        tokens = sum(lengths)
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        inputs = layer(tokens, len(lengths), heads=2, groups=1, dtype=torch.bfloat16)
        inputs["A"] = inputs["A"] * 1e-4  # states outlive super-segments
        douts = normal(tokens, 2, 8, seed=30, dtype=torch.bfloat16), normal(len(lengths), 2, 8, 16, seed=31)
        call = functools.partial(ringattn.ssd, dt_softplus=True, return_final_states=True, cu_seqlens=cu)
        _, expected = gradients(call, inputs, douts)
        rows = ("x", "dt", "B", "C", "z")
        for size in (2, 3):
            layout = ringattn.super_segments(lengths, size)

            def rank(world, layout=layout):
                begins, ends = layout.begins(world.rank), layout.ends(world.rank)
                mine = {name: ringattn.shard(x, layout, world.rank) if name in rows else x for name, x in inputs.items()}
                mine["initial_states"] = inputs["initial_states"][list(begins)]
                own = ringattn.shard(douts[0], layout, world.rank), douts[1][list(ends)]
                return gradients(functools.partial(call, layout=layout, world=world), mine, own)[1]

            shards = ringattn.run_ranks(size, rank)
            for name in rows:
                assert_same_bits(ringattn.unshard([shard[name] for shard in shards], layout), expected[name])
            for at, shard in enumerate(shards):
                for name in ("A", "D", "dt_bias"):
                    assert_same_bits(shard[name], expected[name])
                assert_same_bits(shard["initial_states"], expected["initial_states"][list(layout.begins(at))])


if __name__ == "__main__":
    unittest.main()
