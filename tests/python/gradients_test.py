# SPDX-License-Identifier: Apache-2.0
"""No operator loses a gradient: each refuses every tensor that requires one and that it has none for, in eager mode and where
graphs are traced."""

import importlib.util
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.torch_ops  # noqa: F401, registers the operators
import torch

# An example for each type of argument: gradients are refused before the rest is read.
ANYTHING = {"Tensor": None, "int": 0, "float": 0.0, "bool": False, "str": "", "List[int]": [], "List[float]": [],
            "List[bool]": []}  # fmt: skip
OPERATORS = sorted(
    name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ringattn::") and "." not in name
)


def rows() -> torch.Tensor:
    return torch.zeros(4, 2, 8)


def arguments_of(operator, wanted: str) -> tuple[list, bool, list]:
    """What the operator may be called with, before and behind the argument of that name; whether that one is a list."""
    made, place, listed = [], 0, False
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if argument.name == wanted:
            place, listed = len(made), kind.startswith("List")
        elif kind == "Tensor" or kind.startswith("List[Tensor"):
            made.append(rows() if kind == "Tensor" else [rows()])
        else:
            made.append(None if kind.startswith("Optional") else ANYTHING[kind])
    return made[:place], listed, made[place:]


def cases():
    for name in OPERATORS:
        operator = getattr(torch.ops.ringattn, name.partition("::")[2]).default
        op = name.partition("::")[2]
        if op in ringattn._gradients.INPUTS:
            continue  # training_test.py and its neighbours have these
        for argument in operator._schema.arguments:
            if "Tensor" in str(argument.type):
                yield operator, argument.name, f"{argument.name} of {op} requires a gradient"


class Operators(unittest.TestCase):
    def refuses(self, words, kind, call, *given):
        with self.subTest(words):
            with self.assertRaises(kind) as caught:
                call(*given)
            self.assertIn(words, str(caught.exception))

    def test_all_operators_and_their_tensors_are_met(self):
        met = {words.rpartition(" requires")[0] for _, _, words in cases()}
        self.assertEqual(len(OPERATORS), 26)
        for words in ("dout of attention_backward", "sinks of varlen_backward", "k_cache of decode",
                      "k_rope of mla_decode", "dy of ssd_backward", "dt_bias of ssd_update",
                      "beta of gated_delta", "x of compress",
                      "bias of causal_conv1d_update", "q of evict", "weights of batched_gemm",
                      "dy of linear_backward"):  # fmt: skip
            self.assertIn(words, met)

    def test_eager(self):
        for operator, argument, words in cases():
            before, listed, behind = arguments_of(operator, argument)
            tensor = rows().requires_grad_()
            self.refuses(words, ringattn.UnsupportedError, operator, *before, [tensor] if listed else tensor, *behind)

    def test_compiled(self):
        places = {}  # of each operator's first tensor and its last one: the check knows nothing of the graph
        for operator, argument, words in cases():
            places.setdefault(operator, []).append((argument, words))
        for operator, argument, words in ((operator, *met[place]) for operator, met in places.items() for place in (0, -1)):
            before, listed, behind = arguments_of(operator, argument)

            # A tensor of the graph's own, which wants a gradient because a parameter does.
            def call(parameter, operator=operator, before=before, listed=listed, behind=behind):
                tensor = rows() * parameter
                return operator(*before, [tensor] if listed else tensor, *behind)

            torch.compiler.reset()
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            self.refuses(words, Exception, compiled, torch.nn.Parameter(torch.ones(8)))

    def test_exported(self):
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = torch.nn.Parameter(torch.ones(2, 32, 64))

            def forward(self, q):
                return ringattn.batched_gemm(q, self.weights)

        q = torch.randn(20, 2, 64)
        with self.assertRaises(Exception) as caught:
            torch.export.export(Layer(), (q,))
        self.assertIn("weights of batched_gemm requires a gradient", str(caught.exception))
        with torch.no_grad():
            exported = torch.export.export(Layer(), (q,)).module()(q)
            self.assertTrue(torch.equal(exported, ringattn.batched_gemm(q, torch.ones(2, 32, 64))))


class Functions(unittest.TestCase):
    """What a model calls. In eager mode and compiled it is one error, by the same name of an argument."""

    def test_parameters_are_refused(self):
        q, k = torch.randn(40, 4, 64), torch.randn(40, 2, 64)
        matrices = torch.randn(4, 64, 64), torch.randn(4, 32, 64)
        latents = torch.randn(40, 4, 80), torch.randn(40, 64), torch.randn(40, 16), *matrices
        scan = torch.randn(9, 2, 8), torch.ones(9, 2), -torch.ones(2), torch.randn(9, 1, 16), torch.randn(9, 1, 16)
        channels = torch.randn(9, 8), torch.ones(9, 8), -torch.ones(8, 16), torch.randn(9, 16), torch.randn(9, 16)
        lengths = torch.tensor([20, 20], dtype=torch.int32)
        cache = k.reshape(2, 20, 2, 64)
        heads = torch.zeros(2)
        for name, given, call in (
            ("sinks", torch.zeros(4), lambda p: ringattn.decode(q[:2], cache, cache, lengths, sinks=p)),
            ("sinks", torch.zeros(4), lambda p: ringattn.mla(*latents, form="absorbed", sinks=p)),
            ("out", q.clone(), lambda p: ringattn.attention(q, k, k, out=p * 1)),
            ("weights", matrices[0], lambda p: ringattn.batched_gemm(q, p)),
            ("dt_bias", heads, lambda p: ringattn.ssd_update(torch.zeros(9, 2, 8, 16), *scan, dt_bias=p)),
            ("D", torch.zeros(8), lambda p: ringattn.selective_scan(*channels, D=p)),
        ):
            for backend in (None, "aot_eager"):
                torch.compiler.reset()
                function = call if backend is None else torch.compile(call, backend=backend)
                with self.subTest(name, backend=backend), self.assertRaises(ringattn.UnsupportedError) as caught:
                    function(torch.nn.Parameter(given))
                self.assertRegex(str(caught.exception), f"^{name}( of [a-z_0-9]+)? requires a gradient")


if __name__ == "__main__":
    unittest.main()
