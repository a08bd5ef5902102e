# SPDX-License-Identifier: Apache-2.0
"""Calls as users of flash_attn, SDPA, flashinfer and mamba_ssm write them: computed in their meaning, or refused by name."""

import unittest
import warnings

import numpy as np
import ringattn
from ringattn import testing


def normal(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


def ints(*values):
    return np.array(values, "int32")


Q, K, V = normal(2, 20, 4, 64), normal(2, 20, 2, 64, seed=2), normal(2, 20, 2, 64, seed=3)
CU = [0, 8, 20]
PACKED = Q[0], K[0], V[0]
STEP = normal(2, 4, 64), normal(2, 16, 2, 64, seed=2), normal(2, 16, 2, 64, seed=3)
NEW = {"k_new": normal(2, 2, 64, seed=4), "v_new": normal(2, 2, 64, seed=5)}


def assert_same_bits(a, b):
    """Of arrays, or of tuples of them."""
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else ((a, b),):
        testing.assert_same_bits(x, y)


def swapped(x):
    return np.ascontiguousarray(x.swapaxes(-3, -2))


class Refused(unittest.TestCase):
    def refused(self, words, kind, call):
        with self.subTest(words):
            with self.assertRaises(kind) as caught:
                call()
            self.assertIn(words, str(caught.exception))
            self.assertTrue(caught.exception.problem and caught.exception.why and caught.exception.suggestion)


class Masks(Refused):
    def test_causal_and_windows_are_flash_attn_s(self):
        for spelled, mask in (
            ({"causal": True}, "causal"), ({"causal": False}, "full"), ({"window_size": (3, 2)}, (3, 2)),
            ({"causal": False, "window_size": (-1, -1)}, "full"), ({"causal": True, "window_size": (5, 7)}, (5, 0)),
            ({"causal": True, "window_size": (-1, -1)}, "causal"),
        ):  # fmt: skip
            assert_same_bits(ringattn.attention(Q, K, V, **spelled), ringattn.attention(Q, K, V, mask=mask))
            assert_same_bits(ringattn.varlen(*PACKED, CU, **spelled), ringattn.varlen(*PACKED, CU, mask=mask))
        assert_same_bits(ringattn.decode(*STEP, ints(9, 7), causal=True), ringattn.decode(*STEP, ints(9, 7)))

    def test_contradictions_are_refused(self):
        attention, error = ringattn.attention, ringattn.CallError
        self.refused("mask and causal of attention are given", error, lambda: attention(Q, K, V, mask="full", causal=True))
        self.refused("window_size of attention is given, and no mask", error, lambda: attention(Q, K, V, window_size=(-1, -1)))
        self.refused("softmax_scale and scale of", error, lambda: attention(Q, K, V, softmax_scale=0.1, scale=0.1))
        self.refused("causal is 'yes'", ringattn.UsageError, lambda: attention(Q, K, V, causal="yes"))
        self.refused("is_causal", ringattn.UnsupportedError, lambda: ringattn.decode(*STEP, ints(9, 7), is_causal=True))

    def test_is_causal_is_aligned_to_the_first_key(self):
        some = Q[:, :5]
        expected = ringattn.attention(some, K, V, q_offset=0)
        bthd = {"order": "bthd"}
        assert_same_bits(ringattn.attention(some, K, V, is_causal=True, **bthd), expected)
        assert_same_bits(ringattn.attention(some, K, V, is_causal=False, **bthd), ringattn.attention(some, K, V, mask="full"))
        out = ringattn.scaled_dot_product_attention(swapped(some), swapped(K), swapped(V), is_causal=True, enable_gqa=True)
        assert_same_bits(swapped(out), expected[0])
        wanted = ringattn.attention(Q, K, V, mask="full", softmax_scale=0.3)[0]
        assert_same_bits(
            swapped(ringattn.scaled_dot_product_attention(*map(swapped, (Q, K, V)), scale=0.3, enable_gqa=True)), wanted
        )
        self.refused("enable_gqa is False", ringattn.UsageError,
                     lambda: ringattn.scaled_dot_product_attention(*map(swapped, (Q, K, V))))  # fmt: skip
        self.refused("attn_mask is given", ringattn.UnsupportedError,
                     lambda: ringattn.scaled_dot_product_attention(Q, Q, Q, np.ones((20, 20), bool)))  # fmt: skip

    def test_sdpa_s_words_need_the_order_of_axes(self):
        attention, swap = ringattn.attention, [swapped(x) for x in (Q, Q, Q)]  # as SDPA has them: 20 heads of 4 tokens here
        for word in ({"is_causal": True}, {"enable_gqa": True}, {"attn_mask": None}):
            for rows, orders in ((swap, ("bhtd", "bthd")), ([x[0] for x in swap], ("htd", "thd"))):
                self.refused(f'{next(iter(word))} of attention is given without order (it is SDPA\'s, whose heads come before '
                             f'tokens, and attention() takes tokens before heads). Pass order="{orders[0]}" for SDPA\'s axes, or '
                             f'order="{orders[1]}".', ringattn.CallError, lambda: attention(*rows, **word))  # fmt: skip
        assert_same_bits(attention(*swap, is_causal=True, order="bhtd")[0], swapped(attention(Q, Q, Q)[0]))

    def test_words_of_libraries_with_a_full_mask_need_a_mask(self):
        rows = normal(2, 3, 4, 64), *STEP[1:]
        latents = normal(20, 4, 24), normal(20, 64), normal(20, 8), normal(4, 16, 64), normal(4, 16, 64)
        for word, library, op, call in (
            ("sm_scale", "flashinfer", "attention", lambda **more: ringattn.attention(Q, K, V, sm_scale=0.2, **more)),
            ("logits_soft_cap", "flashinfer", "attention",
             lambda **more: ringattn.attention(Q, K, V, logits_soft_cap=3.0, **more)),
            ("scale", "SDPA", "attention", lambda **more: ringattn.attention(Q, K, V, scale=0.2, **more)),
            ("score_mod", "flex_attention", "attention", lambda **more: ringattn.attention(Q, K, V, score_mod=None, **more)),
            ("dropout_p", "flash_attn", "attention", lambda **more: ringattn.attention(Q, K, V, dropout_p=0.0, **more)),
            ("deterministic", "flash_attn", "varlen", lambda **more: ringattn.varlen(*PACKED, CU, deterministic=True, **more)),
            ("max_seqlen_q", "flash_attn", "varlen", lambda **more: ringattn.varlen(*PACKED, CU, max_seqlen_q=12, **more)),
            ("qo_indptr", "flashinfer", "varlen", lambda **more: ringattn.varlen(*PACKED, qo_indptr=CU, **more)),
            ("sm_scale", "flashinfer", "mla", lambda **more: ringattn.mla(*latents, sm_scale=0.2, **more)),
            ("cache_seqlens", "flash_attn", "decode", lambda **more: ringattn.decode(*rows, cache_seqlens=ints(9, 7), **more)),
        ):  # fmt: skip
            self.refused(f"{word} of {op} is given, and no mask (without causal {op} is causal, and {library} is not). Pass "
                         "causal=True or causal=False, too.", ringattn.CallError, call)  # fmt: skip
            for said in ({"causal": True}, {"causal": False}, {"mask": "full"}, {"window_size": (4, 0)}):
                call(**said)
        one = rows[0][:, :1], *STEP[1:]
        for name, lengths in (("window_size", {"lengths": ints(9, 7), "window_size": (-1, -1)}),
                              ("cache_seqlens", {"cache_seqlens": ints(9, 7)})):  # fmt: skip
            self.refused(f"{name} of decode", ringattn.CallError, lambda: ringattn.decode(*rows, **lengths))
            assert_same_bits(ringattn.decode(*one, **lengths), ringattn.decode(*one, ints(9, 7)))

    def test_queries_that_see_nothing_are_warned_of_once(self):
        long = normal(1, 30, 2, 64), normal(1, 11, 2, 64)
        for call in (lambda: ringattn.attention(long[0], long[1], long[1]),
                     lambda: ringattn.varlen(long[0][0], long[1][0], long[1][0], [0, 30], [0, 11])):  # fmt: skip
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                first, second = call(), call()
            self.assertEqual(len(caught), 1)
            self.assertIn("19 of 30 queries of a sequence see no key", str(caught[0].message))
            self.assertRegex(str(caught[0].message), r"taken for \[.*tokens, heads, head_dim\]")
            self.assertEqual(caught[0].filename, __file__)
            assert_same_bits(first, second)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ringattn.attention(long[0], long[1], long[1], mask="full")
            ringattn.attention(long[0], long[1], long[1], q_offset=0)


class Results(Refused):
    def test_what_is_returned(self):
        out, lse = ringattn.attention(Q, K, V)
        assert_same_bits(ringattn.attention(Q, K, V, return_lse=True), (out, lse))
        assert_same_bits(ringattn.attention(Q, K, V, return_lse=False), out)
        assert_same_bits(ringattn.attention(Q, K, V, causal=True, return_attn_probs=False), out)
        self.refused("attention has no attention probabilities", ringattn.UnsupportedError,
                     lambda: ringattn.attention(Q, K, V, return_attn_probs=True))  # fmt: skip

    def test_orders_of_axes(self):
        out, lse = ringattn.attention(Q, K, V)
        spelled, spelled_lse = ringattn.attention(*map(swapped, (Q, K, V)), order="bhtd")
        assert_same_bits((swapped(spelled), spelled_lse.swapaxes(1, 2)), (out, lse))
        given = np.empty((2, 4, 20, 64), "float32")
        ringattn.attention(*map(swapped, (Q, K, V)), order="bhtd", out=given)
        assert_same_bits(swapped(given), out)
        assert_same_bits(ringattn.attention(Q, K, V, order="bthd"), (out, lse))
        packed, _ = ringattn.varlen(*map(swapped, PACKED), CU, order="htd")
        assert_same_bits(swapped(packed), ringattn.varlen(*PACKED, CU)[0])
        self.refused("order of attention is 'sbhd'", ringattn.UsageError, lambda: ringattn.attention(Q, K, V, order="sbhd"))
        self.refused("q of varlen has 4 axes", ringattn.UsageError, lambda: ringattn.varlen(Q, K, V, CU, order="thd"))

    def test_grouped_heads(self):
        assert_same_bits(ringattn.attention(Q, K, V, enable_gqa=True, causal=True, order="bthd"), ringattn.attention(Q, K, V))
        self.refused("enable_gqa is False, and there are 4 heads of q and 2 of k", ringattn.UsageError,
                     lambda: ringattn.attention(Q, K, V, enable_gqa=False, order="bthd"))  # fmt: skip
        ringattn.attention(*map(swapped, (Q, Q, Q)), order="bhtd", mask="full", enable_gqa=False)


class Lengths(Refused):
    def test_lengths_before_are_cache_seqlens(self):
        def step(**lengths):
            caches = [cache.copy() for cache in STEP[1:]]
            return (*ringattn.decode(STEP[0], *caches, **NEW, **lengths), *caches)

        for spelled in ({"lengths_before": ints(8, 6)}, {"cache_seqlens": ints(8, 6)}):
            assert_same_bits(step(**spelled), step(lengths=ints(9, 7)))
            assert_same_bits(spelled[next(iter(spelled))], ints(8, 6))
        before = ints(8, 6)
        assert_same_bits(step(lengths_before=before, update_lengths=True), step(lengths=ints(9, 7)))
        assert_same_bits(before, ints(9, 7))
        assert_same_bits(ringattn.decode(*STEP, cache_seqlens=ints(9, 7)), ringattn.decode(*STEP, ints(9, 7)))
        for _ in range(2):  # the second call of a form is another path
            kept = ints(8, 6)
            step(lengths_before=kept)
            assert_same_bits(kept, ints(8, 6))

    def test_of_latents_too(self):
        q, cache, rows = normal(2, 4, 24), normal(2, 16, 72), {"latent": normal(2, 64), "k_rope": normal(2, 8), "rope_dim": 8}
        w = {"w_uk": normal(4, 16, 64), "w_uv": normal(4, 16, 64)}
        expected = ringattn.mla_decode(q, cache.copy(), lengths=ints(9, 7), **rows, **w)
        before = ints(8, 6)
        assert_same_bits(ringattn.mla_decode(q, cache.copy(), lengths_before=before, **rows, **w), expected)
        assert_same_bits(before, ints(8, 6))
        self.refused("lengths of mla_decode are passed by position", ringattn.CallError,
                     lambda: ringattn.mla_decode(q, cache, ints(9, 7), *w.values(), **rows))  # fmt: skip

    def test_what_is_ambiguous_is_refused(self):
        decode, lengths = ringattn.decode, ints(9, 7)
        for words, call in (
            ("lengths of decode are passed by position", lambda: decode(*STEP, lengths, **NEW)),
            ("decode has neither lengths nor lengths_before", lambda: decode(*STEP, **NEW)),
            ("lengths and lengths_before of decode are given", lambda: decode(*STEP, lengths=lengths, lengths_before=lengths)),
            ("update_lengths of decode is given without", lambda: decode(*STEP, lengths=lengths, update_lengths=True, **NEW)),
            ("Pass lengths_before=lengths, update_lengths=True", lambda: decode(*STEP, lengths, grow=True, **NEW)),
        ):
            self.refused(words, ringattn.UsageError, call)


class Names(Refused):
    def test_aliases_of_tensors(self):
        sinks = normal(4)
        assert_same_bits(ringattn.attention(Q, K, V, s_aux=sinks), ringattn.attention(Q, K, V, sinks=sinks))
        assert_same_bits(ringattn.varlen(*PACKED, cu_seqlens_q=CU, cu_seqlens_kv=CU, max_seqlen_q=12, max_seqlen_k=12,
                                         causal=True),
                         ringattn.varlen(*PACKED, CU))  # fmt: skip
        assert_same_bits(ringattn.attention(q=Q, k=K, v=V), ringattn.attention(Q, K, V))
        table = ints(0, 1).reshape(2, 1)
        assert_same_bits(ringattn.decode(*STEP, ints(9, 7), page_table=table),
                         ringattn.decode(*STEP, ints(9, 7), block_table=table))  # fmt: skip
        assert_same_bits(ringattn.attention(Q, K, V, sm_scale=0.2, logits_soft_cap=3.0, attn_mask=None, alibi_slopes=None,
                                            dropout_p=0.0, deterministic=True, order="bthd", causal=True),
                         ringattn.attention(Q, K, V, softmax_scale=0.2, softcap=3.0))  # fmt: skip

    def test_what_is_not_computed_is_refused_by_name(self):
        attention, mask = ringattn.attention, np.ones((20, 20), bool)
        for words, call in (
            ("attention has no attn_mask (masks are causal, full or sliding windows, and depend only on positions). Pass mask; "
             "for sequences with padding call ringattn.varlen() with cu_seqlens_q", lambda: attention(Q, K, V, attn_mask=mask)),
            ("attention has no alibi_slopes (no bias", lambda: attention(Q, K, V, alibi_slopes=normal(4))),
            ("attention has no dropout_p", lambda: attention(Q, K, V, dropout_p=0.1)),
            ("attention has no cu_seqlens (its sequences are equally long). Call ringattn.varlen().",
             lambda: attention(Q, K, V, cu_seqlens=CU)),
            ("decode has no rotary_cos (it computes them from positions). Pass rope=ringattn.RopeSettings(head_dim)",
             lambda: ringattn.decode(*STEP, ints(9, 7), rotary_cos=normal(16, 32))),
            ("attention has no cos (it does not rotate q and k). Rotate them by ringattn.rope()",
             lambda: ringattn.attention(Q, K, V, cos=normal(20, 32))),
            ("rope has no sin (it computes them from positions)", lambda: ringattn.rope(Q, K, sin=normal(20, 32))),
        ):  # fmt: skip
            self.refused(words, ringattn.UnsupportedError, call)

    def test_hints_lead_to_names_of_functions(self):
        decode, scan = ringattn.decode, (normal(8, 1, 8), abs(normal(8, 1)), -abs(normal(1)), normal(8, 1, 8), normal(8, 1, 8))
        one, state = [x[0:1] for x in scan], normal(1, 1, 8, 8)
        rows, old = (normal(1, 8), abs(normal(1, 8)), -abs(normal(8, 8)), normal(1, 8), normal(1, 8)), normal(1, 8, 8)
        x, weight, some = normal(10, 16), normal(16, 4), ints(1)
        for words, call in (
            ("decode has no key_cache (it is called k_cache there). Pass k_cache.",
             lambda: decode(STEP[0], key_cache=K, value_cache=V, lengths=ints(9, 7))),
            ("decode has no k (it is called k_new there). Pass k_new.", lambda: decode(*STEP, ints(9, 7), k=K, v=V)),
            ("decode has no kv_indices (pages are listed in a rectangular table). Pass block_table",
             lambda: decode(*STEP, ints(9, 7), kv_indices=some)),
            ("varlen has no seqused_k (packed sequences follow each other without padding). Pass cu_seqlens_k",
             lambda: ringattn.varlen(*PACKED, CU, seqused_k=some)),
            ("varlen has no block_table (keys are rows, not pages of a cache). Call ringattn.decode()",
             lambda: ringattn.varlen(*PACKED, CU, block_table=some)),
            ("Pass q_offset, the", lambda: ringattn.attention(Q, K, V, position_ids=some)),
            ("Pass q_offsets, the", lambda: ringattn.varlen(*PACKED, CU, position_ids=some)),
            ("selective_scan has no dt_bias (it is called delta_bias there). Pass delta_bias.",
             lambda: ringattn.selective_scan(*rows, dt_bias=some)),
            ("ssd has no delta_bias (it is called dt_bias there). Pass dt_bias.", lambda: ringattn.ssd(*scan, delta_bias=some)),
            ("cu_seqlens=torch.nn.functional.pad(seq_idx[0].bincount()", lambda: ringattn.ssd(*scan, seq_idx=some)),
            ("causal_conv1d has no conv_state (it is called initial_states there). Pass initial_states.",
             lambda: ringattn.causal_conv1d(x, weight, conv_state=some)),
            ("Pass initial_states, and return_final_states=True.", lambda: ringattn.causal_conv1d(x, weight, conv_states=some)),
            ("A is [1, 8, 8], D is [1, 8] (a head has one number of each). Of expanded arrays pass A[:, 0, 0], dt[..., 0], "
             "D[:, 0] and dt_bias[:, 0].", lambda: ringattn.ssd_update(
                state, *one[:2], np.broadcast_to(scan[2][:, None, None], (1, 8, 8)), *one[3:], D=normal(1, 8))),
            ("dt is [1, 1, 8]", lambda: ringattn.ssd_update(state, one[0], one[0], *one[2:])),
        ):  # fmt: skip
            self.refused(words, ringattn.Error, call)
        wanted = ringattn.selective_update(old.copy(), *rows, delta_bias=normal(8), delta_softplus=True)
        assert_same_bits(ringattn.selective_update(old.copy(), x=rows[0], dt=rows[1], A=rows[2], B=rows[3], C=rows[4],
                                                   dt_bias=normal(8), dt_softplus=True), wanted)  # fmt: skip

    def test_masks_are_no_arrays(self):
        mask = np.ones((20, 20), bool)
        for call in (lambda: ringattn.attention(Q, K, V, mask=mask), lambda: ringattn.varlen(*PACKED, CU, mask=mask),
                     lambda: ringattn.decode(*STEP, ints(9, 7), mask=mask)):  # fmt: skip
            self.refused("mask is ndarray [20, 20] (masks are not arrays", ringattn.UsageError, call)

    def test_errors_have_the_caller_s_names(self):
        scan = normal(2, 1, 8), abs(normal(2, 1)), -abs(normal(1)), normal(2, 1, 8), normal(2, 1, 8)
        rows, state = (normal(2, 8), abs(normal(2, 8)), -abs(normal(8, 8)), normal(2, 8), normal(2, 8)), normal(2, 1, 8, 8)
        for words, call in (
            ("A is [3] (", lambda: ringattn.ssd_update(state, *scan[:2], normal(3), *scan[3:])),
            ("D holds fp16 (", lambda: ringattn.ssd(*scan, D=normal(1, dtype="float16"))),
            ("delta_bias is [3] (", lambda: ringattn.selective_update(state[:, 0], *rows, delta_bias=normal(3))),
            ("delta is float32 [1, 8] (", lambda: ringattn.selective_scan(rows[0], rows[1][:1], *rows[2:])),
            ("attention has no query (it is called q there)", lambda: ringattn.attention(query=Q, key=K, value=V)),
            ("key is NoneType (", lambda: ringattn.scaled_dot_product_attention(Q, None, None)),
            ("key is float16 but query is float32", lambda: ringattn.scaled_dot_product_attention(Q, Q.astype("float16"), Q)),
            ("dropout_p is [0. 0. 0.]", lambda: ringattn.scaled_dot_product_attention(Q, Q, Q, dropout_p=np.zeros(3))),
            ("scaled_dot_product_attention has no sm_scale (it is called scale there). Pass scale.",
             lambda: ringattn.scaled_dot_product_attention(Q, Q, Q, sm_scale=1.0)),
        ):  # fmt: skip
            self.refused(words, ringattn.UsageError, call)

    def test_kv_layout_is_that_of_keys_and_values(self):
        expected, step = ringattn.attention(Q, K, V), ringattn.decode(*STEP, ints(9, 7))
        for layout, rows in (("NHD", lambda x: x), ("HND", swapped)):
            said = {"kv_layout": layout, "causal": True}
            assert_same_bits(ringattn.attention(Q, rows(K), rows(V), **said), expected)
            assert_same_bits(ringattn.varlen(PACKED[0], *map(rows, PACKED[1:]), CU, **said), ringattn.varlen(*PACKED, CU))
            caches = [rows(cache).copy() for cache in STEP[1:]]
            assert_same_bits(ringattn.decode(STEP[0], *caches, ints(9, 7), kv_layout=layout), step)
            ringattn.decode(STEP[0], *caches, lengths=ints(9, 7), **NEW, kv_layout=layout)
            assert_same_bits(rows(caches[0])[0, 8], NEW["k_new"][0])  # written into the caller's memory
        self.refused("kv_layout of attention is 'HDN'", ringattn.UsageError, lambda: ringattn.attention(Q, K, V, kv_layout="HDN"))
        self.refused("kv_layout and order", ringattn.CallError,
                     lambda: ringattn.attention(Q, K, V, kv_layout="HND", order="bhtd"))  # fmt: skip

    def test_words_that_ask_for_nothing_are_taken(self):
        nothing = {"dropout_p": None, "score_mod": None, "bias": None, "block_mask": None, "group": None, "num_splits": 4,
                   "window_left": -1, "pos_encoding_mode": "NONE", "sliding_window": None}  # fmt: skip
        assert_same_bits(ringattn.attention(Q, K, V, causal=True, **nothing), ringattn.attention(Q, K, V))
        assert_same_bits(ringattn.decode(*STEP, ints(9, 7), k=None, v=None, **nothing), ringattn.decode(*STEP, ints(9, 7)))
        for name, value in {"dropout_p": np.zeros(3), "score_mod": abs, "bias": 0, "window_left": 3, "num_splits": "two",
                            "pos_encoding_mode": "ROPE_LLAMA"}.items():  # fmt: skip
            self.refused(name, ringattn.Error, lambda: ringattn.attention(Q, K, V, causal=True, **{name: value}))
        with self.assertRaises(ringattn.CallError):
            ringattn.ssd(normal(8, 1, 8), abs(normal(8, 1)), -abs(normal(1)), normal(8, 1, 8), normal(8, 1, 8), bias=None)

    def test_calls_that_are_malformed_are_type_errors(self):
        self.assertTrue(issubclass(ringattn.CallError, TypeError) and issubclass(ringattn.CallError, ringattn.UsageError))
        for words, call in (
            ("varlen was called with 7 arguments by position (it takes q, k, v, cu_seqlens_q, cu_seqlens_k by position). Pass "
             "the others by name: ", lambda: ringattn.varlen(*PACKED, CU, CU, 12, 12)),
            ("attention lacks v", lambda: ringattn.attention(Q, K)),
            ("Did you mean softmax_scale?", lambda: ringattn.attention(Q, K, V, softmax_scal=1.0)),
            ("Pass world=ringattn.torch_world(group).", lambda: ringattn.attention(Q, K, V, group=0)),
        ):  # fmt: skip
            self.refused(words, ringattn.CallError, call)


class Messages(Refused):
    def test_types_dims_and_lengths(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("needs ml_dtypes")
        attention = ringattn.attention
        odd = normal(9, 2, 60)
        eighth = normal(20, 2, 64).astype(ml_dtypes.float8_e4m3fn)
        for kind, words, call in (
            (ringattn.UsageError, "k is float16 but q is float32 (rows of one call have one type). Convert one.",
             lambda: attention(Q, K.astype("float16"), V)),
            (ringattn.UsageError, "v is float64", lambda: attention(Q, K, V.astype("float64"))),
            (ringattn.UsageError, 'k is float8_e4m3fn (ringattn computes with float32, float16 and bfloat16). Convert it; '
             'ringattn.compress(k, v, "fp8")', lambda: attention(PACKED[0], eighth, eighth)),
            (ringattn.UsageError, "k is float32 (compressed rows become float16 or bfloat16 again)",
             lambda: ringattn.compress(K, V)),
            (ringattn.UsageError, "cu_seqlens_q ends at 15, and q has 20 tokens", lambda: ringattn.varlen(*PACKED, [0, 15])),
            (ringattn.UsageError, "cu_seqlens_k ends at 15, and k has 20", lambda: ringattn.varlen(*PACKED, CU, [0, 5, 15])),
            (ringattn.UsageError, "max_seqlen_q is 5 (a sequence of cu_seqlens_q has 12 tokens)",
             lambda: ringattn.varlen(*PACKED, CU, max_seqlen_q=5)),
            (ringattn.UnsupportedError, "q has a head_dim of 60 (kernels have multiples of 8). Pad q and k to 64 with zeros, and "
             "pass softmax_scale=60**-0.5.", lambda: attention(odd, odd, odd)),
        ):  # fmt: skip
            self.refused(words, kind, call)

    def test_scales_are_what_they_say(self):
        means = np.array([V[0, : i + 1].mean(0) for i in range(20)]).repeat(2, 1)
        self.assertLess(np.abs(ringattn.attention(Q[:1], K[:1], V[:1], softmax_scale=0)[0][0] - means).max(), 1e-5)
        tiny = ringattn.attention(Q[:1], K[:1], V[:1], softmax_scale=1e-44)[0][0]
        self.assertLess(np.abs(tiny - means).max(), 1e-5)
        for name in ("softmax_scale", "softcap"):
            for value in (1e-300, 1e-46, -1e-300, 1e300):
                self.refused(f"{name} is {value} (it is fp32, in which the nearest number is", ringattn.UsageError,
                             lambda name=name, value=value: ringattn.attention(Q, K, V, **{name: value}))  # fmt: skip
        lost = ringattn.ssd(normal(8, 1, 8), abs(normal(8, 1)), -abs(normal(1)), normal(8, 1, 8), normal(8, 1, 8),
                            dt_limit=(0.0, 1e-300))  # fmt: skip
        self.assertFalse(lost.any())

    def test_numbers_of_ranks_are_not_cut_off(self):
        for words, call in (
            ("rank is 4294967296", lambda: ringattn.store_world("127.0.0.1:1", 2**32, 2**32 + 1)),
            ("ranks is 4294967297", lambda: ringattn.callbacks_world(0, 2**32 + 1, lambda *_: [])),
            ("ranks is 8589934592", lambda: ringattn.threads_worlds(2**33)),
            ("a world of 1048576 ranks is not possible", lambda: ringattn.threads_worlds(2**20)),
        ):
            self.refused(words, ringattn.UsageError, call)


class Overlaps(Refused):
    def test_results_have_memory_of_their_own(self):
        q, k, v = (x.copy() for x in STEP)
        new, lengths = NEW["k_new"].copy(), ints(9, 7)
        inside = v.reshape(-1)[64 : 64 + 512].reshape(2, 4, 64)
        self.refused("out overlaps v", ringattn.UsageError, lambda: ringattn.decode(q, k, v, lengths, out=inside))
        square = normal(2, 2, 64)
        self.refused("out overlaps k_new", ringattn.UsageError, lambda: ringattn.decode(
            square, k, v, lengths=lengths, k_new=new, v_new=NEW["v_new"], out=new))  # fmt: skip
        flat = np.lib.stride_tricks.as_strided(np.empty(64, "float32"), (20, 4, 64), (0, 0, 4))
        self.refused("out has strides 0 and 0", ringattn.UsageError, lambda: ringattn.attention(*PACKED, out=flat))
        cache, w = normal(2, 16, 72), (normal(4, 16, 64), normal(4, 16, 64))
        lies = cache.reshape(-1)[:128].reshape(2, 4, 16)
        self.refused("out overlaps cache", ringattn.UsageError, lambda: ringattn.mla_decode(
            normal(2, 4, 24), cache, lengths, *w, rope_dim=8, out=lies))  # fmt: skip
        scan = normal(8, 1, 8), abs(normal(8, 1)), -abs(normal(1)), normal(8, 1, 8), normal(8, 1, 8)
        self.refused("out has strides", ringattn.UsageError, lambda: ringattn.ssd(*scan, out=np.lib.stride_tricks.as_strided(
            np.empty(8, "float32"), (8, 1, 8), (0, 0, 4))))  # fmt: skip
        state = normal(8, 1, 8, 8)
        self.refused("out overlaps state", ringattn.UsageError, lambda: ringattn.ssd_update(
            state, *scan, out=state.reshape(-1)[:64].reshape(8, 1, 8)))  # fmt: skip


if __name__ == "__main__":
    unittest.main()
