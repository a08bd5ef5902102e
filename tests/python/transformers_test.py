# SPDX-License-Identifier: Apache-2.0
"""transformers' models over ringattn compute what they do by their own attention, eager and compiled; what isn't
computed is refused by name."""

import ctypes
import importlib.util
import inspect
import operator
import sys
import unittest
from unittest import mock

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    print("skipped: needs torch and transformers")
    sys.exit(77)

import ringattn
import ringattn.transformers
import torch
import transformers
from ringattn._transformers_masks import Mask, read_mask
from transformers import masking_utils

transformers.logging.set_verbosity_error()
ringattn.transformers.register()

LAYERS = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = LAYERS | {"vocab_size": 99, "pad_token_id": 0}
GROUPED = SHAPE | {"num_key_value_heads": 2}
ONE = {"num_hidden_layers": 1}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
TWO_KINDS = {"head_dim": 32, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
BOTH = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99, "pad_token_id": 0}  # fmt: skip
PACKED = torch.cat([torch.arange(20), torch.arange(30)])[None]
CU = torch.tensor([0, 20, 50], dtype=torch.int32)
OTHER_CU = torch.tensor([0, 30, 50], dtype=torch.int32)
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
UNSUPPORTED, USAGE = ringattn.UnsupportedError, ringattn.UsageError


def made(model, config, **settings):
    torch.manual_seed(1)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def llama(**settings):
    return made("LlamaForCausalLM", "LlamaConfig", **GROUPED | settings)


def mistral(**settings):
    return made("MistralForCausalLM", "MistralConfig", **GROUPED | settings, sliding_window=20)


def llama4(chunk):
    return made("Llama4ForCausalLM", "Llama4TextConfig", **GROUPED, intermediate_size_mlp=64, num_local_experts=1,
                attention_chunk_size=chunk, head_dim=32, layer_types=["chunked_attention", "full_attention"],
                no_rope_layers=[1, 0], max_position_embeddings=128)  # fmt: skip


def gpt_oss():
    return made("GptOssForCausalLM", "GptOssConfig", **GROUPED, **EXPERTS, **TWO_KINDS)


def bert(**settings):
    return made("BertForMaskedLM", "BertConfig", **SHAPE | settings)


def causal_models():
    return {
        "llama": llama(),
        "mistral, sliding": mistral(),
        "mixtral, sliding": made("MixtralForCausalLM", "MixtralConfig", **GROUPED, **EXPERTS, sliding_window=10),
        "qwen3 moe": made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **GROUPED, head_dim=32, num_experts=2,
                          num_experts_per_tok=1, moe_intermediate_size=32),
        "gpt-oss, sinks, sliding and causal": gpt_oss(),
        "gemma 2, soft-cap": made("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, **TWO_KINDS,
                                  attn_logit_softcapping=5.0),
        "llama 4, one chunk": llama4(64),
        "a decoder that isn't causal": llama(is_causal=False),
    }  # fmt: skip


def bidirectional_models():
    """Each with what goes into it."""
    ids, of_decoder = torch.randint(1, 99, (2, 50)), torch.randint(1, 99, (2, 9))
    return {
        "bert": (bert(), {"input_ids": ids}),
        "modernbert, windows on both sides": (
            made("ModernBertForMaskedLM", "ModernBertConfig", **SHAPE | {"num_hidden_layers": 3}, local_attention=10),
            {"input_ids": ids},
        ),
        "vit": (
            made("ViTModel", "ViTConfig", **LAYERS, image_size=32, patch_size=8),
            {"pixel_values": torch.randn(2, 3, 32, 32)},
        ),
        "bart, queries and keys of two sequences": (
            made("BartForConditionalGeneration", "BartConfig", **BOTH, d_model=128, max_position_embeddings=128),
            {"input_ids": ids, "decoder_input_ids": of_decoder},
        ),
    }  # fmt: skip


class Case(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        self.ids = torch.randint(1, 99, (2, 50))
        torch.set_grad_enabled(False)
        self.addCleanup(torch.set_grad_enabled, True)

    def assert_close(self, got, expected, what=""):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0, msg=lambda text: f"{what}: {text}")

    def assert_refused(self, kind, words, call, *given, **named):
        with self.assertRaises(kind, msg=words) as caught:
            call(*given, **named)
        self.assertIn(words, str(caught.exception))


class Models(Case):
    def test_causal_ones_are_those_of_their_own_attention(self):
        for name, model in causal_models().items():
            model.generation_config.eos_token_id = None
            model.set_attn_implementation("eager")
            logits = model(self.ids, use_cache=False).logits
            text = model.generate(self.ids, max_new_tokens=5, do_sample=False)
            model.set_attn_implementation("ringattn")
            for cached in (True, False):
                self.assert_close(model(self.ids, use_cache=cached).logits, logits, name)
            got = model.generate(self.ids, max_new_tokens=5, do_sample=False)
            self.assertEqual(got.tolist(), text.tolist(), name)
            self.assertEqual(got.shape[1], 55, name)

    def test_autocast_casts_what_attention_gets(self):
        model, padded = llama(), torch.arange(50) >= torch.tensor([[9], [0]])
        for given in ({}, {"attention_mask": padded}):
            logits = []
            for implementation in ("sdpa", "ringattn"):
                model.set_attn_implementation(implementation)
                with torch.autocast("cpu", torch.bfloat16):
                    logits.append(model(self.ids, **given).logits[padded])
            self.assertEqual(logits[1].dtype, torch.bfloat16)
            torch.testing.assert_close(*logits, atol=0.02, rtol=0.02)

    def test_bidirectional_ones_are_those_of_their_own_attention(self):
        for name, (model, given) in bidirectional_models().items():
            model.set_attn_implementation("eager")
            expected = model(**given)[0]
            model.set_attn_implementation("ringattn")
            self.assert_close(model(**given)[0], expected, name)

    def test_packed_rows_are_the_sequences_alone(self):
        for name, model in causal_models().items():
            model.set_attn_implementation("eager")
            alone = torch.cat([model(self.ids[:1, :20]).logits, model(self.ids[:1, 20:]).logits], 1)
            model.set_attn_implementation("ringattn")
            for cached in (True, False):
                packed = model(self.ids[:1], position_ids=PACKED, cu_seq_lens_q=CU, cu_seq_lens_k=CU, use_cache=cached)
                self.assert_close(packed.logits, alone, name)

    def test_ranks_give_what_the_sequences_alone_do(self):
        layout = ringattn.packed([30, 20], 3)
        for model in (llama(), mistral()):
            model.set_attn_implementation("ringattn")
            alone = torch.cat([model(self.ids[:1, :30]).logits[0], model(self.ids[:1, 30:]).logits[0]])
            for given in ({}, {"cu_seq_lens_q": OTHER_CU, "cu_seq_lens_k": OTHER_CU}):

                def rank(world, model=model, given=given):
                    with torch.no_grad(), ringattn.transformers.batch(layout, world):
                        positions = torch.from_numpy(ringattn.positions(layout, world.rank))[None]
                        ids = ringattn.shard(self.ids[0], layout, world.rank)[None]
                        return model(input_ids=ids, position_ids=positions, use_cache=False, **given).logits[0]

                # Products of other numbers of rows are rounded otherwise.
                self.assert_close(ringattn.unshard(ringattn.run_ranks(3, rank), layout), alone)


def kept_tokens(batch: int, tokens: int, kind: str) -> torch.Tensor:
    """bool [batch, tokens]: the tokens that a padding mask keeps."""
    at, dropped = torch.arange(tokens), torch.tensor([0, 7, tokens // 2, tokens - 1, 23][:batch])[:, None]
    return {
        "left": at >= dropped,
        "right": at < tokens - dropped,
        "both": (at >= dropped // 2) & (at < tokens - dropped + dropped // 2),
        "between": (at < 3) | (at >= 3 + dropped * (tokens - 4) // tokens),
    }[kind]


class Padded(Case):
    """Kept tokens have the bits of their sequence alone."""

    def rows(self, kind: str, queries: int, mask_function, window=None):
        """The last `queries` of 40 tokens, by layers of q, k and v; and those of each sequence alone."""
        torch.manual_seed(1)
        kept = kept_tokens(5, 40, kind)
        q, k, v = (torch.randn(5, heads, 40, 16) for heads in (4, 2, 2))
        q = q[:, :, 40 - queries :]
        layer, named = torch.nn.Module(), {"sliding_window": window, "softcap": 3.0, "s_aux": torch.randn(4)}
        common = {"mask_function": mask_function, "local_size": window, "q_length": queries}
        mask = ringattn.transformers.attention_mask(**common, kv_length=40, q_offset=40 - queries, attention_mask=kept)
        out = ringattn.transformers.attention_forward(layer, q, k, v, mask, **named)[0]
        for row in range(5):
            at_q, at_k = kept[row, 40 - queries :], kept[row]
            n_q, n_k = int(at_q.sum()), int(at_k.sum())
            mine = [x[row : row + 1][:, :, at] for x, at in ((q, at_q), (k, at_k), (v, at_k))]
            alone = ringattn.transformers.attention_mask(**common | {"q_length": n_q}, kv_length=n_k, q_offset=n_k - n_q)
            if n_q:
                expected = ringattn.transformers.attention_forward(layer, *mine, alone, **named)[0]
                yield out[row : row + 1, at_q], expected
            yield out[row, ~at_q], torch.zeros(queries - n_q, 4, 16)

    def test_rows_are_those_of_the_sequences_alone(self):
        causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(9)
        for kind in ("left", "right", "both", "between"):
            for queries in (40, 20, 5, 1):
                for function, size in ((causal, None), (window, 9)):
                    if size is None or kind != "between":
                        for got, expected in self.rows(kind, queries, function, size):
                            self.assertTrue(torch.equal(got, expected), (kind, queries, size))

    def test_models_are_those_of_their_own_attention(self):
        ids = torch.randint(1, 99, (3, 50))
        causal = {"llama": llama(), "gpt-oss, sinks, sliding and causal": gpt_oss()}
        bidirectional = bidirectional_models()
        others = {name: bidirectional[name] for name in bidirectional if name.split(",")[0] in ("bert", "modernbert", "bart")}
        for kind in ("left", "right"):
            kept = kept_tokens(3, 50, kind)
            given = {"attention_mask": kept.long(), "position_ids": (kept.cumsum(1) - 1).clamp(min=0)}
            models = {name: (model, {"input_ids": ids, **given}) for name, model in causal.items()}
            models |= {name: (model, inputs | {"attention_mask": kept[:2].long()}) for name, (model, inputs) in others.items()}
            for name, (model, inputs) in models.items():
                model.set_attn_implementation("eager")
                expected = model(**inputs)[0]
                model.set_attn_implementation("ringattn")
                got, decoder = model(**inputs)[0], "decoder_input_ids" in inputs
                seen = torch.ones_like(inputs["decoder_input_ids"], dtype=bool) if decoder else kept[: len(got)]
                self.assert_close(got[seen], expected[seen], f"{name}, {kind}")

    def test_generation(self):
        kept = {"attention_mask": kept_tokens(2, 50, "left").long()}
        for name, model in (("llama", llama()), ("mistral, sliding", mistral()), ("gpt-oss", gpt_oss())):
            model.generation_config.eos_token_id = None
            for static in ({}, {"cache_implementation": "static", "disable_compile": True}):
                for given in ({}, kept):
                    found = []
                    for implementation in ("eager", "ringattn"):
                        model.set_attn_implementation(implementation)
                        found.append(model.generate(self.ids, max_new_tokens=5, do_sample=False, **given, **static).tolist())
                    self.assertEqual(*found, (name, static, given))

    def test_gradients(self):
        torch.set_grad_enabled(True)
        kept = kept_tokens(2, 50, "left")
        model, found = llama().train(), []
        for implementation in ("eager", "ringattn"):
            model.set_attn_implementation(implementation)
            loss = model(self.ids, attention_mask=kept.long(), use_cache=False).logits[kept].square().mean()
            found.append(torch.autograd.grad(loss, [*model.parameters()]))
        for expected, got in zip(*found, strict=True):
            self.assert_close(got, expected)


class Steps(Case):
    def test_a_fixed_cache_has_the_bits_of_one_that_grows(self):
        for model in (llama(), mistral()):
            model.set_attn_implementation("ringattn")
            rows = []
            for kind in (transformers.DynamicCache, transformers.StaticCache):
                cache = kind(config=model.config, **({"max_cache_len": 64} if kind is transformers.StaticCache else {}))
                pieces = [(0, 20), (20, 23), (23, 45), (45, 46), (46, 47), (47, 50)]
                rows.append([model(self.ids[:, a:b], **{CACHE: cache}).logits for a, b in pieces])
            for growing, fixed in zip(*rows, strict=True):
                self.assertTrue(torch.equal(growing, fixed), model.config.model_type)

    def test_a_new_length_prepares_nothing(self):
        q, k, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 600, 16), torch.randn(2, 2, 600, 16)
        layer, created = torch.nn.Module(), []
        init = ringattn._job.Prepared.__init__

        def counted(prepared, *arguments):
            created.append(type(prepared).__name__)
            init(prepared, *arguments)

        ringattn._job.Prepared.__init__ = counted
        self.addCleanup(setattr, ringattn._job.Prepared, "__init__", init)
        for keys in range(500, 600):
            mask = Mask(True, None, (1, keys))
            out = ringattn.transformers.attention_forward(layer, q, k[:, :, :keys], v[:, :, :keys], mask)[0]
            if keys % 25 == 0:
                expected = ringattn.attention(q, k[:, :, :keys], v[:, :, :keys], order="bhtd")[0].transpose(1, 2)
                self.assertTrue(torch.equal(out, expected), keys)
        self.assertEqual(sorted(set(created)), ["Attention", "Decode"])
        self.assertLessEqual(created.count("Decode"), 2)  # up to 512 keys, and from there on
        self.assertEqual(created.count("Attention"), 4)  # of this test

    def test_plain_steps_have_the_bits_of_the_general_way(self):
        q, keys = torch.randn(3, 4, 2, 16), (1, 15, 16, 17, 1022, 1023, 1024, 1025)
        k, v = torch.randn(2, 3, 2, 1025, 16)
        layer, sinks = torch.nn.Module(), torch.randn(4).bfloat16()
        forward = ringattn.transformers.attention_forward
        forms = ({}, {"sliding_window": 5}, {"softcap": 2.0, "scaling": 0.3}, {"s_aux": sinks, "position_ids": torch.zeros(1)})
        for batch, rows in ((3, 1), (3, 2), (1, 1)):
            for filled in (None, 14):
                for named in forms:
                    for length in keys if filled is None else (15, 40):
                        if length <= rows:
                            continue
                        mask = Mask(True, named.get("sliding_window"), (rows, length), filled=filled)
                        rows_of = q[:batch, :, :rows], k[:batch, :, :length], v[:batch, :, :length]
                        step = forward(layer, *rows_of, mask, **named)[0]
                        with mock.patch.object(ringattn.transformers, "_is_step", return_value=False):
                            with mock.patch.object(ringattn.transformers, "_is_plain_step", return_value=False):
                                expected = forward(layer, *rows_of, mask, **named)[0]
                        self.assertTrue(torch.equal(step, expected), (batch, rows, filled, named, length))

    def test_what_a_plain_step_is_not(self):
        q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16)
        plain = ringattn.transformers._is_plain_step
        call = (q, k, k, None, Mask(True, None, (1, 30)), 0.0, None, None, {"use_cache": True})
        self.assertTrue(plain(*call))
        others = {
            4: (None, Mask(False, None, (1, 30)), Mask(True, None, (1, 29)), Mask(True, 7, (1, 30)), Mask(True, None, (1, 1)),
                Mask(True, None, (1, 30), filled=torch.tensor(3)), Mask(True, None, (1, 30), padding=torch.ones(1, 30))),
            5: (0.5,), 6: (7,), 7: (object(),), 8: ({"cu_seq_lens_q": None}, {"output_attentions": True}, {"bias": 1}),
        }  # fmt: skip
        for place, values in others.items():
            for value in values:
                self.assertFalse(plain(*call[:place], value, *call[place + 1 :]), (place, value))
        with torch.enable_grad():
            self.assertFalse(plain(q.clone().requires_grad_(), *call[1:]))
            self.assertFalse(plain(*call[:3], torch.zeros(4, requires_grad=True), *call[4:]))
        with torch.autocast("cpu", torch.bfloat16):
            self.assertFalse(plain(*call))
        with ringattn.transformers.batch(ringattn.packed([30], 1)):
            self.assertFalse(plain(*call))
        with self.assertRaises(ringattn.UsageError):
            ringattn.transformers.decode_growing(q, k, k, 31, mask="causal", softmax_scale=None, softcap=0.0, sinks=None)

    def test_a_step_whose_sinks_alone_are_trained_has_their_gradient(self):
        q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16)
        sinks, mask = torch.zeros(4, requires_grad=True), Mask(True, None, (1, 30))
        forward = ringattn.transformers.attention_forward
        steps = []
        for graded in (False, True):  # the first call keeps what it has prepared
            with torch.set_grad_enabled(graded):
                steps.append(forward(torch.nn.Module(), q, k, k, mask, s_aux=sinks)[0])
        self.assertTrue(torch.equal(*steps))
        (gradient,) = torch.autograd.grad(steps[1], sinks, torch.ones_like(steps[1]))
        self.assertTrue(gradient.any())
        self.assertEqual(ringattn.transformers._not_decoded, set())

    def test_a_captured_step_prepares_nothing_and_reads_no_table(self):
        """A graph may be replayed when the table of lengths is gone."""
        q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 30, 16)
        step = ringattn.transformers.decode_growing
        named = {"mask": "causal", "softmax_scale": 0.25, "softcap": 0.0, "sinks": None}
        expected = step(q, k, k, 29, **named)
        with mock.patch.multiple(ringattn._growing_decode, is_captured=lambda query: True, _own_lengths=None, _prepare=None):
            self.assertTrue(torch.equal(step(q, k, k, 29, **named), expected))

    def test_a_capture_does_not_say_that_decode_has_no_kernel(self):
        refuses = mock.Mock(side_effect=UNSUPPORTED("this call is not prepared", "a graph is being captured", "Call it before."))
        with mock.patch.multiple(ringattn.transformers, decode_growing=refuses, is_captured=lambda query: True):
            with self.assertRaises(UNSUPPORTED):
                ringattn.transformers._step(torch.randn(1, 4, 1, 16), None, torch.randn(1, 2, 30, 16), 30, {})
        self.assertEqual(ringattn.transformers._not_decoded, set())

    def test_tables_of_lengths_are_bounded(self):
        lengths = ringattn._growing_decode._Lengths()
        with mock.patch.multiple(ringattn._growing_decode, _MAX_TABLES=2, _TABLE_LENGTHS=8):
            for length in (0, 7, 8, 31, 8, 100):
                for sequences in (1, 3):
                    address = lengths.address(length, sequences, torch.empty(0))
                    self.assertEqual((ctypes.c_int32 * sequences).from_address(address)[:], [length] * sequences)
                self.assertLessEqual(len(lengths._tables), 2)

    def test_attention_computes_what_decode_has_no_kernel_for(self):
        """As for fp32 on GPUs, and for most head dims there."""
        kept = {"attention_mask": kept_tokens(2, 50, "left").long()}
        model, found = llama(), []
        model.set_attn_implementation("ringattn")
        model.generation_config.eos_token_id = None
        refuses = mock.Mock(side_effect=UNSUPPORTED("no cuda kernel computes this", "decode needs one", "Use another."))
        for step in (ringattn.transformers.decode_growing, refuses):
            with mock.patch.multiple(ringattn.transformers, decode_growing=step, _not_decoded=set()):
                for given in ({}, kept):
                    for static in ({}, {"cache_implementation": "static", "disable_compile": True}):
                        found.append(model.generate(self.ids, max_new_tokens=4, do_sample=False, **given, **static).tolist())
        self.assertEqual(found[:4], found[4:])
        self.assertEqual(refuses.call_count, 1)  # and not again for the same dims

    def test_what_is_not_of_the_kept_call_is_prepared_or_refused(self):
        q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 30, 16)
        layer, mask = torch.nn.Module(), Mask(True, None, (1, 30))
        forward = ringattn.transformers.attention_forward
        forward(layer, q, k, k, mask)
        expected = forward(layer, q, k, k, mask, softcap=2.0)[0]
        self.assertFalse(torch.equal(expected, forward(layer, q, k, k, mask)[0]))
        spread = torch.randn(1, 2, 30, 32)[..., ::2]
        self.assertTrue(torch.equal(forward(layer, q, spread, k, mask)[0], forward(layer, q, spread.contiguous(), k, mask)[0]))
        self.assert_refused(USAGE, "v_cache is bfloat16 but q is float32", forward, layer, q, k, k.bfloat16(), mask)


class Masks(unittest.TestCase):
    def test_what_is_read_of_a_function_is_what_it_masks(self):
        def packed(function):
            """In the orders that versions of transformers have."""
            numbers = masking_utils.find_packed_sequence_indices(PACKED)
            same = masking_utils.packed_sequence_mask_function(numbers)
            if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
                return (masking_utils.and_masks(function, same),)
            within = masking_utils.remap_positions_for_packed_sequence(function, PACKED)
            return masking_utils.and_masks(within, same), masking_utils.and_masks(same, within)

        functions = {
            (True, None): masking_utils.causal_mask_function,
            (False, None): masking_utils.bidirectional_mask_function,
            (True, 1): masking_utils.sliding_window_causal_mask_function(1),
            (True, 7): masking_utils.sliding_window_causal_mask_function(7),
            (False, 7): masking_utils.sliding_window_bidirectional_mask_function(7),
        }
        distance = torch.arange(50)[None, :] - torch.arange(50)[:, None]
        for (causal, window), function in functions.items():
            self.assertEqual(read_mask(function, window, 50), (causal, window, None))
            words = Mask(causal, window, (50, 50)).kernel_mask()
            left, right = {"causal": (50, 0), "full": (50, 50)}.get(words, words)
            seen = masking_utils.sdpa_mask(1, 50, 50, mask_function=function, allow_is_causal_skip=False)[0, 0]
            self.assertTrue(torch.equal(seen, (-left <= distance) & (distance <= right)), words)
            for both in packed(function):
                *same, numbers = read_mask(both, window, 50)
                self.assertEqual(same, [causal, window])
                self.assertEqual(numbers[0].tolist(), [0] * 20 + [1] * 30)

    def test_chunks_are_causal_up_to_the_first_one_and_then_refused(self):
        function = masking_utils.chunked_causal_mask_function(16, torch.zeros(1, dtype=int))
        self.assertEqual(read_mask(function, 16, 16), (True, None, None))
        with self.assertRaises(UNSUPPORTED) as caught:
            read_mask(function, 16, 17)
        self.assertIn("in chunks of 16 tokens, and there are 17", str(caught.exception))

    def test_others_are_refused(self):
        sliding = masking_utils.sliding_window_causal_mask_function(7)
        images = _blockwise_overlay(torch.zeros(1, 50, dtype=int))
        for function, size in (
            (sliding, 8),
            (sliding, None),
            (masking_utils.sliding_window_overlay(7), 7),
            (masking_utils.or_masks(masking_utils.causal_mask_function, images), None),
            (masking_utils.and_masks(masking_utils.causal_mask_function, images), None),
            (lambda batch, head, q, k: k <= q, None),
        ):
            with self.assertRaises(UNSUPPORTED) as caught:
                read_mask(function, size, 50)
            self.assertIn("the model has a mask of its own", str(caught.exception))


class Refused(Case):
    def refused(self, kind, words, model, *given, **named):
        model.set_attn_implementation("ringattn")
        self.assert_refused(kind, words, model, *given, **named)

    def test_masks(self):
        self.refused(UNSUPPORTED, "the model attends in chunks of 16 tokens, and there are 50", llama4(16), self.ids)
        grows = llama4(52)
        grows.generation_config.eos_token_id = None
        grows.set_attn_implementation("ringattn")
        words = "the model attends in chunks of 52 tokens, and there are 53"
        self.assert_refused(UNSUPPORTED, words, grows.generate, self.ids, max_new_tokens=5, do_sample=False)
        gemma = made("Gemma3TextModel", "Gemma3TextConfig", **GROUPED, **TWO_KINDS, use_bidirectional_attention=True)
        self.refused(UNSUPPORTED, "the model has a mask of its own", gemma, self.ids)
        holes = torch.ones_like(self.ids)
        holes[0, 5] = 0
        self.refused(UNSUPPORTED, "attention_mask drops tokens between others", mistral(), self.ids, attention_mask=holes)
        for words, given in (
            ("an attention_mask of other than two axes is given", {"attention_mask": torch.ones(2, 1, 50, 50)}),
            ("attention_mask has 40 tokens, and there are keys of 50", {"attention_mask": torch.ones(2, 40)}),
            ("keys end at token 40 and queries at 50", {"attention_mask": torch.ones(2, 40), "use_cache": False}),
        ):
            self.refused(UNSUPPORTED, words, llama(), self.ids, **given)

    def test_windows_that_a_layer_has_otherwise(self):
        for window, says in ((7, "(6, 0)"), (None, "None")):
            model = gpt_oss()
            model.model.layers[0].self_attn.sliding_window = window
            words = f"a layer's window (left, right) is {says} (that of its mask is (9, 0))"
            self.refused(UNSUPPORTED, words, model, self.ids)
        model = llama()
        model.model.layers[0].self_attn.forward = _with_a_window(model.model.layers[0].self_attn.forward)
        words = "a layer's window (left, right) is (9, 0) (that of its mask is None)"
        self.refused(UNSUPPORTED, words, model, self.ids)

    def test_packed_rows(self):
        for model in (llama(), mistral()):
            given = {"position_ids": PACKED, "use_cache": False}
            self.refused(UNSUPPORTED, "separated only by position_ids", model, self.ids[:1], **given)
            cu = {"cu_seq_lens_q": OTHER_CU, "cu_seq_lens_k": OTHER_CU}
            self.refused(USAGE, "sequences begin at [0, 20, 50] by position_ids", model, self.ids[:1], **given, **cu)
            self.refused(USAGE, "a batch of 2 has cu_seq_lens_q", model, self.ids, **cu)
            self.refused(USAGE, "cu_seq_lens_k is missing", model, self.ids[:1], cu_seq_lens_q=CU)
            self.refused(USAGE, "cu_seq_lens_q is missing", model, self.ids[:1], cu_seq_lens_k=CU)
            with ringattn.transformers.batch(ringattn.packed([20, 30], 1)):
                self.refused(USAGE, "its sequences begin at [0, 20, 50]", model, self.ids[:1], **given, **cu)
                cu["cu_seq_lens_q"] = CU
                words = "cu_seq_lens_k [0, 30, 50] inside of batch()"
                self.refused(USAGE, words, model, self.ids[:1], **given, **cu)
                self.refused(USAGE, "a batch of 2 is inside of batch()", model, self.ids)
                cache = model(self.ids[:1]).past_key_values
                self.refused(USAGE, "no cache goes with packed rows", model, self.ids[:1, :5], **{CACHE: cache})
                padded = {"attention_mask": torch.arange(50)[None] > 4, "use_cache": False}
                self.refused(UNSUPPORTED, "the batch is padded", model, self.ids[:1], **padded)
            self.refused(UNSUPPORTED, "the batch is padded", model, self.ids[:1], **padded, cu_seq_lens_q=CU, cu_seq_lens_k=CU)

    def test_what_a_model_passes(self):
        t5 = made("T5Model", "T5Config", vocab_size=99, d_model=128, d_kv=32, d_ff=64, num_layers=2, num_heads=4)
        words = "the model passes position_bias (it is added to the logits, and ringattn adds nothing to them)"
        t5.set_attn_implementation("ringattn")
        if t5.encoder.config._attn_implementation == "ringattn":  # versions before 5.20 keep the model's own attention
            self.refused(UNSUPPORTED, words, t5, self.ids, decoder_input_ids=self.ids)
        self.refused(UNSUPPORTED, "the model passes bonus (ringattn doesn't know", llama(), self.ids, bonus=1)
        words = "read_index (it is of continuous batching, for which the model has another implementation). Call it inside of"
        self.refused(UNSUPPORTED, words, llama(), self.ids, read_index=object())
        self.refused(UNSUPPORTED, "output_attentions is set", llama(), self.ids, output_attentions=True)
        model = llama(attention_dropout=0.5)
        self.refused(UNSUPPORTED, "dropout is 0.5", model.train(), self.ids)

    def test_layers_that_do_without_the_mask_that_was_made(self):
        config = transformers.BloomConfig(vocab_size=99, hidden_size=128, n_layer=1, n_head=4)
        bloom = transformers.BloomForCausalLM._from_config(config, attn_implementation="ringattn")
        self.assert_refused(UNSUPPORTED, "the model computes with its mask, by add", bloom, self.ids)
        mask = Mask(True, None, (6, 6))
        self.assert_refused(UNSUPPORTED, "the model reads shape of its mask", getattr, mask, "shape")
        self.assert_refused(UNSUPPORTED, "the model takes a part of its mask", operator.getitem, mask, 0)
        self.assertFalse(hasattr(mask, "to"))
        x, longer = torch.ones(1, 2, 6, 32), torch.ones(1, 2, 12, 32)
        for words, given in (
            ("a causal layer has no mask", (x, x, x, None)),
            ("a layer has 6 queries and 12 keys (its mask is for 6 and 6)", (x, longer, longer, mask)),
        ):
            forward = ringattn.transformers.attention_forward
            self.assert_refused(UNSUPPORTED, words, forward, torch.nn.Module(), *given)


def _blockwise_overlay(numbers):
    """transformers' function of this name, which versions before 5.10 lack."""
    return lambda batch, head, q, k: (numbers[batch, q] == numbers[batch, k]) & (numbers[batch, q] >= 0)


def _with_a_window(forward):
    return lambda *given, **named: forward(*given, **named, sliding_window=10)


class Versions(Case):
    def test_transformers_with_other_masks_is_refused(self):
        name = "packed_sequence_mask_function"
        self.addCleanup(setattr, masking_utils, name, getattr(masking_utils, name))
        delattr(masking_utils, name)
        self.assert_refused(UNSUPPORTED, f"transformers is {transformers.__version__}", ringattn.transformers.register)


class Training(Case):
    def setUp(self):
        super().setUp()
        torch.set_grad_enabled(True)

    @staticmethod
    def gradients(model, call, *given, **named):
        loss = call(*given, use_cache=False, **named).logits.square().mean()
        return torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)

    def compare(self, made, expected, what):
        for got, wanted in zip(made, expected, strict=True):
            self.assertEqual(got is None, wanted is None, what)
            if got is not None:
                self.assert_close(got, wanted, what)

    def test_gradients_are_those_of_their_own_attention(self):
        for name, model in (("llama", llama()), ("gpt-oss, sinks, sliding and causal", gpt_oss())):
            model.train().set_attn_implementation("eager")
            expected = self.gradients(model, model, self.ids)
            model.set_attn_implementation("ringattn")
            self.compare(self.gradients(model, model, self.ids), expected, name)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            self.compare(self.gradients(model, model, self.ids), expected, f"{name}, checkpointed")

    def test_packed_rows_in_one_graph(self):
        model = mistral().train()
        model.set_attn_implementation("ringattn")
        given = {"position_ids": PACKED, "cu_seq_lens_q": CU, "cu_seq_lens_k": CU}
        expected = self.gradients(model, model, self.ids[:1], **given)
        torch.compiler.reset()
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        self.compare(self.gradients(model, call, self.ids[:1], **given), expected, "mistral")


class Compiled(Case):
    """In one graph, with the bits of eager calls; what numbers tell is refused when the graph runs."""

    def compiled(self, model):
        model.set_attn_implementation("ringattn")
        torch.compiler.reset()
        return torch.compile(model, fullgraph=True, backend="aot_eager")

    def test_batches(self):
        uncached = {"use_cache": False}
        for model, uncached in ((llama(**ONE), uncached), (mistral(**ONE), uncached), (bert(**ONE), {})):
            model.set_attn_implementation("eager")
            eager = model(self.ids).logits
            call = self.compiled(model)
            logits = model(self.ids).logits
            self.assert_close(logits, eager)
            cached = [{}] if model.config.model_type == "llama" else []
            for given in (uncached, *cached, uncached | {"attention_mask": torch.ones_like(self.ids)}):
                self.assert_close(call(self.ids, **given).logits, eager)
            padded = torch.ones_like(self.ids)
            padded[1, 49] = 0
            words = "the batch is padded"
            self.assert_refused(UNSUPPORTED, words, call, self.ids, **uncached, attention_mask=padded)

    def test_packed_rows(self):
        row, given = self.ids[:1], {"position_ids": PACKED, "use_cache": False}
        right, wrong = ({"cu_seq_lens_q": cu, "cu_seq_lens_k": cu} for cu in (CU, OTHER_CU))
        for model in (llama(**ONE), mistral(**ONE)):
            call = self.compiled(model)
            self.assert_close(call(row, **given, **right).logits, model(row, **given, **right).logits)
            self.assert_refused(USAGE, "sequences begin at [0, 20, 50] by position_ids", call, row, **given, **wrong)
            self.assert_refused(UNSUPPORTED, "separated only by position_ids", call, row, **given)
            plain = given | {"position_ids": torch.arange(50)[None]}
            self.assert_close(call(row, **plain).logits, model(row, **plain).logits)

    def test_steps_over_a_fixed_cache(self):
        model = llama(**ONE)
        call, steps = self.compiled(model), []
        for forward in (model, call):
            cache = transformers.StaticCache(config=model.config, max_cache_len=64)
            model(self.ids, **{CACHE: cache})
            steps.append([forward(self.ids[:, at : at + 1], **{CACHE: cache}).logits for at in range(3)])
        for eager, compiled in zip(*steps, strict=True):
            self.assertTrue(torch.equal(compiled, eager))
        padded = torch.ones(2, 51, dtype=torch.long)
        padded[1, 0] = 0
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(self.ids, **{CACHE: cache})
        given = {"attention_mask": padded, CACHE: cache}
        self.assert_refused(UNSUPPORTED, "the batch is padded", call, self.ids[:, :1], **given)

    def test_rows_of_a_batch(self):
        row, given = self.ids[:1], {"position_ids": PACKED, "use_cache": False}
        right, wrong = ({"cu_seq_lens_q": cu, "cu_seq_lens_k": cu} for cu in (CU, OTHER_CU))
        model = mistral()
        call = self.compiled(model)
        with ringattn.transformers.batch(ringattn.packed([20, 30], 1)):
            expected = model(row, **given).logits
            self.assert_close(call(row, **given).logits, expected)
            self.assert_close(call(row, **given, **right).logits, expected)
            self.assert_refused(USAGE, "its sequences begin at [0, 20, 50]", call, row, **given, **wrong)


if __name__ == "__main__":
    unittest.main()
