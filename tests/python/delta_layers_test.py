# SPDX-License-Identifier: Apache-2.0
"""Whole layers of Qwen3-Next, Kimi Linear and Ling 3 from the tensors of a file, against transformers' modules: projections,
convolution, gates, the gated delta rule, norm and output projection. The same bytes on three ranks."""

import tempfile
import unittest

import numpy as np
import ringattn
import safetensors.torch
import torch
import transformers

TOKENS = 2048 + 70  # two segments, the second shorter than two chunks


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Ranks:
    """The layout and world of a call; none: the whole sequence on one rank."""

    def __init__(self, layout=None, world=None):
        self.given = {} if world is None else {"layout": layout, "world": world}

    def convolved(self, x, weights):
        weight = torch.cat(weights)[:, 0].contiguous()
        return ringattn.causal_conv1d(x, weight, activation="silu", **self.given)

    def rule(self, q, k, v, log_decay, beta):
        return ringattn.gated_delta(q, k, v, log_decay, beta, qk_l2norm=True, **self.given)


def qwen3_next(x, layer, config, ranks):
    """The rows of in_proj_qkvz and in_proj_ba are those of one key head after the other: its q and k, and v, z, b and a of
    its value heads."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim, value_dim, shared = config.linear_key_head_dim, config.linear_value_head_dim, heads // key_heads
    by_head = ringattn.linear(x, layer["in_proj_qkvz.weight"]).unflatten(1, (key_heads, 2 * (dim + shared * value_dim)))
    q, k, v, z = by_head.split([dim, dim, shared * value_dim, shared * value_dim], dim=-1)
    b, a = ringattn.linear(x, layer["in_proj_ba.weight"]).unflatten(1, (key_heads, 2 * shared)).split(shared, dim=-1)
    mixed = ranks.convolved(torch.cat([rows.flatten(1) for rows in (q, k, v)], dim=-1), [layer["conv1d.weight"]])
    q, k, v = mixed.split([key_heads * dim, key_heads * dim, heads * value_dim], dim=-1)
    gates = ringattn.gated_delta_gates(a.flatten(1), b.flatten(1), layer["A_log"], layer["dt_bias"])
    out = ranks.rule(q.view(-1, key_heads, dim), k.view(-1, key_heads, dim), v.view(-1, heads, value_dim), *gates)
    out = norm(out, layer["norm.weight"], config.rms_norm_eps) * torch.nn.functional.silu(z.reshape(out.shape))
    return ringattn.linear(out.flatten(1), layer["out_proj.weight"])


def kda(x, layer, config, ranks, a, z, **bound):
    """The layers of Kimi Linear and Ling 3, from what their forget gates and output gates project."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    qkv = torch.cat([ringattn.linear(x, layer[f"{name}_proj.weight"]) for name in "qkv"], dim=-1)
    mixed = ranks.convolved(qkv, [layer[f"{name}_conv1d.weight"] for name in "qkv"])
    q, k, v = (rows.reshape(-1, heads, dim) for rows in mixed.chunk(3, dim=-1))
    b = ringattn.linear(x, layer["b_proj.weight"])
    gates = ringattn.gated_delta_gates(a.view(-1, heads, dim), b, layer["A_log"], layer["dt_bias"], **bound)
    out = norm(ranks.rule(q, k, v, *gates), layer["o_norm.weight"], config.rms_norm_eps)
    return ringattn.linear((out * z.view(out.shape).sigmoid()).flatten(1), layer["o_proj.weight"])


def kimi_linear(x, layer, config, ranks):
    def gate(name):
        return ringattn.linear(ringattn.linear(x, layer[f"{name}_a_proj.weight"]), layer[f"{name}_b_proj.weight"])

    return kda(x, layer, config, ranks, gate("f"), gate("g"))


def ling3(x, layer, config, ranks):
    a, z = (ringattn.linear(x, layer[f"{name}_proj.weight"]) for name in "fg")
    return kda(x, layer, config, ranks, a, z, lower_bound=config.kda_lower_bound)


def checkpoint(module):
    """A module's tensors under the names of the model's files, where the convolutions of q, k and v are apart."""
    tensors = {name.removeprefix("forget_gate."): x.detach().clone() for name, x in module.state_dict().items()}
    if "o_norm.weight" in tensors:
        parts = tensors.pop("conv1d.weight").chunk(3)
        tensors |= {f"{name}_conv1d.weight": part.contiguous() for name, part in zip("qkv", parts, strict=True)}
    return tensors


class Layers(unittest.TestCase):
    def expect_layer(self, module, config, layer_of, prefix):
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if weight.ndim < 2 or "A_log" in name:
                    weight.copy_(torch.rand(weight.shape, generator=generator))
                else:
                    weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.safetensors"
            safetensors.torch.save_file({prefix + name: x for name, x in checkpoint(module).items()}, path)
            layer = {name[len(prefix) :]: x for name, x in safetensors.torch.load_file(path).items()}
        x = torch.randn(TOKENS, config.hidden_size, generator=generator)
        with torch.no_grad():
            expected = module.eval()(x[None])[0]
        out = layer_of(x, layer, config, Ranks())
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
        self.assertGreater(float(out.std()), 0.01, "the layer has a result")
        layout = ringattn.segments([TOKENS], 3)
        parts = ringattn.run_ranks(
            3, lambda world: layer_of(ringattn.shard(x, layout, world.rank), layer, config, Ranks(layout, world)))  # fmt: skip
        self.assertTrue(torch.equal(ringattn.unshard(parts, layout), out))

    def test_qwen3_next(self):
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        config = transformers.Qwen3NextConfig(
            hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8,
            num_hidden_layers=1, layer_types=["linear_attention"])  # fmt: skip
        self.expect_layer(qwen.Qwen3NextGatedDeltaNet(config, 0), config, qwen3_next, "model.layers.0.linear_attn.")

    def test_kimi_linear(self):
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi

        config = transformers.KimiLinearConfig(
            hidden_size=24, num_hidden_layers=1, layer_types=["linear_attention"],
            linear_attn_config={"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1],
                                "full_attn_layers": []})  # fmt: skip
        self.expect_layer(kimi.KimiLinearDeltaAttention(config, 0), config, kimi_linear, "model.layers.0.self_attn.")

    def test_ling_3(self):
        from transformers.models.bailing_hybrid import modeling_bailing_hybrid as bailing

        config = transformers.BailingHybridConfig(hidden_size=24, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                                                  num_hidden_layers=1, layer_types=["linear_attention"])  # fmt: skip
        self.expect_layer(bailing.BailingHybridDeltaAttention(config, 0), config, ling3, "model.layers.0.attention.")


class Gates(unittest.TestCase):
    def test_arrays_and_tensors_agree_and_large_values_are_finite(self):
        random = np.random.default_rng(3)
        a, b, A_log, dt_bias = (random.standard_normal(shape, "float32") * 30 for shape in ((9, 2, 8), (9, 2), (2,), (16,)))
        A_log /= 30
        for bound in ({}, {"lower_bound": -5.0}):
            for given in ((a, b, A_log, dt_bias), (a[..., 0], b, A_log, dt_bias[:2])):
                made = ringattn.gated_delta_gates(*given, **bound)
                tensors = ringattn.gated_delta_gates(*map(torch.from_numpy, given), **bound)
                for one, other in zip(made, tensors, strict=True):
                    self.assertEqual(one.dtype, np.float32)
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-35)  # an ulp of an exponent of 60

    def test_a_graph_holds_them_and_they_have_gradients(self):
        generator = torch.Generator().manual_seed(4)
        given = [torch.randn(shape, generator=generator, requires_grad=True) for shape in ((5, 2, 8), (5, 2), (2,), (16,))]
        torch.compiler.reset()
        gates = torch.compile(ringattn.gated_delta_gates, fullgraph=True, backend="eager")(*given)
        for made, expected in zip(gates, ringattn.gated_delta_gates(*given), strict=True):
            self.assertTrue(torch.equal(made, expected))
        sum(x.sum() for x in gates).backward()
        self.assertTrue(all(bool(x.grad.abs().sum() > 0) for x in given))

    def test_what_does_not_fit_is_refused(self):
        a, b, A_log = np.zeros((5, 2), "float32"), np.zeros((5, 2), "float32"), np.zeros(2, "float32")
        for given, words in (
            ((a, b[:4], A_log, A_log), r"a is \[5, 2\] and b is \[4, 2\]"),
            ((a, b, A_log[:1], A_log), r"A_log is \[1\]"),
            ((a, b, A_log, np.zeros(3, "float32")), r"dt_bias is \[3\]"),
            ((a.astype("float64"), b, A_log, A_log), "a is float64"),
            ((a, b, A_log, torch.zeros(2)), "dt_bias is a Tensor"),
        ):
            with self.assertRaisesRegex(ringattn.UsageError, words):
                ringattn.gated_delta_gates(*given)
        with self.assertRaisesRegex(ringattn.UsageError, "lower_bound is 5"):
            ringattn.gated_delta_gates(a, b, A_log, A_log, lower_bound=5)


if __name__ == "__main__":
    unittest.main()
