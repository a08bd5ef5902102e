# SPDX-License-Identifier: Apache-2.0
"""linear() and ringattn.nn.Linear: the same bits in any batch, on any number of ranks and compiled; gradients; models whose
layers are quantized; and a decoder layer of a Llama."""

import copy
import importlib.util
import pathlib
import sys
import types
import unittest
import weakref
from unittest import mock

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn._linear
import torch
import torch.nn.functional as F
from ringattn.testing import assert_same_bits

ACTIVATIONS = {
    "none": lambda z: z,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda z: F.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
    "geglu": lambda z: F.gelu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1],
}


def normal(*shape, seed=1, dtype=torch.float32, size=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def relative(found, expected) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


class Refusals(unittest.TestCase):
    def refuses(self, words, call, kind=ringattn.UsageError):
        with self.subTest(words), self.assertRaises(kind) as caught:
            call()
        self.assertIn(words, str(caught.exception))


def weights_of(format: str, rows=48, features=256, dtype=torch.float32):
    """Keyword arguments of a layer in a format, with its weight in fp32."""
    weight, bias = normal(rows, features, seed=2, size=features**-0.5), normal(rows, seed=3, dtype=dtype)
    if format == "float":
        return {"weight": weight.to(dtype), "bias": bias}, weight.to(dtype)
    q = ringattn.quantize_weight(weight, format)
    zeros = None if format == "int8" else torch.arange(rows * features // 128).reshape(rows, -1).remainder(16).to(torch.uint8)
    whole = ringattn.dequantize_weight(q.weight, q.scales, zeros)
    return {"weight": q.weight, "bias": bias, "scales": q.scales, "zeros": zeros}, whole


class Calls(Refusals):
    def test_each_activation_is_that_of_pytorch(self):
        x = normal(2, 3, 256)
        for activation, function in ACTIVATIONS.items():
            given, whole = weights_of("float")
            expected = function(F.linear(x.double(), whole.double(), given["bias"].double()))
            self.assertLess(relative(ringattn.linear(x, **given, activation=activation), expected), 1e-6, activation)

    def test_formats_are_what_their_weights_stand_for(self):
        # W8A8 rounds x to 1/127 of its largest element: 3 / 127 / sqrt(12) of x's size is about 0.7 %.
        x = normal(9, 256)
        for format, most in (("float", 1e-6), ("int8", 1e-2), ("int4", 1e-6)):
            given, whole = weights_of(format)
            y = ringattn.linear(x, **given)
            self.assertLess(relative(y, F.linear(x.double(), whole.double(), given["bias"].double())), most, format)
            arrays = {name: None if array is None else array.numpy() for name, array in given.items()}
            assert_same_bits(torch.from_numpy(ringattn.linear(x.numpy(), **arrays)), y)

    def test_quantized_values_are_the_nearest(self):
        weight = normal(5, 256)
        for format, steps in (("int8", 127.5), ("int4", 7.5)):
            q = ringattn.quantize_weight(weight, format)
            error = (ringattn.dequantize_weight(*q) - weight).abs()
            scales = q.scales[:, None] if format == "int8" else q.scales.repeat_interleave(128, 1)
            # The largest element is half a step beyond the last value.
            self.assertLessEqual(float((error / scales).max()), 0.5001)
            self.assertEqual(float(scales.max()), float(weight.abs().amax() / steps))
            assert_same_bits(torch.from_numpy(ringattn.quantize_weight(weight.numpy(), format).weight), q.weight)
        self.assertEqual(float(ringattn.quantize_weight(torch.zeros(2, 128), "int4").scales[0]), 1.0)

    def test_rows_have_the_same_bits_in_any_batch(self):
        x = normal(150, 256, dtype=torch.bfloat16)
        for format in ("float", "int8", "int4"):
            given, _ = weights_of(format, dtype=torch.bfloat16)
            for parallel in ringattn._linear.PARALLEL:
                settings = {"activation": "swiglu", "parallel": parallel} | given
                whole = ringattn.linear(x, **settings)
                for row in (0, 77, 149):
                    assert_same_bits(ringattn.linear(x[row], **settings), whole[row])
                assert_same_bits(ringattn.linear(x[20:41], **settings, threads=2), whole[20:41])
                assert_same_bits(ringattn.linear(x.reshape(3, 50, 256), **settings).reshape(150, -1), whole)

    def test_x_has_any_shape_and_strides(self):
        given, _ = weights_of("float")
        x = normal(6, 4, 256)
        y = ringattn.linear(x, **given)
        self.assertEqual(y.shape, (6, 4, 48))
        assert_same_bits(ringattn.linear(x.transpose(0, 1), **given), y.transpose(0, 1))
        wide = normal(6, 4, 512)
        assert_same_bits(ringattn.linear(wide[..., ::2], **given), ringattn.linear(wide[..., ::2].contiguous(), **given))
        assert_same_bits(ringattn.linear(x, given["weight"].t().contiguous().t(), given["bias"]), y)
        self.assertEqual(ringattn.linear(x[:0], **given).shape, (0, 4, 48))
        self.assertEqual(ringattn.linear(x[0, 0], **given).shape, (48,))
        out = torch.empty(6, 4, 48)
        self.assertIs(ringattn.linear(x, **given, out=out), out)
        assert_same_bits(out, y)

    def test_ranks_share_a_layer(self):
        x, columns, features = normal(7, 384, dtype=torch.bfloat16), 128, 384
        for format in ("float", "int8", "int4"):
            unit = 128 if format == "int4" else 16
            given, _ = weights_of(format, 2 * columns, features, torch.bfloat16)
            settings = {"activation": "swiglu", "in_features": features, "out_features": columns}

            def column(world, given=given, unit=unit, settings=settings):
                begin, end = ringattn.linear_columns(columns, world.size, world.rank, unit=unit)
                own = {name: None if a is None else torch.cat([a[begin:end], a[columns + begin : columns + end]])
                       for name, a in given.items()}  # fmt: skip
                return [ringattn.linear(x, **own, **settings, parallel="column", world=world, output=output)
                        for output in ("replicated", "shard")]  # fmt: skip

            def row(world, given=given, unit=unit, settings=settings):
                begin, end = ringattn.linear_features(features, world.size, world.rank, unit=unit)
                parts = {"weight": 2 if unit == 128 else 1, "scales": 128, "zeros": 128}
                own = {name: a if a is None or a.ndim == 1 else a[:, begin // parts[name] : end // parts[name]]
                       for name, a in given.items()}  # fmt: skip
                return [ringattn.linear(x[:, begin:end], **own, **settings, parallel="row", world=world, output=output)
                        for output in ("replicated", "tokens")]  # fmt: skip

            for parallel, work in (("column", column), ("row", row)):
                whole = ringattn.linear(x, **given, **settings, parallel=parallel)
                for ranks in (2, 3):
                    results = ringattn.run_ranks(ranks, work)
                    for replicated, _ in results:
                        assert_same_bits(replicated, whole)
                    joined = torch.cat([shard for _, shard in results], 1 if parallel == "column" else 0)
                    assert_same_bits(joined, whole)
            none = ringattn.linear(x, **given, **settings)
            assert_same_bits(ringattn.linear(x, **given, **settings, parallel="column"), none)

    def test_ranks_that_do_not_share_a_layer_have_their_own_tokens(self):
        x, weight = normal(40, 64), normal(16, 64, seed=2)

        def work(world):
            mine = x[: 30 * world.rank + 10].clone().requires_grad_()
            y = ringattn.linear(mine, weight, activation="gelu", world=world)
            y.sum().backward()
            return y.detach(), mine.grad

        whole = x.clone().requires_grad_()
        y = ringattn.linear(whole, weight, activation="gelu")
        y.sum().backward()
        for found, dx in ringattn.run_ranks(2, work):
            assert_same_bits(found, y.detach()[: len(found)])
            assert_same_bits(dx, whole.grad[: len(found)])
        self.refuses('output is "replicated"', lambda: ringattn.run_ranks(
            2, lambda world: ringattn.linear(x, weight, world=world, output="replicated")))  # fmt: skip

    def test_weights_that_a_kernel_packs_are_packed_once(self):
        # No kernel of a CPU packs: one that says so is asked for its weights as often as one that does.
        loads = []
        load = ringattn._linear.lib.linear_load

        def counted(*given):
            loads.append(given)
            return load(*given)

        given, _ = weights_of("int4", 16)
        x = normal(3, 256)
        expected = ringattn.linear(x[None], **given)[0]
        lib = ringattn._linear.lib
        with mock.patch("ringattn._linear.packs", lambda _: True), mock.patch.object(lib, "linear_load", counted):
            for _ in range(3):
                assert_same_bits(ringattn.linear(x, **given), expected)
            self.assertEqual(len(loads), 1)
            assert_same_bits(ringattn.linear(x, **weights_of("int4", 16)[0]), expected)  # other memory
            self.assertEqual(len(loads), 2)
            given["weight"].bitwise_xor_(1)
            self.assertFalse(torch.equal(ringattn.linear(x, **given), expected))
            self.assertEqual(len(loads), 3)
            wide = given["scales"].repeat_interleave(2, 1)
            for scales in (lambda: given["scales"] * 2.0, lambda: wide.mul_(2.0)[:, ::2]):  # temporary, and not contiguous
                before = len(loads)
                for _ in range(3):
                    ringattn.linear(x, **given | {"scales": (given_now := scales())})
                self.assertEqual(len(loads), before + 3)
                kept_scales = weakref.ref(given_now)
                del given_now
                self.assertIsNotNone(kept_scales())  # so that no other scales get its address
            others = [torch.zeros_like(given["scales"]) for _ in range(64)]  # where a copy would be that nobody keeps
            found = ringattn.linear(x, **given | {"scales": wide[:, ::2]})
            self.assertEqual((len(loads), len(others)), (before + 3, 64))
            assert_same_bits(ringattn.linear(x, **given | {"scales": wide[:, ::2].contiguous()}), found)
            kept = len(ringattn._linear._packed)
            del given
            self.assertEqual(len(ringattn._linear._packed), kept - 1)

    def test_a_bias_of_another_dtype_does_not_have_the_weight_packed_again(self):
        loads, load, lib = [], ringattn._linear.lib.linear_load, ringattn._linear.lib
        given, _ = weights_of("int4", 16)
        x = normal(3, 256)

        def counted(*arguments):
            loads.append(arguments)
            return load(*arguments)

        with mock.patch("ringattn._linear.packs", lambda _: True), mock.patch.object(lib, "linear_load", counted):
            with torch.autocast("cpu", torch.bfloat16):
                first = ringattn.linear(x, **given)
                assert_same_bits(ringattn.linear(x, **given), first)
                self.assertEqual(len(loads), 1)
                given["bias"].add_(1.0)
                self.assertFalse(torch.equal(ringattn.linear(x, **given), first))
                self.assertEqual(len(loads), 2)
        kept = len(ringattn._linear._casts)
        del given
        self.assertEqual(len(ringattn._linear._casts), kept - 1)

    def test_what_a_graph_packs_and_casts_is_not_kept(self):
        """Calls that are captured compute nothing: their packed weight and their copies are of no use outside of the graph."""
        loads, load, lib = [], ringattn._linear.lib.linear_load, ringattn._linear.lib
        given, _ = weights_of("int4", 16)
        x = normal(3, 256)

        def counted(*arguments):
            loads.append(arguments)
            return load(*arguments)

        with mock.patch("ringattn._linear.packs", lambda _: True), mock.patch.object(lib, "linear_load", counted):
            for dtype, calls in (("float32", "e1 c1 c2 c3 e4 e4 c4"), ("bfloat16", "e5 c6 c7 e8 e8")):
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                    for i, (eager, expected) in enumerate(call for call in calls.split()):
                        if (dtype, i) == ("float32", 2):
                            given["weight"].bitwise_xor_(1)
                        with mock.patch("ringattn._linear.is_captured", lambda _, eager=eager: eager == "c"):
                            ringattn.linear(x, **given)
                        self.assertEqual(len(loads), int(expected), (dtype, i))

    def test_a_weight_is_packed_once_for_any_number_of_tokens(self):
        given, _ = weights_of("int4", 16)
        x = normal(300, 256)
        expected = ringattn.linear(x[None], **given)[0]
        found = []
        with mock.patch("ringattn._linear.packs", lambda _: True):
            for tokens in (3, 40, 5, 300, 16, 100):
                assert_same_bits(ringattn.linear(x[:tokens], **given), expected[:tokens])
                (made,) = ringattn._linear._packed[given["weight"].untyped_storage()].values()
                found += [made] if made not in found else []
        self.assertEqual([made.max_tokens for made in found], [16, 64, 512])
        self.assertEqual([made._handle is None for made in found], [True, True, False])
        ringattn.self_world().wait()  # for none that is closed

    def test_ranks_without_columns_pack_with_the_others(self):
        for kernel, expected in (("sm90_linear_int4", True), ("sm90_linear_int8", False), ("cpu_linear", False)):
            facts = types.SimpleNamespace(packed_bytes=0)
            self.assertEqual(ringattn._linear.packs(types.SimpleNamespace(kernel=kernel, facts=facts)), expected)
        x, fused = normal(3, 64), normal(32, 64, seed=2)

        def work(world):
            begin, end = ringattn.linear_columns(16, world.size, world.rank)  # rank 0 has none
            return [ringattn.linear(x, layer[begin:end], parallel="column", out_features=16, output="replicated", world=world,
                                    timeout=10) for layer in fused.chunk(2)]  # fmt: skip

        with mock.patch("ringattn._linear.packs", lambda _: True):
            for found in ringattn.run_ranks(2, work):
                assert_same_bits(torch.cat(found, 1), ringattn.linear(x, fused))

    def test_what_does_not_fit_is_refused(self):
        x, weight = normal(3, 256), normal(48, 256)
        q, q4 = (ringattn.quantize_weight(weight, format) for format in ("int8", "int4"))
        linear = ringattn.linear
        for words, call in (
            ("weight has 1 axes", lambda: linear(x, weight[0])),
            ("x is float32 [3, 256] (weight is [256, 48], so x is [..., 48])", lambda: linear(x, weight.t())),
            ("weight is float32", lambda: linear(x.half(), weight)),
            ("bias is float16", lambda: linear(x, weight, normal(48).half())),
            ("bias is [47]", lambda: linear(x, weight, normal(47))),
            ("x is float64", lambda: linear(x.double(), weight.double())),
            ("scales are missing (weight is int8", lambda: linear(x, q.weight)),
            ("scales are given (weight is float32", lambda: linear(x, weight, scales=q.scales)),
            ("scales is [48]", lambda: linear(x, q4.weight, scales=q.scales)),
            ("zeros are given", lambda: linear(x, q.weight, scales=q.scales, zeros=q.scales)),
            ("weight has 47 rows", lambda: linear(x, weight[:47], activation="swiglu")),
            ("activation is 'relu'", lambda: linear(x, weight, activation="relu")),
            ("parallel is 'rows'", lambda: linear(x, weight, parallel="rows")),
            ("output is 'all'", lambda: linear(x, weight, output="all")),
            ("in_features is 2.5", lambda: linear(x, weight, in_features=2.5)),
            ("weight is [48, 256], 256 of in_features (rank 0 of 1 has 0 to 300 of 300, in units of 16)",
             lambda: linear(x, weight, in_features=300)),
            ("out is float32 [3, 47]", lambda: linear(x, weight, out=torch.empty(3, 47))),
            ("linear has no axis", lambda: linear(x, weight, axis=1)),
            ("timeout is 0", lambda: linear(x, weight, timeout=0)),
            ("weight[1, 2] is nan", lambda: ringattn.quantize_weight(weight.clone().index_put_(
                (torch.tensor(1), torch.tensor(2)), torch.tensor(float("nan"))), "int8")),
            ("weight has 200 features", lambda: ringattn.quantize_weight(weight[:, :200], "int4")),
            ("format is 'fp8'", lambda: ringattn.quantize_weight(weight, "fp8")),
            ("rank 0 of 9", lambda: ringattn.linear_columns(4096, 9, 0)),
            ("rank 0 of 0 does not exist", lambda: ringattn.linear_tokens(10, 0, 0)),
            ("tokens is -1", lambda: ringattn.linear_tokens(-1, 2, 0)),
            ("tokens is 1.5", lambda: ringattn.linear_tokens(1.5, 2, 0)),
            ("an argument is {} (settings", lambda: linear(x, weight, timeout={})),
            ("output is [0]", lambda: linear(x, weight, output=[0])),
            ("bias is tensor([1, 2])", lambda: ringattn.nn.Linear(4, 4, bias=torch.tensor([1, 2]))),
            ("scales is float32 [1] (weight has float32 [48])", lambda: ringattn.dequantize_weight(q.weight, q.scales[:1])),
            ("weight is float32 (quantized ones", lambda: ringattn.dequantize_weight(weight, q.scales)),
            ("zeros is float", lambda: ringattn.dequantize_weight(q4.weight, q4.scales, 1.5)),
        ):  # fmt: skip
            self.refuses(words, call)
        self.refuses("200 features", lambda: linear(x[:, :200], q4.weight[:, :100], scales=q4.scales[:, :1]),
                     ringattn.UnsupportedError)  # fmt: skip
        self.refuses("x is on meta", lambda: linear(x.to("meta"), weight), ringattn.UnsupportedError)
        found = ringattn.run_ranks(2, lambda world: self.refused_shard(world, x, weight))
        self.assertIn("out_features is not given", found[0])

    @staticmethod
    def refused_shard(world, x, weight):
        try:
            ringattn.linear(x, weight, parallel="column", world=world)
        except ringattn.UsageError as error:
            return str(error)


class Graphs(unittest.TestCase):
    def test_a_compiled_model_is_one_graph(self):
        torch.compiler.reset()
        for format in ("float", "int4"):
            model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.Linear(256, 128))
            for place in (0, 2):
                model[place] = ringattn.nn.Linear.from_linear(model[place], activation="gelu", weights=format)
            graphs = []

            def keep(graph, _, graphs=graphs):
                graphs.append(graph)
                return graph

            compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=keep)
            with torch.no_grad():
                for rows in (3, 9, 5):
                    x = normal(2, rows, 128)
                    assert_same_bits(compiled(x), model(x))
            self.assertEqual(len(graphs), 1)

    def test_autocast_casts_as_that_of_pytorch_s_linear(self):
        torch.compiler.reset()
        layer = torch.nn.Linear(128, 32)
        own, quantized = (ringattn.nn.Linear.from_linear(layer, weights=format) for format in ("float", "int8"))
        x = normal(5, 128)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            self.assertEqual(own(x).dtype, torch.bfloat16)
            self.assertEqual(quantized(x).dtype, torch.bfloat16)
            halves = (tensor.bfloat16() for tensor in (x, layer.weight, layer.bias))
            assert_same_bits(own(x), ringattn.linear(*halves))
            assert_same_bits(torch.compile(own, fullgraph=True, backend="eager")(x), own(x))
        loss = torch.autocast("cpu", torch.bfloat16)(own)(x).float().sum()
        loss.backward()
        self.assertEqual(own.weight.grad.dtype, torch.float32)


class Gradients(Refusals):
    def gradients(self, x, weight, bias, dy, **settings):
        given = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
        ringattn.linear(*given, **settings).backward(dy)
        return [tensor.grad for tensor in given]

    def test_they_are_those_of_pytorch_in_fp64(self):
        x = normal(3, 5, 48)
        for activation, function in ACTIVATIONS.items():
            for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
                weight, bias = normal(32, 48, seed=2, size=0.2, dtype=dtype), normal(32, seed=3, dtype=dtype)
                dy = normal(3, 5, 16 if "glu" in activation else 32, seed=4, dtype=dtype)
                exact = [tensor.to(dtype).double().requires_grad_() for tensor in (x, weight, bias)]
                function(F.linear(*exact)).backward(dy.double())
                found = self.gradients(x.to(dtype), weight, bias, dy, activation=activation)
                for gradient, of in zip(found, exact):
                    self.assertLess(relative(gradient, of.grad), most, (activation, dtype))

    def test_a_row_stands_alone(self):
        x, weight, bias, dy = normal(40, 64), normal(48, 64, seed=2), normal(48, seed=3), normal(40, 48, seed=4)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
        for parallel in ringattn._linear.PARALLEL:
            dx, dweight, dbias = self.gradients(x, weight, bias, dy, activation="silu", parallel=parallel)
            moved = self.gradients(x[order], weight, bias, dy[order], activation="silu", parallel=parallel)
            assert_same_bits(moved[0], dx[order])
            again = self.gradients(x.reshape(5, 8, 64), weight, bias, dy.reshape(5, 8, 48), activation="silu", parallel=parallel)
            for found, expected in zip(again, (dx.reshape(5, 8, 64), dweight, dbias)):
                assert_same_bits(found, expected)

    def test_ranks_that_share_a_layer_have_the_bits_of_one(self):
        x, weight, bias, dy = normal(9, 64), normal(256, 64, seed=2), normal(256, seed=3), normal(9, 128, seed=4)
        settings = {"activation": "swiglu", "in_features": 64, "out_features": 128, "output": "replicated"}

        def column(world):
            begin, end = ringattn.linear_columns(128, world.size, world.rank)
            own = [torch.cat([whole[begin:end], whole[128 + begin : 128 + end]]) for whole in (weight, bias)]
            found = self.gradients(x, *own, dy, **settings, parallel="column", world=world)
            return found[0], torch.cat([found[1][: end - begin], found[1][end - begin :]]), found[2]

        def row(world):
            begin, end = ringattn.linear_features(64, world.size, world.rank)
            return self.gradients(x[:, begin:end], weight[:, begin:end], bias, dy, **settings, parallel="row", world=world)

        for parallel, work in (("column", column), ("row", row)):
            dx, dweight, dbias = self.gradients(x, weight, bias, dy, **settings, parallel=parallel)
            parts = ringattn.run_ranks(2, work)
            for part, _, own_bias in parts:
                if parallel == "column":
                    assert_same_bits(part, dx)
                else:
                    assert_same_bits(own_bias, dbias)
            if parallel == "row":
                assert_same_bits(torch.cat([part for part, _, _ in parts], 1), dx)
                assert_same_bits(torch.cat([part for _, part, _ in parts], 1), dweight)
                continue
            for place, whole in ((1, dweight), (2, dbias)):
                halves = [part[place].chunk(2) for part in parts]
                assert_same_bits(torch.cat([half[0] for half in halves] + [half[1] for half in halves]), whole)

    def test_only_what_is_needed_is_computed(self):
        x, weight = normal(4, 16), normal(8, 16, seed=2).requires_grad_()
        ringattn.linear(x, weight, activation="gelu").sum().backward()
        self.assertIsNone(x.grad)
        x.requires_grad_()
        y = ringattn.linear(x, weight.detach())
        y.backward(torch.ones(1).expand_as(y))
        self.assertEqual(x.grad.shape, x.shape)
        torch.compiler.reset()
        compiled = torch.compile(lambda a, b: ringattn.linear(a, b, activation="silu").sum(), backend="aot_eager", fullgraph=True)
        for function in (compiled, lambda a, b: ringattn.linear(a, b, activation="silu").sum()):
            weight.grad = None
            function(x.detach(), weight).backward()
            assert_same_bits(weight.grad, self.gradients(x, weight, torch.zeros(8), torch.ones(4, 8), activation="silu")[1])

    def test_what_has_none_is_refused(self):
        def work(world):
            weight = normal(32, 128, seed=2).requires_grad_()
            y = ringattn.linear(normal(4, 128), weight, parallel="row", in_features=256, world=world)
            try:
                y.sum().backward()
            except ringattn.UnsupportedError as error:
                return str(error)

        for said in ringattn.run_ranks(2, work):
            self.assertIn('whose output is divided by tokens (each rank needs dy of all tokens). Use output="replicated".', said)
        weight = normal(12, 16, seed=2).requires_grad_()
        self.refuses("16 to 12 features (weight gradients have multiples of 8)",
                     lambda: ringattn.linear(normal(4, 16), weight).sum().backward(), ringattn.UnsupportedError)  # fmt: skip

    def test_quantized_layers_have_none(self):
        layer = ringattn.nn.Linear.from_linear(torch.nn.Linear(128, 16), weights="int8")
        x = normal(3, 128).requires_grad_()
        self.refuses("x requires a gradient (a linear layer with quantized weights has none)", lambda: layer(x),
                     ringattn.UnsupportedError)  # fmt: skip
        self.assertEqual(layer(x.detach()).shape, (3, 16))
        scales = layer.scales.clone().requires_grad_()
        self.refuses("scales requires a gradient", lambda: ringattn.linear(x.detach(), layer.weight, layer.bias, scales=scales),
                     ringattn.UnsupportedError)  # fmt: skip


class DataParallel(Refusals):
    """Gradients over ranks that have different tokens."""

    def parameters(self, dtype=torch.float32):
        return [normal(16, 24, seed=2, dtype=dtype).requires_grad_(), normal(16, seed=3, dtype=dtype).requires_grad_()]

    def leaf_gradients(self, parameters, tokens, ranks, rank):
        x, dy = (normal(tokens, dim, seed=dim, dtype=parameters[0].dtype) for dim in (24, 16))
        for leaf in ringattn.gradient_leaves(ranks, rank):
            begin, end = ringattn.linear_tokens(tokens, 8, leaf)
            if begin == end:
                yield None
                continue
            y = ringattn.linear(x[begin:end], *parameters, activation="gelu")
            yield torch.autograd.grad(y, parameters, dy[begin:end])

    def reduced(self, world, tokens=21, dtype=torch.float32, wide=False):
        parameters = self.parameters(dtype)
        for parameter in parameters if wide else ():
            parameter.grad_dtype = torch.float32
        gradients = self.leaf_gradients(parameters, tokens, world.size, world.rank)
        return ringattn.reduce_gradients(parameters, gradients, world=world)

    def test_any_number_of_ranks_has_the_bits_of_one(self):
        for tokens, dtype in ((21, torch.float32), (5, torch.float32), (21, torch.bfloat16)):
            whole = self.reduced(ringattn.self_world(), tokens, dtype)
            for ranks in (2, 3, 9):
                for found in ringattn.run_ranks(ranks, lambda world, of=(tokens, dtype): self.reduced(world, *of)):
                    for part, expected in zip(found, whole, strict=True):
                        self.assertEqual(part.dtype, dtype)
                        assert_same_bits(part, expected)
        one = self.parameters()
        x, dy = (normal(21, dim, seed=dim) for dim in (24, 16))
        expected = torch.autograd.grad(F.gelu(F.linear(x, *one)), one, dy)
        for found, wanted in zip(self.reduced(ringattn.self_world()), expected, strict=True):
            self.assertLess(relative(found, wanted), 1e-5)

    def test_gradients_of_half_precision_stay_in_fp32_up_to_one_rounding(self):
        if not hasattr(torch.Tensor, "grad_dtype"):
            self.skipTest("needs PyTorch 2.10")
        wide = self.reduced(ringattn.self_world(), 21, torch.bfloat16, wide=True)
        narrow = self.reduced(ringattn.self_world(), 21, torch.bfloat16)
        leaves = [None if leaf is None else [gradient.double() for gradient in leaf]
                  for leaf in self.leaf_gradients([p.detach().float().requires_grad_() for p in self.parameters(torch.bfloat16)],
                                                  21, 1, 0)]  # fmt: skip
        self.assertEqual(len(leaves), 8)
        for found, rounded in zip(wide, narrow, strict=True):
            self.assertEqual(found.dtype, torch.float32)
            self.assertNotEqual(float((found - rounded.float()).abs().max()), 0.0)
        parameters = self.parameters(torch.bfloat16)
        parameters[0].grad_dtype = torch.float32
        ringattn.linear(normal(4, 24, dtype=torch.bfloat16), *parameters).sum().backward()
        self.assertEqual([parameter.grad.dtype for parameter in parameters], [torch.float32, torch.bfloat16])

    def test_arrays_of_numpy_are_added_too(self):
        parameters = [normal(3, 4).numpy(), normal(5).numpy()]
        leaves = [[p * (leaf + 1) for p in parameters] if leaf != 3 else None for leaf in range(8)]
        for found, parameter in zip(ringattn.reduce_gradients(parameters, leaves), parameters, strict=True):
            part = [p * (leaf + 1) for leaf, p in enumerate([parameter] * 8)]
            expected = ((part[0] + part[1]) + part[2]) + ((part[4] + part[5]) + (part[6] + part[7]))
            assert_same_bits(torch.from_numpy(found), torch.from_numpy(expected))

    def test_what_does_not_fit_is_refused(self):
        parameters, leaf = [normal(3), normal(4)], [normal(3), normal(4)]
        reduce = ringattn.reduce_gradients
        for words, call in (
            ("gradients of 2 of 8 leaves were added (rank 0 of 1 has leaves 0 to 7)", lambda: reduce(parameters, [leaf] * 2)),
            ("the gradient of one leaf too many is added", lambda: reduce(parameters, [leaf] * 9)),
            ("leaf 0 has 1 gradients (there are 2 parameters)", lambda: reduce(parameters, [leaf[:1]] * 8)),
            ("gradient 1 of leaf 0 is Tensor [3] (parameter 1 is Tensor [4])", lambda: reduce(parameters, [leaf[:1] * 2] * 8)),
            ("gradient 0 of leaf 0 is int64", lambda: reduce(parameters, [[leaf[0].long(), None]] * 8)),
            ("gradient 1 of leaf 0 is str []", lambda: reduce(parameters, [[leaf[0], "x"]] * 8)),
            ("gradient 1 of leaf 0 is on meta (parameter 1 is on cpu)",
             lambda: reduce(parameters, [[leaf[0], leaf[1].to("meta")]] * 8)),
            ("reduce_gradients() is called by its own gradients",
             lambda: reduce(parameters, (reduce(parameters, [leaf] * 8) for _ in range(8)))),
            ("leaf 0 is int", lambda: reduce(parameters, [3] * 8)),
            ("gradients is NoneType", lambda: reduce(parameters, None)),
            ("parameters is NoneType", lambda: reduce(None, [])),
            ("there are no parameters", lambda: reduce([], [])),
            ("parameter 0 is int", lambda: reduce([3], [])),
            ("parameter 1 is float64", lambda: reduce([leaf[0], leaf[1].double()], [leaf] * 8)),
            ("parameter 0 is int64", lambda: reduce([leaf[0].long()], [leaf[:1]] * 8)),
            ("rank 2 of 2 has no leaves", lambda: ringattn.gradient_leaves(2, 2)),
        ):
            self.refuses(words, call)
        with self.assertRaisesRegex(ringattn.UnsupportedError, "inside a transform of torch.func"):
            torch.func.vmap(lambda of: reduce([leaf[0]], [[of]] * 8)[0])(normal(2, 3))
        found = reduce(parameters, [leaf] * 8)  # nothing of the calls that failed is left
        assert_same_bits(found[0], leaf[0] * 8)

    def test_ranks_with_other_parameters_are_refused(self):
        def shapes(world):
            parameters = [normal(3), normal(4)][:: 1 if world.rank == 0 else -1]
            return ringattn.reduce_gradients(parameters, [parameters] * 4, world=world)

        def dtypes(world):
            parameters = [normal(3).to(torch.bfloat16 if world.rank else torch.float32)]
            return ringattn.reduce_gradients(parameters, [parameters] * 4, world=world)

        for call, words in ((shapes, "float32 [4], float32 [3] against"), (dtypes, "bfloat16 [3] against")):
            self.refuses(words, lambda: ringattn.run_ranks(2, call), ringattn.UnsupportedError)  # noqa: B023

    def test_leaves_may_prepare_any_number_of_other_layers(self):
        def leaves():
            for leaf in range(8):
                for features in range(5):
                    ringattn.linear(normal(1, 8 * (5 * leaf + features + 1)), normal(8, 8 * (5 * leaf + features + 1)))
                yield [normal(3)]

        self.assertEqual(ringattn.reduce_gradients([normal(3)], leaves())[0].shape, (3,))


class Modules(Refusals):
    def test_a_layer_is_loaded_from_its_own_state_and_from_another_s(self):
        torch.manual_seed(0)
        layer = torch.nn.Linear(256, 32)
        x = normal(4, 256)
        for format in ("float", "int8", "int4"):
            made = ringattn.nn.Linear.from_linear(layer, activation="silu", weights=format)
            other = ringattn.nn.Linear(256, 32, activation="silu", weights=format)
            other.load_state_dict(made.state_dict())
            with torch.no_grad():
                assert_same_bits(other(x), made(x))
                assert_same_bits(copy.deepcopy(made)(x), made(x))
        self.assertIs(ringattn.nn.Linear.from_linear(layer).weight, layer.weight)
        whole = ringattn.nn.Linear(256, 32)
        whole.load_state_dict(layer.state_dict())
        assert_same_bits(whole.weight.detach(), layer.weight.detach())
        empty = ringattn.nn.Linear(256, 32, weights="int4")
        self.refuses("weight is torch.float32 (the layer's weights are int4)",
                     lambda: empty.load_state_dict(layer.state_dict()), RuntimeError)  # fmt: skip
        half = copy.deepcopy(made).half()
        self.assertEqual((half.scales.dtype, half.bias.dtype, half.weight.dtype), (torch.float32, torch.float16, torch.uint8))
        assert_same_bits(half.scales, made.scales)
        self.assertIn("activation=silu, weights=int4", repr(made))

    def test_zeros_are_those_of_the_state(self):
        given, _ = weights_of("int4")
        x = normal(4, 256)
        symmetric = ringattn.nn.Linear.from_linear(torch.nn.Linear(256, 48), weights="int4").state_dict()
        made = ringattn.nn.Linear(256, 48, weights="int4")
        made.load_state_dict(given)
        assert_same_bits(made(x), ringattn.linear(x, **given))
        for strict in (True, False):
            made.load_state_dict({"bias": given["bias"]}, strict=False)  # a state without weights leaves them as they are
            self.assertIsNotNone(made.zeros)
            made.load_state_dict(symmetric, strict=strict)
            self.assertIsNone(made.zeros)
            assert_same_bits(made(x), ringattn.linear(x, **symmetric))
            made.load_state_dict(given)
        whole = ringattn.nn.Linear(256, 48)
        self.refuses("weight is torch.uint8 (the layer's weights are float)", lambda: whole.load_state_dict(given), RuntimeError)
        self.assertIsNone(whole.zeros)

    def test_ranks_load_their_shards_from_the_whole_layer(self):
        torch.manual_seed(0)
        gate, up, down = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
        x = normal(5, 64)
        ups = ringattn.nn.Linear.from_linear(gate, up=up, activation="swiglu", parallel="column")
        downs = ringattn.nn.Linear.from_linear(down, parallel="row")

        def work(world):
            wide = ringattn.nn.Linear(64, 128, activation="swiglu", parallel="column", world=world)
            narrow = ringattn.nn.Linear.from_linear(down, parallel="row", world=world, output="replicated")
            wide.load_state_dict(ups.state_dict())
            narrow.load_state_dict(narrow.state_dict())
            with torch.no_grad():
                return narrow(wide(x))

        with torch.no_grad():
            expected = downs(ups(x))
        for ranks in (2, 3):
            for found in ringattn.run_ranks(ranks, work):
                assert_same_bits(found, expected)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(16, 128)
        self.up, self.down = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)
        self.odd = torch.nn.Linear(128, 128)
        self.narrow = torch.nn.Linear(72, 128, bias=False)
        self.router = torch.nn.Linear(128, 8)
        self.tied = torch.nn.Linear(128, 16, bias=False)
        self.tied.weight = self.embed.weight
        self.lm_head = torch.nn.Linear(128, 16)
        self.again = self.odd

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.again(self.odd(x) + self.down(F.silu(self.up(x))))
        return self.lm_head(x + self.narrow(x[..., :72])) + self.tied(x) + self.router(x).sum()


class Models(Refusals):
    def test_the_layers_of_a_model_are_replaced_and_reported(self):
        torch.manual_seed(0)
        for format, most in (("int8", 0.01), ("int4", 0.12)):
            model = Mlp().eval()
            tokens = torch.arange(12).reshape(2, 6)
            kept = model.up.weight
            report = ringattn.nn.quantize_(model, format, ignore=["re:.*rout"], sample=tokens)
            reasons = {row.name: row.reason for row in report if row.weights == "kept"}
            self.assertEqual(reasons.pop("router"), 'ignore has "re:.*rout"')
            self.assertEqual(reasons.pop("tied"), "its weight is shared with embed")
            self.assertEqual(reasons.pop("lm_head"), "the output head")
            if format == "int4":
                self.assertEqual(reasons.pop("narrow"), "its 72 features are not a multiple of 128")
            self.assertEqual(reasons, {})
            up = report["up"]
            self.assertEqual(up.bytes_before, 4 * (128 * 256 + 256))
            self.assertEqual(up.bytes_after, 4 * 256 + (128 * 256 + 4 * 256 if format == "int8" else 128 * 256 // 2 + 4 * 256))
            whole = ringattn.dequantize_weight(model.up.weight, model.up.scales)
            self.assertAlmostEqual(up.weight_error, relative(whole, kept), 6)
            self.assertLess(up.weight_error, most)
            self.assertTrue(0 < up.output_error < 2 * most)
            self.assertIs(model.again, model.odd)
            table = str(report).splitlines()
            self.assertEqual(len(table), len(report) + 2)
            self.assertRegex(table[1], rf"^up +{format} +132,096 +{up.bytes_after:,} +\d+\.\d\d% +\d+\.\d\d%$")
            self.assertEqual(report.bytes_after, sum(row.bytes_after for row in report))
            with torch.no_grad():
                self.assertEqual(model(tokens).shape, (2, 6, 16))
            self.refuses("x requires a gradient (a linear layer with quantized weights has none)", lambda: model(tokens),
                         ringattn.UnsupportedError)  # fmt: skip

    def test_what_can_not_be_quantized_is_refused_by_name(self):
        quantize_ = ringattn.nn.quantize_
        model = Mlp()
        with torch.no_grad():
            model.down.weight[3, 5] = float("nan")
        self.refuses("down.weight[3, 5] is nan", lambda: quantize_(model, "int8"))
        self.assertIs(type(model.up), torch.nn.Linear)  # nothing was replaced
        names = ("down", "odd")
        report = quantize_(model, "int8", ignore=iter(names))
        self.assertEqual([report[name].weights for name in names], ["kept", "kept"])
        self.refuses("up.weight is on the meta device", lambda: quantize_(Mlp().to("meta"), "int8"))
        self.refuses("the model itself is a torch.nn.Linear", lambda: quantize_(torch.nn.Linear(128, 8), "int8"))
        self.refuses("no layer of the model is quantized (up: filter_fn said no; ",
                     lambda: quantize_(Mlp(), "int8", filter_fn=lambda module, name: False))  # fmt: skip
        self.refuses("ignore is 'up'", lambda: quantize_(Mlp(), "int8", ignore="up"))
        self.refuses("weights is 'nf4'", lambda: quantize_(Mlp(), "nf4"))
        self.refuses('ignore names "dwon" (no torch.nn.Linear of the model is called so). Did you mean "down"?',
                     lambda: quantize_(Mlp(), "int8", ignore=["dwon"]))  # fmt: skip
        self.refuses("ignore has 3", lambda: quantize_(Mlp(), "int8", ignore=[3]))
        self.refuses("ignore is int", lambda: quantize_(Mlp(), "int8", ignore=3))
        self.refuses("sample is int", lambda: quantize_(Mlp(), "int8", sample=3))
        self.refuses("threads is x", lambda: quantize_(Mlp(), "int8", threads="x"))
        self.refuses("-1 threads are not possible", lambda: ringattn.nn.Linear(8, 8, threads=-1))
        self.refuses('ignore has "re:("', lambda: quantize_(Mlp(), "int8", ignore=["re:("]))
        self.refuses("model is int", lambda: quantize_(3, "int8"))
        self.refuses("filter_fn is str", lambda: quantize_(Mlp(), "int8", filter_fn="up"))
        quantized = Mlp()
        quantize_(quantized, "int8")
        self.refuses("it is quantized already: up has int8 weights", lambda: quantize_(quantized, "int4"))
        Conv1D = type("Conv1D", (torch.nn.Module,), {})
        self.refuses("0 is a Conv1D of transformers", lambda: quantize_(torch.nn.Sequential(Conv1D()), "int8"))

    def test_arguments_of_other_types_are_refused(self):
        Linear = ringattn.nn.Linear
        for words, call in (
            ("in_features is a (it should be a whole number)", lambda: Linear("a", 8)),
            ("out_features is 0", lambda: Linear(8, 0)),
            ("world is int", lambda: Linear(8, 8, world=3)),
            ("column_unit is 1.5", lambda: Linear(8, 8, column_unit=1.5)),
            ("linear is NoneType", lambda: Linear.from_linear(None)),
            ("linear is a ringattn.nn.Linear", lambda: Linear.from_linear(Linear(8, 8))),
            ("up is Embedding", lambda: Linear.from_linear(torch.nn.Linear(8, 8), up=torch.nn.Embedding(8, 8))),
            ("x is NoneType", lambda: Linear(8, 8)(None)),
            ("model is int", lambda: ringattn.nn.parallelize_(3, None)),
        ):
            self.refuses(words, call)


class Llama(unittest.TestCase):
    def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_with_two_ranks(self):
        path = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "decoder_layer.py"
        spec = importlib.util.spec_from_file_location("decoder_layer", path)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        self.assertEqual(example.check(width=128, heads=8, kv_heads=4, hidden=256, sequences=3, tokens=10, ranks=2), 3)


class Plans(Refusals):
    def test_a_model_of_hugging_face_has_the_same_logits_on_two_ranks(self):
        if importlib.util.find_spec("transformers") is None:
            self.skipTest("needs transformers")
        import ringattn.transformers
        from transformers import LlamaConfig, LlamaForCausalLM

        try:
            ringattn.transformers.register()
        except ringattn.UnsupportedError as error:
            self.skipTest(str(error))
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=1, vocab_size=64, attn_implementation="ringattn", **sizes)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        tokens = torch.arange(20).reshape(2, 10)

        def work(world):
            own = copy.deepcopy(model)
            replaced = ringattn.nn.parallelize_(own, world)
            with torch.no_grad():
                return replaced, own(tokens).logits

        ((replaced, expected),) = ringattn.run_ranks(1, work)
        self.assertEqual(replaced["model.layers.0.self_attn.q_proj"], "column")
        self.assertEqual(replaced["model.layers.0.mlp.down_proj"], "row")
        self.assertEqual(len(replaced), 7)
        with torch.no_grad():
            self.assertLess(relative(expected, model(tokens).logits), 1e-5)
        for _, found in ringattn.run_ranks(2, work):
            assert_same_bits(found, expected)
        self.refuses("model.layers.0.self_attn.k_proj over 4 ranks (rank 0 would have its columns 0 to 16, and heads have 32)",
                     lambda: ringattn.run_ranks(4, work), ringattn.UnsupportedError)  # fmt: skip
        self.refuses("Linear has no tensor-parallel plan", lambda: ringattn.nn.parallelize_(torch.nn.Linear(8, 8), None))


if __name__ == "__main__":
    unittest.main()
