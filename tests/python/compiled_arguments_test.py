# SPDX-License-Identifier: Apache-2.0
"""Under torch.compile an argument means what it means without, or is refused as there: no graph drops one."""

import importlib.util
import inspect
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import torch
from ringattn import _torch_tools, torch_ops
from ringattn.testing import assert_same_bits


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scan_rows(tokens):
    """x, dt, A, B, C."""
    x, dt, A = normal(tokens, 2, 16), normal(tokens, 2, seed=2).abs(), -normal(2, seed=3).exp()
    return x, dt, A, normal(tokens, 1, 8, seed=4), normal(tokens, 1, 8, seed=5)


def selective_rows(tokens):
    """u, delta, A, B, C."""
    u, delta, A = normal(tokens, 24), normal(tokens, 24, seed=2).abs(), -normal(24, 16, seed=3).exp()
    return u, delta, A, normal(tokens, 16, seed=4), normal(tokens, 16, seed=5)


@torch.no_grad()
def compiled(function, *inputs, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", **options)(*inputs)


class Both(unittest.TestCase):
    """What a call does in eager mode and compiled."""

    def same(self, function, *inputs):
        """One graph has the eager bits."""
        for a, b in zip(compiled(function, *inputs, fullgraph=True), function(*inputs), strict=True):
            assert_same_bits(a, b)

    def refused(self, words, function, *inputs, kind=ringattn.UsageError, traced=True):
        """Both refuse by one error, the compiled function whether the refusal is met while it is traced or when it runs."""
        for run in (function, lambda *given: compiled(function, *given))[: 1 + traced]:
            with self.subTest(words):
                with self.assertRaises(kind) as caught:
                    run(*inputs)
                self.assertIn(words, str(caught.exception))


class Layouts(Both):
    def test_the_sequences_of_an_ssm_are_those_of_its_layout(self):
        scan, selective, x, weight = scan_rows(100), selective_rows(100), normal(100, 16), normal(16, 4, seed=2)
        cu = torch.tensor([0, 30, 100])
        for layout in (ringattn.Layout([30, 70], [[(0, 0, 30), (1, 0, 70)]]), ringattn.super_segments([30, 70], 1)):
            for named in ({}, {"cu_seqlens": cu}):
                named = {"layout": layout} | named

                def each(*rows, named=named):  # in one graph: tracing takes most of the time
                    return (*ringattn.ssd(*rows[:5], return_final_states=True, **named),
                            *ringattn.selective_scan(*rows[5:10], return_last_state=True, **named),
                            *ringattn.causal_conv1d(*rows[10:], return_final_states=True, **named))  # fmt: skip

                self.same(each, *scan, *selective, x, weight)
        two = ringattn.ssd(*scan, layout=layout, return_final_states=True)[1]
        self.assertEqual(len(two), 2)

    def test_a_layout_of_another_job_is_refused(self):
        scan, selective, x, weight = scan_rows(100), selective_rows(100), normal(100, 16), normal(16, 4, seed=2)
        one, other = ringattn.super_segments([30, 70], 1), ringattn.super_segments([30, 70], 2)
        wrong = (
            ("layout is 'zigzag'", {"layout": "zigzag"}),
            ("the layout is one of lengths [30, 70] over 2 ranks", {"layout": other}),
            ("the layout is one of lengths [30, 70] over 1 ranks", {"layout": one, "cu_seqlens": torch.tensor([0, 31, 100])}),
        )
        functions = ((ringattn.ssd, scan), (ringattn.selective_scan, selective), (ringattn.causal_conv1d, (x, weight)))
        for n, (words, named) in enumerate(wrong):
            for m, (function, rows) in enumerate(functions):  # each function is traced once, and each refusal
                self.refused(words, lambda *rows, call=function, named=named: call(*rows, **named), *rows, traced=n == m)


def calls():
    """(name, shape of what it makes, a function of out) of each function that has one."""
    q, k, cache, lengths = normal(2, 4, 64), normal(2, 2, 64), normal(2, 16, 2, 64), torch.tensor([5, 5], dtype=torch.int32)
    latents = normal(2, 4, 24), normal(2, 64), normal(2, 8)
    matrices = normal(4, 16, 64), normal(4, 16, 64)
    x, weight = normal(2, 16), normal(16, 4)
    heads, channels, rows = normal(2, 2, 16, 8), normal(2, 24, 16), normal(2, 3, 16)  # states
    scan, selective = scan_rows(2), selective_rows(2)
    step, mla_step = (q, cache, cache, lengths), (latents[0], normal(2, 16, 72), lengths, *matrices)
    yield "attention", (2, 4, 64), lambda out: ringattn.attention(q, k, k, out=out)
    yield "varlen", (2, 4, 64), lambda out: ringattn.varlen(q, k, k, [0, 2], out=out)
    yield "decode", (2, 4, 64), lambda out: ringattn.decode(*step, out=out)
    yield "mla", (2, 4, 16), lambda out: ringattn.mla(*latents, *matrices, out=out)
    yield "mla_decode", (2, 4, 16), lambda out: ringattn.mla_decode(*mla_step, rope_dim=8, out=out)
    delta = normal(2, 1, 8), normal(2, 1, 8) / 3, normal(2, 2, 16), -normal(2, 2).abs(), normal(2, 2).sigmoid()
    yield "gated_delta", (2, 2, 16), lambda out: ringattn.gated_delta(*delta, out=out)
    states = normal(2, 2, 8, 16)
    yield "gated_delta_update", (2, 2, 16), lambda out: ringattn.gated_delta_update(states.clone(), *delta, out=out)
    whole = ringattn.zigzag([2], 1)
    yield "reshard", (2, 4, 24), lambda out: ringattn.reshard(latents[0], whole, "packed", out=out)
    yield "rope", (2, 4, 24), lambda out: ringattn.rope(latents[0], out=out)
    yield "batched_gemm", (2, 4, 16), lambda out: ringattn.batched_gemm(latents[1], matrices[0], out=out)
    yield "ssd", (2, 2, 16), lambda out: ringattn.ssd(*scan, out=out)
    yield "ssd_update", (2, 2, 16), lambda out: ringattn.ssd_update(heads.clone(), *scan, out=out)
    yield "selective_scan", (2, 24), lambda out: ringattn.selective_scan(*selective, out=out)
    yield "selective_update", (2, 24), lambda out: ringattn.selective_update(channels.clone(), *selective, out=out)
    yield "causal_conv1d", (2, 16), lambda out: ringattn.causal_conv1d(x, weight, out=out)
    yield "causal_conv1d_update", (2, 16), lambda out: ringattn.causal_conv1d_update(x, rows.clone(), weight, out=out)
    small = ringattn.compress(k.half(), k.half(), "int8")[0]
    yield "decompress", (2, 2, 64), lambda out: ringattn.decompress(small, out=out)


class Results(Both):
    def test_out_is_like_the_result(self):
        everything = list(calls())
        types = {"decompress": torch.float16}
        outs = [torch.zeros(shape, dtype=types.get(name, torch.float32)) for name, shape, _ in everything]
        for (name, shape, call), out in zip(everything, outs):
            with self.subTest(name):
                # Over the ops all that an out may differ in.
                wrong = (out.double(), out[:1], torch.stack([out, out]))[len(name) % 3]
                # One check refuses for all functions, and the graph below shows that each of them comes to it.
                self.refused("out ", call, wrong, traced=name in ("attention", "mla_decode", "ssd_update"))

        def each(*outs):
            for (_, _, call), out in zip(everything, outs):
                call(out)
            return outs

        self.same(each, *outs)

    def test_what_is_not_like_it_is_named(self):
        made = torch.zeros(3, 4)
        for words, out in (
            ("out is float64 [3, 4] on cpu (ssd makes float32 [3, 4] on cpu)", made.double()),
            ("out is float32 [1, 4] on cpu", made[:1]),
            ("out is float32 [3, 4] on meta", made.to("meta")),
            ("out is list", [0.0]),
        ):
            with self.assertRaises(ringattn.UsageError) as caught:
                _torch_tools.given("ssd", out, made)
            self.assertIn(words, str(caught.exception))


class Masks(Both):
    def test_a_mask_is_read_as_without_a_graph(self):
        q = normal(20, 2, 64)
        self.same(lambda q: ringattn.attention(q, q, q, mask=(3, 0)), q)
        wrong = (("[3, 0]", [3, 0]), ("mask 'window'", "window"), ("a side of mask is 1.5", (1.5, 0)), ("(3,)", (3,)))
        for n, (words, mask) in enumerate(wrong):  # each refusal is traced once
            self.refused(words, lambda q, mask=mask: ringattn.attention(q, q, q, mask=mask), q, traced=n % 2 == 0)
            self.refused(words, lambda q, mask=mask: ringattn.varlen(q, q, q, [0, 20], mask=mask), q, traced=n % 2 == 1)


class Spellings(Both):
    def test_other_libraries_keywords_mean_the_same_in_a_graph(self):
        q = normal(20, 2, 64)
        self.same(lambda q: ringattn.attention(q, q, q, causal=False, scale=0.2, return_lse=True), q)
        self.same(lambda q: ringattn.attention(q, q, q, order="htd", causal=True), q)
        self.refused("has no attn_mask", lambda q: ringattn.attention(q, q, q, attn_mask=q), q, kind=ringattn.UnsupportedError)


class Unknown(Both):
    def test_what_compress_does_not_know(self):
        k = normal(20, 2, 64).half()
        self.refused("compress has no axis", lambda k: ringattn.compress(k, k, axis=2)[0].parts, k,
                     kind=ringattn.CallError)  # fmt: skip


class Mla(Both):
    rows = normal(20, 4, 24), normal(20, 64), normal(20, 8), normal(4, 16, 64), normal(4, 16, 64)

    def test_offsets_of_queries(self):
        def chunk(*rows):
            return ringattn.mla(*rows, cu_seqlens_q=[0, 5], cu_seqlens_k=[0, 20], q_offsets=[3])

        self.same(chunk, self.rows[0][:5], *self.rows[1:])

    def test_what_contradicts_the_matrices_is_refused(self):
        self.refused("head_dim is 15", lambda *rows: ringattn.mla(*rows, head_dim=15), *self.rows)

    def test_compressed_latents_are_refused(self):
        x = normal(20, 1, 64).half()
        small = ringattn.compress(x, x, "int8")[0]
        self.refused("latent of mla is compressed", lambda q, k_rope: ringattn.mla(q, small, k_rope), self.rows[0], self.rows[2],
                     kind=ringattn.UnsupportedError)  # fmt: skip


class Signatures(Both):
    def test_compiled_functions_take_what_eager_ones_take(self):
        shims = {"scaled_dot_product_attention"}  # it calls a function that is traced
        names = [name for name in ringattn.__all__ if hasattr(getattr(ringattn, name), "__wrapped__") and name not in shims]
        self.assertEqual(len(names), 22)
        for name in names:
            signatures = [inspect.signature(getattr(of, name)) for of in (ringattn, torch_ops)]
            eager, traced = ([(p.name, p.kind, p.default) for p in one.parameters.values()] for one in signatures)
            self.assertEqual(traced, eager, name)

    def test_arguments_of_another_ssm_are_refused(self):
        selective = selective_rows(9)
        state = normal(9, 24, 16)
        scan, update, limit = ringattn.selective_scan, ringattn.selective_update, {"dt_limit": (0.0, 1.0)}
        self.refused("selective_scan has no dt_limit", lambda *rows: scan(*rows, **limit), *selective,
                     kind=ringattn.UnsupportedError)  # fmt: skip
        self.refused("selective_update has no dt_limit", lambda *rows: update(*rows, **limit), state, *selective,
                     kind=ringattn.UnsupportedError)  # fmt: skip
        self.refused("selective_scan has no dt_softplus", lambda *rows: scan(*rows, dt_softplus=True), *selective,
                     kind=ringattn.CallError)  # fmt: skip

    def test_selective_update_takes_the_names_of_selective_state_update(self):
        selective, state = selective_rows(9), normal(9, 24, 16)
        update = ringattn.selective_update
        for run in (lambda *rows: update(*rows, dt_softplus=True), lambda *rows: compiled(
            lambda *given: update(*given, dt_softplus=True), *rows)):  # fmt: skip
            expected = update(state.clone(), *selective, delta_softplus=True)
            assert_same_bits(run(state.clone(), *selective), expected)


if __name__ == "__main__":
    unittest.main()
