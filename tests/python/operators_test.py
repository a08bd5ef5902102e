# SPDX-License-Identifier: Apache-2.0
"""Every operator keeps PyTorch's rules: what it declares is what it does, with fake tensors and with lengths that a graph doesn't
know, too."""

import importlib.util
import os
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.ring_flash_attn
import ringattn.torch_ops
import ringattn.transformers  # noqa: F401, these three register operators
import torch
from ringattn.testing import assert_same_bits
from torch import library

OPERATORS = sorted(
    name.partition("::")[2]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("ringattn::") and "." not in name
)

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def normal(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def parts(method, dim=64):
    """Keys in a format as operators take them: the list, its format and dim."""
    x = normal(2, 40, 2, dim, seed=3, dtype=torch.float16)
    small = ringattn.compress(x, x, method)[0]
    return small.parts, small.format, dim


def layer(format, dtype=torch.float32):
    """weight, bias, scales and zeros of a quantized layer of 256 to 24 features."""
    q = ringattn.quantize_weight(normal(24, 256), format)
    return q.weight, normal(24, dtype=dtype), q.scales, None if format == "int8" else torch.full((24, 2), 7, dtype=torch.uint8)


def samples() -> dict[str, list[tuple]]:
    """Arguments of each operator: with what is optional, and without. In compressed rows and plain ones."""
    q, k = normal(60, 4, 64), normal(60, 2, 64, seed=2)
    q16, k16 = (normal(2, 40, heads, 64, seed=heads, dtype=torch.float16) for heads in (4, 2))
    cu, mask, sinks = torch.tensor([0, 20, 60]), ("causal", 0, 0), normal(4)
    places = torch.arange(60, dtype=torch.int32)[:, None]
    latents = normal(60, 4, 24), normal(60, 64), normal(60, 8, seed=2), normal(4, 16, 64), normal(4, 16, 64, seed=2)
    inside = normal(60, 4, 72), *latents[1:3], None, None
    bf16, rows = torch.bfloat16, torch.zeros(60, 148, dtype=torch.uint8)  # FP8
    matrices = normal(4, 16, 128, dtype=bf16), normal(4, 16, 128, seed=2, dtype=bf16)
    scan = normal(60, 2, 8), normal(60, 2).abs(), -normal(2).exp(), normal(60, 1, 16), normal(60, 1, 16, seed=2)
    row = normal(3, 2, 8), normal(3, 2).abs(), -normal(2).exp(), normal(3, 1, 16), normal(3, 1, 16, seed=2)
    delta = normal(60, 1, 8), normal(60, 1, 8, seed=2) / 3, normal(60, 2, 16), -normal(60, 2).abs(), normal(60, 2).sigmoid()
    x, weight = normal(3, 16), normal(16, 4, seed=2)
    plain, small = ([k], "", 0), ([k16], "", 0)
    unrotated = "", "", 0.0, 0.0, False, False, None, 0.0
    rotated = "default", "", 1e4, 0.5, False, False, None, 0.0
    codes, tables = parts("int4_token group 32"), parts("vector width 4")
    cache = [normal(2, 16, 2, 64)], "", 0
    out, lse = ringattn.attention(q, k, k, sinks=sinks)
    expanded = ringattn.mla(*latents, form="expanded")
    return {
        "attention_backward": [
            (out, lse, q, k, k, sinks, out, lse, *mask, 0.125, 0.0, None, None, None, None, None, 0, 0, 60.0),
            (q, None, q, k, k, None, out, lse, "full", 0, 0, 0.2, 9.0, 1, None, None, [60, 60], None, 0, 0, 60.0),
        ],
        "varlen_backward": [
            (out, lse, q, k, k, sinks, out, lse, cu, None, *mask, 0.125, 0.0, None, None, None, None, 0, 0, 60.0),
            (q, None, q, k, k, None, out, lse, cu, cu, "window", 9, 3, 0.2, 9.0, [0, 3], None, None, None, 0, 0, 60.0),
        ],
        "attention": [
            (q, [k], [k], "", 0, "", 0, None, *mask, None, 0.0, None, None, None, None, None, 0, 0, 60.0),
            (q16, *mixed(codes, small), sinks, "window", 9, 3, 0.2, 5.0, 1, None, None, None, None, 0, 0, 60.0),
            (q, *mixed(plain, plain), None, *mask, None, 0.0, None, None, None, None, None, 0, 0, 60.0, places, [60]),
        ],
        "varlen": [
            (q, *mixed(plain, plain), cu, None, None, *mask, None, 0.0, None, None, None, None, 0, 0, 60.0),
            (q, *mixed(plain, plain), cu, cu, sinks, "full", 0, 0, 0.2, 5.0, [0, 3], None, None, None, 0, 0, 60.0),
        ],
        "decode": [
            (q[:2], *mixed(cache, cache), ints(3, 9), None, False, None, None, None, None, *mask, None, 0.0, "", None, 0, 60.0),
            (q16[:, 0], *mixed(codes, codes), None, ints(3, 9), True, None, k16[:, 0], k16[:, 1], sinks, *mask, None, 0.0,
             ringattn.RopeSettings(q16.shape[-1]).text, None, 0, 60.0),
        ],
        "mla": [
            (*latents, None, None, None, "expanded", None, None, *mask, None, 0.0, None, None, None, 0, 0, 60.0),
            (*inside, cu, cu, sinks, "absorbed", 16, None, *mask, 0.2, 5.0, None, None, None, 0, 0, 60.0, [3, 0]),
            (latents[0].to(bf16), rows, None, *matrices, None, None, None, "expanded", None, None, *mask, None, 0.0, None, None,
             None, 0, 0, 60.0),
            (normal(60, 4, 136, dtype=bf16), rows, None, None, None, None, None, None, "absorbed", 16, None, *mask, None, 0.0,
             None, None, None, 0, 0, 60.0),
        ],
        "mla_backward": [
            (*expanded, *latents, None, *expanded, None, None, *mask, 0.2, 0.0, None, None, None, 0, 0, 60.0, None),
            (expanded[0], None, *latents, sinks, *expanded, cu, cu, "full", 0, 0, 0.2, 5.0, None, None, None, 0, 0, 60.0, [3, 0]),
        ],
        "mla_decode": [
            (latents[0][:2], normal(2, 16, 72), ints(5, 9), *latents[3:], None, False, None, None, None, None, 8, None, None,
             *mask, None, 0.0, None, 0, 60.0, "cpu_attention"),
            (latents[0][:2], normal(4, 16, 72), None, *latents[3:], ints(5, 9), True, ints([3, 0], [1, 2]), latents[1][:2],
             latents[2][:2], sinks, 8, None, None, *mask, None, 0.0, None, 0, 60.0),
            (latents[0][:2].to(bf16), rows[:32].reshape(2, 16, 148), ints(5, 9), matrices[0], None, None, False, None, None,
             None, None, 8, None, None, *mask, None, 0.0, None, 0, 60.0),
        ],
        "compress": [(k16, "k", format, [40, 40], 0, 0) for format in ("int8", "int4_channel group 32", "vector width 4")],
        "decompress": [(x, k16.new_empty(()), *form, [40, 40], 0) for x, *form in (codes, tables)],
        "evict": [
            (q, q, None, "knorm:heads=all", 0.5, *mask, None, 0.0, [20, 40], [20, 40], 0),
            (k16, k16, q16, "snapkv:window=8", 0.5, *mask, None, 0.0, [40, 40], [40, 40], 0),
        ],
        "batched_gemm": [
            (latents[0][..., :16], latents[3].transpose(1, 2), 0), (latents[1], latents[4], 0),
            (latents[1].reshape(3, 20, 1, 64), latents[4], 1), (normal(7, 4, 128, dtype=bf16), matrices[0], 0),
        ],
        "linear": [
            (x, normal(8, 16, seed=2), None, None, None, "none", "none", "shard", None, None, 0, 0, 60.0),
            (normal(2, 3, 16), normal(8, 16, seed=2), normal(8), None, None, "swiglu", "row", "replicated", 16, 4, 0, 1, 60.0),
            (normal(3, 256), *layer("int8"), "gelu", "column", "shard", 256, 24, 0, 0, 60.0),
            (normal(0, 256, dtype=bf16), *layer("int4", bf16), "none", "none", "shard", None, None, 0, 0, 60.0),
        ],
        "linear_backward": [
            (normal(2, 3, 8), normal(2, 3, 16), normal(8, 16, seed=2), None, [True, True, False], "none", "none", "shard", None,
             None, 0, 0, 60.0),
            (normal(3, 8), normal(3, 16), normal(16, 16, seed=2), normal(16), [True, True, True], "geglu", "column", "replicated",
             16, 8, 0, 1, 60.0),
        ],
        "gated_delta": [
            (*delta, False, None, None, None, None, 0, 0, 60.0),
            (*delta, True, 0.5, normal(2, 2, 8, 16), cu, None, 0, 0, 60.0),
        ],
        "gated_delta_update": [
            (normal(5, 2, 8, 16), *(rows[:3] for rows in delta), True, None, ints(4, 1, 0), 0, 60.0),
        ],
        "rope": [
            (q, None, None, None, 3, None, "default", "", 1e4, 1.0, False, False, None, 0.0, False, 0, None),
            (k16, k16, None, None, 0, None, "linear", "factor=2", 1e4, 0.5, True, True, None, 0.0, True, 0, None),
        ],
        "reshard": [(x, *[ringattn.zigzag([len(x)], 1).text] * 2, 60.0, None) for x in (q, k16[0])],
        "linear_attention": [
            (q, q, q, -normal(4).abs(), None, None, *unrotated, None, None, None, 0, 0, 60.0),
            (q, q, q, -normal(60, 4, 64).abs(), 0.5, normal(2, 4, 64, 64), *rotated, None, cu, None, 0, 0, 60.0),
        ],
        "linear_attention_update": [
            (normal(2, 4, 64, 64), q[:2], q[:2], q[:2], -normal(2, 4).abs(), None, *rotated, ints(5, 9).long(), ints(1, 0), 0,
             60.0),
        ],
        "ssd": [
            (*scan, None, None, None, False, None, None, None, None, 0, 0, 60.0),
            (*scan, normal(2), normal(60, 2, 8), normal(2), True, [0.0, 1.0], normal(2, 2, 8, 16), cu, None, 0, 0, 60.0),
        ],
        "ssd_backward": [
            (scan[0], None, *scan, None, None, None, None, None, False, None, None, 0, 0, 60.0, None),
            (scan[0], normal(2, 2, 8, 16), *scan, normal(2), normal(60, 2, 8), normal(2), normal(2, 2, 8, 16), cu, True,
             [0.0, 1.0], None, 0, 0, 60.0, None),
        ],
        "ssd_update": [(normal(5, 2, 8, 16), *row, None, None, None, True, [0.0, 1.0], ints(4, 1, 0), 0, 60.0)],
        "causal_conv1d": [(normal(2, 9, 16), weight, normal(16), "silu", normal(2, 3, 16), None, None, 0, 60.0)],
        "causal_conv1d_backward": [
            (normal(2, 9, 16), normal(2, 3, 16), normal(2, 9, 16, seed=2), weight, normal(16), normal(2, 3, 16, seed=3), None,
             "silu", None, 0, 60.0, None),
            (normal(9, 16), None, normal(9, 16, seed=2), weight, None, None, ints(0, 4, 9), None, None, 0, 60.0, None),
        ],
        "causal_conv1d_update": [(x, normal(5, 3, 16), weight, None, None, ints(4, 1, 0), 0, 60.0)],
        "llama3_begins": [(ints(0, 20, 60), ints(0, 20, 60), [0, 20, 60], [0, 20, 60], [0, 20, 60])],
        "packed_begins": [(q, [0, 60], [1, 60], None, None, None, None), (q, None, [1, 60], cu, cu, None, torch.ones(1, 60))],
        "unpadded_lengths": [(ints(20, 60), torch.ones(2, 60))],
    }  # fmt: skip


def mixed(k, v):
    """Keys and values in the order of the operators."""
    return k[0], v[0], *k[1:], *v[1:]


class Operators(unittest.TestCase):
    def test_all_of_them_pass_pytorch_s_check(self):
        given = samples()
        self.assertEqual(sorted(given), OPERATORS, "each operator has arguments here")
        for name in OPERATORS:
            for at, arguments in enumerate(given[name]):
                # The last check traces a call with dynamic shapes and takes most of the time.
                checks = CHECKS if at == 0 or os.environ.get("RINGATTN_TEST_LONG") else CHECKS[:-1]
                with self.subTest(name), torch.no_grad():
                    library.opcheck(getattr(torch.ops.ringattn, name).default, arguments, test_utils=checks)


class Lengths(unittest.TestCase):
    def test_rows_of_any_number_are_compressed_in_one_graph(self):
        def squeeze(k, v):
            small = ringattn.compress(k, v, "int4")
            return [*small[0].parts, *small[1].parts, ringattn.decompress(small[0])]

        graphs = []

        def keep(graph, _):
            graphs.append(graph)
            return graph

        torch.compiler.reset()
        function = torch.compile(squeeze, fullgraph=True, dynamic=True, backend=keep)
        for count, form in enumerate(((), (2,))):
            for tokens in (50, 70, 33):
                k, v = (normal(*form, tokens, 2, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
                for got, expected in zip(function(k, v), squeeze(k, v), strict=True):
                    assert_same_bits(got, expected)
            self.assertEqual(len(graphs), count + 1)


if __name__ == "__main__":
    unittest.main()
