# SPDX-License-Identifier: Apache-2.0
"""flash_attn's functions over ringattn: signatures, defaults, results, and refusals."""

import importlib.util
import inspect
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import torch
from ringattn import flash_attn
from ringattn.testing import assert_same_bits


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class FlashAttn(unittest.TestCase):
    """ringattn.flash_attn, by places as flash_attn 2.8's callers do."""

    SIGNATURES = {
        "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
                           "return_attn_probs",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
                                  "window_size softcap alibi_slopes deterministic return_attn_probs block_table",
        "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
                                   "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
                                   "num_splits return_softmax_lse",
        "flash_attn_qkvpacked_func": "qkv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
                                     "return_attn_probs",
        "flash_attn_kvpacked_func": "q kv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
                                    "return_attn_probs",
        "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p softmax_scale causal window_size softcap "
                                            "alibi_slopes deterministic return_attn_probs",
        "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
                                           "causal window_size softcap alibi_slopes deterministic return_attn_probs",
    }  # fmt: skip
    DEFAULTS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
                "deterministic": False, "return_attn_probs": False, "rotary_interleaved": True, "num_splits": 0,
                "return_softmax_lse": False}  # fmt: skip
    q, k, v = normal(2, 20, 4, 64), normal(2, 20, 2, 64, seed=2), normal(2, 20, 2, 64, seed=3)

    def test_signatures_and_defaults(self):
        for name, arguments in self.SIGNATURES.items():
            parameters = inspect.signature(getattr(flash_attn, name)).parameters
            self.assertEqual(" ".join(parameters), arguments, name)
            for parameter in parameters.values():
                if parameter.name in self.DEFAULTS:
                    self.assertEqual(parameter.default, self.DEFAULTS[parameter.name], f"{name}: {parameter.name}")

    def test_whole_sequences(self):
        q, k, v = self.q, self.k, self.v
        full, lse = ringattn.attention(q, k, v, mask="full")
        assert_same_bits(flash_attn.flash_attn_func(q, k, v), full)
        capped, _ = ringattn.attention(q, k, v, mask=(3, 0), softmax_scale=0.2, softcap=5.0)
        assert_same_bits(flash_attn.flash_attn_func(q, k, v, 0.0, 0.2, True, (3, 9), 5.0), capped)
        out, its_lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
        self.assertEqual((tuple(its_lse.shape), probabilities), ((2, 4, 20), None))
        assert_same_bits(out, full)
        assert_same_bits(its_lse.transpose(1, 2).contiguous(), lse)
        assert_same_bits(flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2)), full)
        packed = torch.stack([q, q, q], 2)
        assert_same_bits(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), ringattn.attention(q, q, q)[0])

    def test_packed_sequences(self):
        q, k, v = self.q[0], self.k[0], self.v[0]
        cu = torch.tensor([0, 8, 20], dtype=torch.int32)
        expected, lse = ringattn.varlen(q, k, v, cu)
        out, its_lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, causal=True, return_attn_probs=True)
        assert_same_bits(out, expected)
        assert_same_bits(its_lse, lse.T.contiguous())
        assert_same_bits(
            flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu, cu, 12, 12, 0.0, None, True), expected
        )
        packed = torch.stack([k, k, k], 1)
        full = ringattn.varlen(k, k, k, cu, mask="full")[0]
        assert_same_bits(flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu, 12), full)
        with self.assertRaises(ringattn.UsageError) as caught:
            flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 12, 11)
        self.assertIn("max_seqlen_k is 11 (a sequence of cu_seqlens_k has 12 tokens)", str(caught.exception))

    def test_a_cache(self):
        """k and v join it behind cache_seqlens, which stay; without them these count all keys."""
        step = flash_attn.flash_attn_with_kvcache
        cache = [normal(2, 32, 2, 64, seed=seed) for seed in (4, 5)]
        q, k, v = self.q[:, :2], self.k[:, :2], self.v[:, :2]
        before = torch.tensor([8, 5], dtype=torch.int32)
        own, its = [x.clone() for x in cache], [x.clone() for x in cache]
        expected, lse = ringattn.decode(q, *own, lengths=before + 2, k_new=k, v_new=v)
        out, its_lse = step(q, *its, k, v, cache_seqlens=before, causal=True, return_softmax_lse=True)
        assert_same_bits(out, expected)
        assert_same_bits(its_lse.transpose(1, 2).contiguous(), lse)
        self.assertEqual(before.tolist(), [8, 5])
        for mine, ours in zip(its, own):
            assert_same_bits(mine, ours)
        full = ringattn.decode(q, *its, before + 2, mask="full")[0]
        assert_same_bits(step(q, *its, cache_seqlens=before + 2), full)
        assert_same_bits(step(q, *its), ringattn.decode(q, *its, torch.full((2,), 32, dtype=torch.int32), mask="full")[0])
        assert_same_bits(step(q, *its, cache_seqlens=7), ringattn.decode(q, *its, torch.full((2,), 7, dtype=torch.int32),
                                                                        mask="full")[0])  # fmt: skip
        pages = [x.reshape(4, 16, 2, 64) for x in its]
        table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
        assert_same_bits(step(q, *pages, cache_seqlens=before + 2, block_table=table), full)

    def test_what_is_not_computed_is_refused_by_name(self):
        q, k, v = self.q, self.k, self.v
        cu, cache = torch.tensor([0, 20], dtype=torch.int32), (normal(2, 32, 2, 64), normal(2, 32, 2, 64))
        some = {"cache_seqlens": 4}
        for words, call in (
            ("dropout_p is 0.1", lambda: flash_attn.flash_attn_func(q, k, v, 0.1)),
            ("alibi_slopes", lambda: flash_attn.flash_attn_func(q, k, v, alibi_slopes=normal(4))),
            ("block_table of flash_attn_varlen_func",
             lambda: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 20, 20, block_table=cu[None])),
            *((f"{name} of flash_attn_with_kvcache is given",
               lambda name=name: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, **some, **{name: cu}))
              for name in ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad")),
            ("Pass as many new keys as rows of q",
             lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, k[:, :2], v[:, :2], **some)),
        ):  # fmt: skip
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        for words, call in (
            ("flash_attn_func has no s_aux (this signature has no sinks)", lambda: flash_attn.flash_attn_func(q, k, v, s_aux=cu)),
            ("flash_attn_varlen_func has no seqused_k (packed sequences follow each other",
             lambda: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 20, 20, seqused_k=cu)),
            ("flash_attn_with_kvcache has no page_table (it is called block_table there). Pass block_table.",
             lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, page_table=cu[None], **some)),
            ("flash_attn_with_kvcache has no pack_gqa (no result",
             lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, pack_gqa=True, **some)),
            ("flash_attn_func has no q_descale (arrays have no scales",
             lambda: flash_attn.flash_attn_func(q, k, v, q_descale=cu)),
            ("k is int (", lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, 1, v[:, :1], cache_seqlens=cu[1:])),
            ("qkv is ndarray (", lambda: flash_attn.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2).numpy())),
            ("cache_seqlens is True", lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, cache_seqlens=True)),
            ("cache_seqlens holds torch.int64",
             lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, cache_seqlens=torch.tensor([4, 4]))),
            ("v is [2, 1, 2, 32]",
             lambda: flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, k[:, :1], v[:, :1, :, :32], **some)),
        ):  # fmt: skip
            with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn(words, str(caught.exception))
        assert_same_bits(flash_attn.flash_attn_func(q, k, v, window_size=(None, None)), flash_attn.flash_attn_func(q, k, v))
        with self.assertRaises(ringattn.UsageError):
            flash_attn.flash_attn_with_kvcache(q[:, :1], *cache, k[:, :1], v[:, :1])


if __name__ == "__main__":
    unittest.main()
