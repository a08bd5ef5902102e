# SPDX-License-Identifier: Apache-2.0
"""Whole models of transformers after make_batch_invariant(): the bits of a sequence in padded batches, static caches and
continuous batching are those that it has alone. The script of docs/batch-invariance.md runs, too."""

import contextlib
import copy
import importlib.util
import io
import pathlib
import runpy
import sys
import types
import unittest
from unittest import mock

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    print("skipped: needs torch and transformers")
    sys.exit(77)

import ringattn
import ringattn.transformers
import torch
import transformers
from ringattn._batch_invariant import RMSNorm, sum_rows

transformers.logging.set_verbosity_error()
transformers.logging.get_logger("ContinuousBatchingLogger").setLevel("ERROR")

ROOT = pathlib.Path(__file__).resolve().parents[2]
# intermediate_size is no multiple of a vector, after which torch's silu computes otherwise.
SHAPE = {"hidden_size": 64, "intermediate_size": 173, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0, "eos_token_id": None}  # fmt: skip
LENGTHS = [5, 33, 17, 50, 9, 41, 26, 1]
NEW = 6
BATCHING = transformers.ContinuousBatchingConfig
UNSUPPORTED = ringattn.UnsupportedError


def made(name: str, **settings):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**SHAPE | settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def models():
    return {"llama": made("Llama"), "qwen3": made("Qwen3", head_dim=32)}


def prompts() -> list[list[int]]:
    torch.manual_seed(2)
    rows = [torch.randint(1, 99, (length,)).tolist() for length in LENGTHS]
    rows[5][:33] = rows[1]  # a shared prefix of two pages
    return rows


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, mask and positions of a batch with its padding on the left."""
    most = max(map(len, rows))
    ids = torch.tensor([[0] * (most - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in rows])
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def differing(model) -> int:
    """How many sequences have other logits in a padded batch than alone."""
    rows = prompts()
    ids, mask, positions = padded(rows)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    alone = [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    return sum(not torch.equal(batch[-len(row) :], single) for batch, row, single in zip(logits, rows, alone))


def greedy(model, ids, **given):
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **given)[:, ids.shape[1] :].tolist()


def continuously(model, rows: list[list[int]]) -> list[list[int]]:
    """Greedy tokens in continuous batching: 24 tokens a batch, so that long prompts are computed in chunks beside decode steps
    of others."""
    sizes = {"num_blocks": 64, "max_batch_tokens": 24, "page_size" if hasattr(BATCHING, "page_size") else "block_size": 16}
    settings = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    with ringattn.transformers.continuous_batching(model):
        found = model.generate_batch(rows, generation_config=settings, continuous_batching_config=BATCHING(**sizes))
    return [result.generated_tokens for result in found.values()]


class Case(unittest.TestCase):
    def setUp(self):
        torch.set_grad_enabled(False)
        self.addCleanup(torch.set_grad_enabled, True)


class Invariant(Case):
    def test_sequences_have_the_bits_that_they_have_alone(self):
        rows, order = prompts(), [3, 1, 7, 0, 2, 6, 5, 4]
        for name, plain in models().items():
            for dtype in (torch.float32, torch.bfloat16):
                what = f"{name}, {dtype}"
                model = ringattn.transformers.make_batch_invariant(copy.deepcopy(plain).to(dtype))
                self.assertEqual(differing(model), 0, what)
                ids, mask, _ = padded(rows)
                alone = [greedy(model, torch.tensor([row]))[0] for row in rows]
                self.assertEqual(greedy(model, ids, attention_mask=mask), alone, what)
                static = greedy(model, ids, attention_mask=mask, cache_implementation="static", disable_compile=True)
                self.assertEqual(static, alone, what)
                self.assertEqual(continuously(model, [rows[at] for at in order]), [alone[at] for at in order], what)
                self.assertEqual(model.config._attn_implementation, "ringattn")

    def test_models_before_are_not(self):
        model = made("Llama")
        ringattn.transformers.register()
        for implementation in ("eager", "sdpa", "ringattn"):
            model.set_attn_implementation(implementation)
            self.assertGreater(differing(model), 0, implementation)

    def test_parameters_keep_their_names_and_logits_are_near(self):
        for name, plain in models().items():
            model = ringattn.transformers.make_batch_invariant(copy.deepcopy(plain))
            self.assertEqual(list(model.state_dict()), list(plain.state_dict()))
            ids = torch.tensor([prompts()[1]])
            logits = model(ids).logits
            torch.testing.assert_close(logits, plain(ids).logits, atol=1e-5, rtol=0)
            again = ringattn.transformers.make_batch_invariant(model)
            self.assertTrue(torch.equal(again(ids).logits, logits))


class Norms(Case):
    def test_a_row_has_the_same_sum_in_any_batch(self):
        for length in (1, 2, 3, 64, 173, 40_000):
            x = torch.randn(9, length)
            whole = sum_rows(x)
            self.assertEqual(whole.shape, (9, 1))
            torch.testing.assert_close(whole.double(), x.double().sum(-1, keepdim=True), atol=2e-3, rtol=1e-5)
            for begin, end in ((0, 1), (3, 5), (8, 9)):
                self.assertTrue(torch.equal(sum_rows(x[begin:end].clone()), whole[begin:end]), length)

    def test_it_is_what_it_replaces(self):
        theirs = made("Llama").model.norm
        theirs.weight.copy_(torch.randn(64))
        x = torch.randn(5, 64)
        ours = RMSNorm(theirs.weight, theirs.variance_epsilon)
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours(x.bfloat16()), theirs(x.bfloat16()), atol=0.02, rtol=0.02)


class Refused(Case):
    def test_modules_that_are_not_known(self):
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=99)).eval()
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
        ntk = made("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
        torch_gelu = made("Llama", hidden_act="gelu_new")
        other_norm = made("Llama")
        other_norm.model.norm.forward = lambda x: x * 2
        own = made("Llama")
        own.model.layers[0].mlp.down_proj = torch.nn.Bilinear(1, 1, 1)
        for words, model in (
            ("Conv1D (transformer.h.0.attn.c_attn)", gpt2),
            ("MixtralExperts (model.layers.0.mlp.experts)", made("Mixtral", **experts)),
            ("model.rotary_emb is a LlamaRotaryEmbedding (its frequencies of type dynamic", ntk),
            ("model.layers.0.mlp.act_fn is a NewGELUActivation (ringattn.nn.Linear has", torch_gelu),
            ("model.norm is a LlamaRMSNorm (it computes something else", other_norm),
            ("not known: Bilinear (model.layers.0.mlp.down_proj)", own),
            ("Conv1D (transformer.h.0.attn.c_attn)", gpt2.train()),  # and not its dropout
        ):
            self.refused(UNSUPPORTED, words, model)

    def test_layers_that_cannot_be_replaced(self):
        hooked, other_head, other_mlp, no_gate, meta = (made("Llama") for _ in range(5))
        hooked.lm_head.register_forward_hook(lambda module, given, out: out * 2)
        other_head.lm_head.forward = lambda x: x[..., :5]
        other_mlp.model.layers[1].mlp.forward = lambda x: x * 2
        no_gate.model.layers[0].mlp.gate_proj = torch.nn.Identity()
        meta.model.layers[1].mlp.down_proj.to("meta")
        for kind, words, model in (
            (UNSUPPORTED, "lm_head has hooks", hooked),
            (UNSUPPORTED, "lm_head is a Linear (its forward was replaced)", other_head),
            (UNSUPPORTED, "model.layers.1.mlp is a LlamaMLP (its forward was replaced)", other_mlp),
            (UNSUPPORTED, "model.layers.0.mlp.gate_proj is a Identity (a linear", no_gate),
            (UNSUPPORTED, "model.layers.0.self_attn.q_proj.weight is float64", made("Llama").double()),
            (ringattn.UsageError, "model.layers.1.mlp.down_proj.weight is on the meta device", meta),
        ):
            self.refused(kind, words, model)

    def refused(self, kind, words, model):
        """Nothing of the model is replaced."""
        before = [*map(type, model.modules())]
        with self.assertRaises(kind) as caught:
            ringattn.transformers.make_batch_invariant(model)
        self.assertIn(words, str(caught.exception))
        self.assertNotEqual(model.config._attn_implementation, "ringattn")
        self.assertEqual([*map(type, model.modules())], before)

    def test_what_is_no_model_that_generates(self):
        with self.assertRaises(ringattn.UsageError):
            ringattn.transformers.make_batch_invariant(torch.nn.Linear(1, 1))
        with self.assertRaises(ringattn.UsageError):
            ringattn.transformers.make_batch_invariant(transformers.LlamaForCausalLM)
        with self.assertRaises(ringattn.UsageError), ringattn.transformers.continuous_batching(torch.nn.Linear(1, 1)):
            pass


class State(Case):
    def test_continuous_batching_has_no_cuda_graphs(self):
        model = made("Llama")
        made_by = model.init_continuous_batching
        with ringattn.transformers.continuous_batching(model):
            with ringattn.transformers.continuous_batching(model):
                pass
            for wanted in (True, (False, True)):
                with self.assertRaises(ringattn.UnsupportedError) as caught:
                    model.generate_batch([[1, 2]], continuous_batching_config=BATCHING(use_cuda_graph=wanted))
                self.assertIn(f"use_cuda_graph is {wanted} (lengths are read on the host", str(caught.exception))
            config = BATCHING(num_blocks=8, max_batch_tokens=8)
            manager = model.init_continuous_batching(continuous_batching_config=config)
            self.assertFalse(any(manager.continuous_batching_config.cuda_graph_booleans))
            self.assertIsNone(config.use_cuda_graph)  # the caller's stays
        self.assertEqual(model.init_continuous_batching, made_by)

    def test_continuous_batching_leaves_each_config_its_implementation(self):
        config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**SHAPE))
        config._attn_implementation = {"": "sdpa", "text_config": "ringattn", "vision_config": "eager"}
        model = types.SimpleNamespace(config=config, generate_batch=None)
        with self.assertRaises(KeyError), ringattn.transformers.continuous_batching(model):
            raise KeyError
        parts = (config, config.text_config, config.vision_config)
        self.assertEqual([part._attn_implementation for part in parts], ["sdpa", "ringattn", "eager"])


class Script(unittest.TestCase):
    def test_no_sequence_differs(self):
        script = runpy.run_path(str(ROOT / "docs/examples/batch_invariant.py"))
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", ["batch_invariant.py", "--tiny"]), contextlib.redirect_stdout(printed):
            self.assertEqual(script["main"](), 0)
        self.assertIn("ringattn: 0 of 12 sequences differ", printed.getvalue())


if __name__ == "__main__":
    unittest.main()
