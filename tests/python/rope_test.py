# SPDX-License-Identifier: Apache-2.0
"""rope(): against transformers' apply_rotary_pos_emb in fp32 for models of every type, with the same bits over ranks, layouts
and batches, its gradients, and refusals by name."""

import importlib.util
import sys
import unittest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    print("skipped: needs torch and transformers")
    sys.exit(77)

import numpy as np
import ringattn
import torch
from ringattn.testing import assert_same_bits
from transformers import logging
from transformers.models.glm.configuration_glm import GlmConfig
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm_rope
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rope
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope
from transformers.models.phi.configuration_phi import PhiConfig
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

logging.set_verbosity_error()
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 130000, 2**21 + 3])
LONG = [1.0 + 0.1 * i for i in range(32)]
MODELS = {
    "default": (LlamaConfig, LlamaRotaryEmbedding, {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (LlamaConfig, LlamaRotaryEmbedding, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama3": (LlamaConfig, LlamaRotaryEmbedding, {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}),
    "yarn": (Qwen2Config, Qwen2RotaryEmbedding, {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn, not truncated": (Qwen2Config, Qwen2RotaryEmbedding, {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}),
    "yarn, mscale": (Qwen2Config, Qwen2RotaryEmbedding, {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "mscale": 0.707, "mscale_all_dim": 1.3}),
    "proportional": (LlamaConfig, LlamaRotaryEmbedding, {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}),
    "partial": (PhiConfig, PhiRotaryEmbedding, {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "longrope": (LlamaConfig, LlamaRotaryEmbedding, {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 32, "long_factor": LONG}),
}  # fmt: skip


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotated_by_hand(rows, cos, sin):
    """apply_rotary_pos_emb of half-split pairs, [tokens, heads, dim], of the first elements."""
    dim = cos.shape[-1]
    turned, rest = rows[..., :dim], rows[..., dim:]
    return torch.cat([llama_rope(turned[None], turned[None], cos[None], sin[None], unsqueeze_dim=2)[0][0], rest], -1)


class AsTransformers(unittest.TestCase):
    def test_every_type(self):
        q, k = normal(len(POSITIONS), 4, 64), normal(len(POSITIONS), 2, 64, seed=2)
        for name, (config_type, embedding, parameters) in MODELS.items():
            config = config_type(**SHAPE, max_position_embeddings=131072, rope_parameters=dict(parameters))
            theirs = embedding(config)
            length = {"length": 2**21} if name == "longrope" else {}
            positions = POSITIONS
            cos, sin = (x[0] for x in theirs(q, positions[None]))
            inv_freq, factor = ringattn.rope_frequencies(64, rope_parameters=parameters, **length)
            self.assertEqual(factor, np.float32(theirs.attention_scaling), name)
            # PyTorch's power is within 1 ulp of the exact one. The rest of the formula adds none, but to its interpolations.
            wanted = theirs.inv_freq.numpy()
            self.assertLessEqual(np.abs(inv_freq - wanted).max(initial=0, where=wanted == 0), 0)
            np.testing.assert_allclose(inv_freq, wanted, rtol=4 * 2**-23, atol=0, err_msg=name)
            # With its frequencies the angles are equal, and cos and sin differ by the rounding of PyTorch's.
            with_theirs = {"inv_freq": theirs.inv_freq, "attention_factor": factor, "rotary_dim": cos.shape[-1]}
            for dtype, allowed in ((torch.float32, 3e-7), (torch.bfloat16, 2**-8)):
                rows = q.to(dtype), k.to(dtype)
                found = ringattn.rope(*rows, positions=positions, **with_theirs)
                for x, y in zip(rows, found):
                    exact = rotated_by_hand(x.float(), cos, sin)
                    error = (y.float() - exact).abs() / (exact.abs() + (1 if dtype == torch.float32 else 2**-9) * factor)
                    self.assertLessEqual(error.max().item(), allowed * 1.01, name)
            # And by their parameters at positions where an ulp of a frequency is still little.
            found = ringattn.rope(q[:4], positions=positions[:4], rope_parameters=parameters, **length)
            torch.testing.assert_close(found, rotated_by_hand(q[:4], cos[:4], sin[:4]), rtol=0, atol=1e-4, msg=name)

    def test_interleaved(self):
        q, k = normal(len(POSITIONS), 4, 64), normal(len(POSITIONS), 2, 64, seed=2)
        config = GlmConfig(**SHAPE, head_dim=64)
        theirs = GlmRotaryEmbedding(config)
        cos, sin = theirs(q, POSITIONS[None])
        wanted = glm_rope(q[None], k[None], cos, sin, unsqueeze_dim=2)
        found = ringattn.rope(q, k, positions=POSITIONS, inv_freq=theirs.inv_freq, rotary_dim=32, interleaved=True)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x, y[0], rtol=0, atol=3e-6)
        # GPT-J computes its table in integers' positions, in fp32 as well.
        table = create_sinusoidal_positions(128, 32)
        sin, cos = table[:77].split(16, -1)
        rows = normal(77, 3, 64)
        turned = gptj_rope(rows[None, ..., :32], sin[None], cos[None])[0]
        torch.testing.assert_close(ringattn.rope(rows, rotary_dim=32, interleaved=True),
                                   torch.cat([turned, rows[..., 32:]], -1), rtol=0, atol=2e-5)  # fmt: skip

    def test_mrope(self):
        q = normal(9, 2, 64)
        positions = torch.stack([torch.arange(9), torch.arange(9) * 3, 40 - torch.arange(9)])
        angles = positions[..., None].float() * torch.from_numpy(ringattn.rope_frequencies(64)[0])
        chunked = torch.cat([angles[0, :, :8], angles[1, :, 8:20], angles[2, :, 20:]], -1)
        alternate = angles[0].clone()
        alternate[:, 1:30:3], alternate[:, 2:30:3] = angles[1, :, 1:30:3], angles[2, :, 2:30:3]
        for sections, more, by_pair in (([8, 12, 12], {}, chunked), ([12, 10, 10], {"mrope_interleaved": True}, alternate)):
            found = ringattn.rope(q, positions=positions, rope_parameters={"mrope_section": sections} | more)
            by_pair = torch.cat([by_pair, by_pair], -1)
            torch.testing.assert_close(found, rotated_by_hand(q, by_pair.cos(), by_pair.sin()), rtol=0, atol=2e-6)
            # Text has one position on all axes.
            assert_same_bits(ringattn.rope(q, rope_parameters={"mrope_section": sections} | more), ringattn.rope(q))


class Bits(unittest.TestCase):
    def test_ranks_layouts_batches_and_views(self):
        lengths = [70, 0, 33, 1]
        begins = np.concatenate([[0], np.cumsum(lengths)])
        for dtype in (torch.float32, torch.bfloat16):
            q, k = normal(104, 3, 64, dtype=dtype), normal(104, 2, 64, seed=2, dtype=dtype)
            whole = ringattn.rope(q, k, cu_seqlens=begins, theta=5e5)
            for sequence, begin in enumerate(begins[:-1]):
                rows = slice(begin, begins[sequence + 1])
                for x, y in zip(ringattn.rope(q[rows], k[rows], theta=5e5), whole):
                    assert_same_bits(x, y[rows])
            for row in (0, 69, 70, 103):
                at = torch.tensor([row - int(begins[np.searchsorted(begins, row, "right") - 1])], dtype=torch.int32)
                assert_same_bits(ringattn.rope(k[row : row + 1], positions=at, theta=5e5), whole[1][row : row + 1])
            for ranks in (2, 3, 5):
                for make in (ringattn.striped, ringattn.zigzag, ringattn.contiguous):
                    layout = make(lengths, ranks)

                    def mine(world, q=q, k=k, layout=layout):
                        return ringattn.rope(*(ringattn.shard(x, layout, world.rank) for x in (q, k)), layout=layout,
                                             world=world, theta=5e5)  # fmt: skip

                    shards = ringattn.run_ranks(ranks, mine)
                    for place, wanted in enumerate(whole):
                        assert_same_bits(ringattn.unshard([shard[place] for shard in shards], layout), wanted)
            fused = torch.cat([q, k, k], 1)
            views = fused[:, :3], fused[:, 3:5]
            found = ringattn.rope(*views, cu_seqlens=begins, theta=5e5, out=views)
            self.assertIs(found[0], views[0])
            assert_same_bits(fused, torch.cat([*whole, k], 1))
            batch = torch.stack([q[:50], q[:50]])
            assert_same_bits(ringattn.rope(batch, theta=5e5)[1], whole[0][:50])
            assert_same_bits(ringattn.rope(q[20:50], offset=20, theta=5e5), whole[0][20:50])
            assert_same_bits(ringattn.rope(batch, positions=torch.arange(50), theta=5e5), ringattn.rope(batch, theta=5e5))
        numbers = q.float().numpy()
        assert_same_bits(ringattn.rope(numbers, theta=5e5), ringattn.rope(q.float(), theta=5e5).numpy())

    def test_every_part_of_a_head(self):
        for head_dim in range(2, 513, 2):
            for rotary_dim in range(2, head_dim + 1, 2):
                factor = ringattn._rope._rotary_factor(rotary_dim, head_dim)
                self.assertTrue(factor <= 1 and int(head_dim * factor) == rotary_dim, (head_dim, rotary_dim))
        for head_dim, rotary_dim in ((88, 60), (110, 58), (512, 512)):
            self.assertEqual(ringattn.rope_frequencies(head_dim, rotary_dim=rotary_dim)[0].shape, (rotary_dim // 2,))

    def test_exact_angles(self):
        q = normal(1, 1, 64)
        at = torch.tensor([2**21 + 3])
        angles = at.double() * torch.from_numpy(ringattn.rope_frequencies(64, exact=True)[0])
        angles = torch.cat([angles, angles])[None]
        wanted = rotated_by_hand(q.double(), angles.cos(), angles.sin())
        torch.testing.assert_close(ringattn.rope(q, positions=at, exact=True).double(), wanted, rtol=0, atol=1e-6)
        self.assertGreater((ringattn.rope(q, positions=at).double() - wanted).abs().max().item(), 1e-3)


class Gradients(unittest.TestCase):
    def test_are_rotations_by_the_negative_angle(self):
        begins = [0, 4, 4, 11]
        parameters = MODELS["yarn"][2]
        q, k = normal(11, 4, 64).requires_grad_(), normal(11, 2, 64, seed=2).requires_grad_()
        angles = torch.cat([torch.arange(4), torch.arange(7)])[:, None].float()
        inv_freq, factor = ringattn.rope_frequencies(64, rope_parameters=parameters)
        angles = (angles * torch.from_numpy(inv_freq)).repeat(1, 2)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        douts = normal(11, 4, 64, seed=3), normal(11, 2, 64, seed=4)

        def call(q, k):
            return ringattn.rope(q, k, cu_seqlens=torch.tensor(begins), rope_parameters=parameters)

        found = torch.autograd.grad(call(q, k), (q, k), douts)
        wanted = torch.autograd.grad([rotated_by_hand(x, cos, sin) for x in (q, k)], (q, k), douts)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x, y, rtol=0, atol=3e-6)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for x, y in zip(compiled(q, k), call(q, k)):
            assert_same_bits(x.detach(), y.detach())
        for x, y in zip(torch.autograd.grad(compiled(q, k), (q, k), douts), found):
            assert_same_bits(x, y)
        (only,) = torch.autograd.grad(call(q, k)[1], (k,), douts[1])
        assert_same_bits(only, found[1])


class Refusals(unittest.TestCase):
    def test_by_name(self):
        q = np.zeros((4, 2, 64), "float32")
        dynamic = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4096}
        for text, settings in (
            ("RoPE of type dynamic without a length", {"rope_parameters": dynamic}),
            ("type of RoPE is \"axial\"", {"rope_parameters": {"rope_type": "axial"}}),
            ("\"alpha=1000.0\" is not a parameter", {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0}}),
            ("for each kind of layer", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            ("rotary_dim is 63", {"rotary_dim": 63}),
            ("rotary_dim is 0 (it is above 0)", {"rotary_dim": 0}),
            ("partial_rotary_factor is 0.0 (it is above 0)", {"rope_parameters": {"partial_rotary_factor": 0.0}}),
            ("theta is 0 (it is above 0)", {"theta": 0}),
            ("theta is nan (it is above 0)", {"theta": float("nan")}),
            ("attention_factor is 0 (it is above 0)", {"inv_freq": [1.0] * 32, "attention_factor": 0}),
            ("32 pairs", {"inv_freq": [1.0]}),
            ("positions are float32", {"positions": np.zeros(4, "float32")}),
            ("positions are [5]", {"positions": np.zeros(5, "int64")}),
            ("there are 4 rows", {"cu_seqlens": [0, 5]}),
            ("position_ids", {"position_ids": np.zeros(4, "int64")}),
        ):  # fmt: skip
            with self.assertRaises(ringattn.Error, msg=text) as caught:
                ringattn.rope(q, **settings)
            self.assertIn(text, str(caught.exception))
        with self.assertRaisesRegex(ringattn.UsageError, "partial_rotary_factor is 1.03"):
            ringattn.rope(q, rotary_dim=66)
        ringattn.rope(q, rope_parameters=dynamic, length=8192)
        self.assertEqual(ringattn.rope(q[:0]).shape, (0, 2, 64))


class InADecodeStep(unittest.TestCase):
    def test_has_the_bits_of_rotated_rows(self):
        q, k, v = normal(2, 2, 4, 64), normal(2, 2, 2, 64, seed=2), normal(2, 2, 2, 64, seed=3)
        settings = ringattn.RopeSettings(64, theta=5e5, interleaved=True)
        for compiled in (False, True):
            results = []
            for rope in (None, settings):
                caches = [normal(2, 16, 2, 64, seed=4), normal(2, 16, 2, 64, seed=5)]
                lengths = torch.tensor([0, 9], dtype=torch.int32)
                given_q, given_k = q, k
                if rope is None:
                    positions = lengths[:, None] + torch.arange(2, dtype=torch.int32)
                    given_q, given_k = ringattn.rope(q, k, positions=positions, theta=5e5, interleaved=True)

                def step(q, k, v, k_cache, v_cache, lengths, rope=rope):
                    return ringattn.decode(q, k_cache, v_cache, lengths_before=lengths, update_lengths=True, k_new=k, v_new=v,
                                           rope=rope)  # fmt: skip

                call = torch.compile(step, fullgraph=True, backend="eager") if compiled else step
                results.append((*call(given_q, given_k, v, *caches, lengths), *caches, lengths))
            for left, right in zip(*results, strict=True):
                assert_same_bits(left, right)

    def test_is_refused_by_name(self):
        q, cache, lengths = normal(1, 4, 64), normal(1, 16, 2, 64), torch.tensor([5], dtype=torch.int32)
        for make, problem in ((lambda: ringattn.RopeSettings(0, rotary_dim=4), "head_dim is 0 (it is above 0)"),
                              (lambda: ringattn.RopeSettings(64, inv_freq=3), "inv_freq is 3 (it is a flat list of numbers"),
                              (lambda: ringattn.RopeSettings(64, inv_freq=np.ones((2, 2))), "inv_freq is [[1. 1.] [1. 1.]]")):
            with self.assertRaises(ringattn.UsageError) as caught:
                make()
            self.assertIn(problem, str(caught.exception))
        for rope, problem in (({"theta": 1e4}, "rope is dict"), (ringattn.RopeSettings(32), "rope is for heads of 32")):
            with self.assertRaisesRegex(ringattn.UsageError, problem):
                ringattn.decode(q, cache, cache, lengths, rope=rope)
        sections = ringattn.RopeSettings(64, rope_parameters={"rope_type": "default", "mrope_section": [8, 12, 12]})
        with self.assertRaisesRegex(ringattn.UsageError, "3 axes of positions"):
            ringattn.decode(q, cache, cache, lengths, rope=sections)


if __name__ == "__main__":
    unittest.main()
