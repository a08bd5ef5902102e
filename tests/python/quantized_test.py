# SPDX-License-Identifier: Apache-2.0
"""Linear layers in files, by the Python package and by `ringattn quantize` (TEST_RINGATTN_PROGRAM is the program), beside
values packed here and beside the reference library compressed-tensors where it is installed."""

import ctypes
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import safetensors.torch
    import torch
except ImportError as error:
    print(f"skipped: needs PyTorch and safetensors ({error})")
    sys.exit(77)

import ringattn
from ringattn import _abi
from ringattn._abi import lib
from ringattn.quantized import read_layer

try:
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.utils.helpers import calculate_qparams
except ImportError as error:
    PackedQuantizationCompressor = None
    print(f"without compressed-tensors: {error}")

PROGRAM = os.environ["TEST_RINGATTN_PROGRAM"]
LAYER = "model.layers.1.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
N, K = 40, 384


def packed(values, axis: int, order=range(8)):
    """Words of 8 values along an axis; the n-th four bits are those of value order[n]."""
    lines = values.movedim(axis, 0).long()
    words = sum(lines[place::8] << (4 * index) for index, place in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(0, axis).contiguous()


def int4_layer():
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 16, (N, K), generator=generator)
    zeros = torch.randint(1, 16, (N, K // 128), generator=generator)
    scales = (torch.rand(N, K // 128, generator=generator) / 16 + 0.01).half()
    return values, zeros, scales


def dequantized(values, zeros, scales):
    shifted = values - zeros.repeat_interleave(128, dim=1)
    return (shifted.float() * scales.float().repeat_interleave(128, dim=1)).half()


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def save(self, name: str, **tensors):
        path = self.folder / name
        safetensors.torch.save_file({f"{LAYER}.{part}": tensor for part, tensor in tensors.items()}, path)
        return path

    def config(self, name: str = "config.json", **members):
        path = self.folder / name
        path.write_text(json.dumps({"quantization_config": members}))
        return path


class Reading(Files):
    def test_every_format_gives_one_form(self):
        values, zeros, scales = int4_layer()
        bias = torch.arange(N).half()
        expected = dequantized(values, zeros, scales)
        index = (torch.arange(K) // 128).int()
        gptq = {"qweight": packed(values.T, 0), "scales": scales.T.contiguous(), "g_idx": index, "bias": bias}
        files = {
            "pack-quantized": dict(weight_packed=packed(values, 1), weight_zero_point=packed(zeros, 0), weight_scale=scales,
                                   weight_shape=torch.tensor([N, K]), bias=bias),
            "gptq": {**gptq, "qzeros": packed(zeros.T - 1, 1)},
            "gptq_v2": {**gptq, "qzeros": packed(zeros.T, 1)},
            "awq": dict(qweight=packed(values.T, 1, AWQ_ORDER), qzeros=packed(zeros.T, 1, AWQ_ORDER),
                        scales=scales.T.contiguous(), bias=bias),
        }  # fmt: skip
        for format, tensors in files.items():
            path = self.save(f"{format}.safetensors", **tensors)
            config = None
            if format.startswith("gptq"):
                config = self.config(quant_method="gptq", bits=4, group_size=128, checkpoint_format=format)
            layer = read_layer(path, LAYER, quantization_config=config)
            self.assertEqual((layer.name, layer.format, layer.weights), (LAYER, format, "int4"))
            self.assertEqual((layer.out_features, layer.in_features), (N, K))
            self.assertTrue(torch.equal(layer.zeros, zeros.to(torch.uint8)), format)
            self.assertTrue(torch.equal(layer.bias, bias), format)
            self.assertTrue(torch.equal(layer.dequantize(), expected), format)
            part = read_layer(path, rows=(3, 30), features=(128, 384), quantization_config=config)
            self.assertTrue(torch.equal(part.dequantize(), expected[3:30, 128:]), format)
            (self.folder / "config.json").unlink(missing_ok=True)

    def test_int8_and_floating_point(self):
        values = torch.randint(-128, 128, (N, K), dtype=torch.int8)
        scales = torch.rand(N, 1).bfloat16()
        layer = read_layer(self.save("a.safetensors", weight=values, weight_scale=scales))
        self.assertEqual((layer.format, layer.weights, layer.dtype), ("int-quantized", "int8", torch.bfloat16))
        self.assertTrue(torch.equal(layer.dequantize(), values.bfloat16() * scales))
        plain = read_layer(self.save("b.safetensors", weight=scales.expand(N, 8).contiguous()))
        self.assertEqual((plain.weights, plain.scales, plain.zeros), ("float", None, None))
        self.assertTrue(torch.equal(plain.dequantize(torch.float32), scales.expand(N, 8).float()))

    def test_scales_of_a_floating_point_layer_are_refused(self):
        path, handle, scales = self.save("a.safetensors", weight=torch.ones(N, 8)), _abi.Handle(), torch.ones(N)
        lib.layer_open(str(path).encode(), LAYER.encode(), None, ctypes.byref(handle))
        with self.assertRaisesRegex(ringattn.UsageError, "scales is given .the layer has none.. Pass NULL"):
            lib.layer_read(handle, 0, N, 0, 8, None, ctypes.c_void_p(scales.data_ptr()), None, None)
        lib.layer_destroy(handle)

    def test_refusals(self):
        values, zeros, scales = int4_layer()
        awq = self.save("awq.safetensors", qweight=packed(values.T, 1, AWQ_ORDER), qzeros=packed(zeros.T, 1, AWQ_ORDER),
                        scales=scales.T.contiguous())  # fmt: skip
        for arguments, kind, text in (
            ((awq, "model.layers.9"), ringattn.FileError, "model.layers.9"),
            ((self.folder,), ringattn.FileError, "has neither model.safetensors nor its index"),
            ((awq, LAYER, {"features": (64, 128)}), ringattn.UsageError, "in groups of 128"),
            ((awq, LAYER, {"rows": (0, N + 1)}), ringattn.UsageError, f"the layer has {N}"),
            ((awq, LAYER, {"rows": 3}), ringattn.UsageError, "a pair (begin, end)"),
            ((awq, LAYER, {"rows": (5, 3)}), ringattn.UsageError, f"rows is (5, 3) (the layer has {N}). Check the range."),
            ((awq, LAYER, {"rows": (0, 10**12)}), ringattn.UsageError, f"the layer has {N}"),
            ((awq, LAYER, {"rows": (-1, 3)}), ringattn.UsageError, f"the layer has {N}"),
            ((awq, LAYER, {"rows": (0, 3.5)}), ringattn.UsageError, "rows is 3.5"),
            ((awq, LAYER, {"features": (0, 10**12)}), ringattn.UsageError, f"the layer has {K}, in groups of 128"),
            ((awq, LAYER, {"quantization_config": self.config("other.json", quant_method="bitsandbytes")}), ringattn.FileError,
             "quant_method is `bitsandbytes`"),
        ):  # fmt: skip
            *place, named = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
            with self.assertRaises(kind) as caught:
                read_layer(*place, **named)
            self.assertIn(text, str(caught.exception))


class Loading(Files):
    """Models of one quantized layer, from files of every format."""

    class Model(torch.nn.Module):
        def __init__(self, features=K, bias=True):
            super().__init__()
            self.proj = torch.nn.Linear(features, N, bias=bias, dtype=torch.float16)
            self.norm = torch.nn.LayerNorm(N, dtype=torch.float16)

    def write(self, **tensors):
        path = self.folder / "model.safetensors"
        safetensors.torch.save_file(tensors, path)
        return self.folder

    def awq(self):
        values, zeros, scales = int4_layer()
        return {"proj.qweight": packed(values.T, 1, AWQ_ORDER), "proj.qzeros": packed(zeros.T, 1, AWQ_ORDER),
                "proj.scales": scales.T.contiguous(), "proj.bias": torch.ones(N).half()}  # fmt: skip

    def test_layers_of_gptq_and_awq_become_modules(self):
        values, zeros, scales = int4_layer()
        gptq = {"proj.qweight": packed(values.T, 0), "proj.qzeros": packed(zeros.T - 1, 1),
                "proj.scales": scales.T.contiguous(), "proj.bias": torch.ones(N).half()}  # fmt: skip
        x = torch.randn(3, K).half()
        for format, tensors in (("awq", self.awq()), ("gptq", gptq)):
            self.config(quant_method=format, bits=4, group_size=128)
            folder = self.write(**tensors, **{"norm.weight": torch.full((N,), 2.0).half(), "extra": torch.ones(2)})
            model = self.Model()
            report = ringattn.quantized.load_(model, folder)
            self.assertEqual((report.layers, report.missing, report.unexpected), ({"proj": format}, ["norm.bias"], ["extra"]))
            self.assertEqual(report.tensors, ["norm.weight"])
            self.assertIn("missing in the files: norm.bias\nnot in the model: extra", str(report))
            self.assertTrue(torch.equal(model.norm.weight, torch.full((N,), 2.0).half()))
            layer = read_layer(folder, "proj")
            with torch.no_grad():
                expected = ringattn.linear(x, layer.weight, layer.bias, scales=layer.scales, zeros=layer.zeros)
                self.assertTrue(torch.equal(model.proj(x), expected), format)

    class Tied(torch.nn.Module):
        """Two modules with one weight, as an embedding and an output head."""

        def __init__(self):
            super().__init__()
            self.first, self.proj = torch.nn.Linear(K, N, bias=False), torch.nn.Linear(K, N, bias=False)
            self.proj.weight = self.first.weight

    def test_a_weight_that_modules_share_stays_shared(self):
        with torch.device("meta"):
            model = self.Tied()
        report = ringattn.quantized.load_(model, self.write(**{"first.weight": torch.ones(N, K)}))
        self.assertIs(model.proj.weight, model.first.weight)
        self.assertEqual((report.missing, float(model.proj.weight.detach().sum())), ([], N * K))

    def test_a_layer_with_two_names_and_tensors_that_are_not_read(self):
        self.config(quant_method="awq", bits=4, group_size=128)
        model = self.Model()
        model.again = model.proj
        tensors = {name.replace("proj", "again"): tensor for name, tensor in self.awq().items()}
        report = ringattn.quantized.load_(model, self.write(**tensors, **{"again.extra": torch.ones(2)}))
        self.assertIs(model.again, model.proj)
        self.assertEqual((report.missing, report.unexpected), (["norm.weight", "norm.bias"], ["again.extra"]))

    class Scaled(Model):
        """A module with a parameter and a buffer that no file has, as the embeddings of Gemma."""

        def __init__(self):
            super().__init__()
            self.norm.register_buffer("factor", torch.zeros(2), persistent=False)

        def _init_weights(self, module):
            if module is self.norm:
                module.factor.fill_(2)
                module.weight.fill_(5)

    def test_buffers_beside_parameters_are_computed(self):
        self.config(quant_method="awq", bits=4, group_size=128)
        with torch.device("meta"):
            model = self.Scaled()
        norm = {"norm.weight": torch.ones(N).half(), "norm.bias": torch.zeros(N).half()}
        report = ringattn.quantized.load_(model, self.write(**self.awq() | norm))
        self.assertEqual((report.missing, model.norm.factor.tolist()), ([], [2.0, 2.0]))
        self.assertTrue(torch.equal(model.norm.weight, norm["norm.weight"]))

    def test_a_bias_of_zeros_may_have_no_place(self):
        self.config(quant_method="awq", bits=4, group_size=128)
        model = self.Model(bias=False)
        report = ringattn.quantized.load_(model, self.write(**self.awq() | {"proj.bias": torch.zeros(N).half()}))
        self.assertEqual((report.unexpected, model.proj.bias), ([], None))

    def test_what_does_not_fit_is_refused_and_nothing_changes(self):
        load_, awq = ringattn.quantized.load_, self.awq()
        counted = self.Model()
        counted.norm.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        hooked = self.Model()
        hooked.proj.register_forward_hook(lambda *_: None)
        embedding = self.Model()
        embedding.proj = torch.nn.Embedding(N, K)
        other = {"proj.weight": torch.ones(N, K, dtype=torch.uint8), "proj.weight.absmax": torch.ones(4)}
        for words, model, tensors, kind in (
            (f"proj is [{N}, {K}] in the files (the model's is [{N}, 512])", self.Model(512), awq, ringattn.UsageError),
            ("proj has hooks", hooked, awq, ringattn.UsageError),
            ("proj is quantized in the files (the model has a Embedding there", embedding, awq, ringattn.UsageError),
            ("(the model has nothing of that name", torch.nn.Sequential(torch.nn.Linear(8, 8)), awq, ringattn.UsageError),
            ("proj has no bias in the files", self.Model(), {k: v for k, v in awq.items() if k != "proj.bias"},
             ringattn.UsageError),
            ("proj has a bias in the files (the model's has none)", self.Model(bias=False), awq, ringattn.UsageError),
            ("proj is quantized in a format that is not read (the files have its W_q, scale, and no weight)", self.Model(),
             {"proj.W_q": torch.ones(8, dtype=torch.uint8), "proj.scale": torch.ones(2), "norm.weight": torch.ones(N).half()},
             ringattn.UsageError),
            ("proj is quantized in a format that is not read (the files have its weight._data, and no weight)", self.Model(),
             {"proj.weight._data": torch.ones(8, dtype=torch.int8), "norm.weight": torch.ones(N).half()}, ringattn.UsageError),
            ("proj is quantized in the files (its weight is also the model's first.weight)", self.Tied(), awq,
             ringattn.UsageError),
            ("first.weight and proj.weight differ in the files (they are one tensor of the model)", self.Tied(),
             {"first.weight": torch.ones(N, K), "proj.weight": torch.zeros(N, K)}, ringattn.UsageError),
            ("norm.count is F32 [2] in the files (the model's is int64 [2])", counted, {"norm.count": torch.ones(2)},
             ringattn.UsageError),
            ("norm.weight is F16 [2] in the files", self.Model(), awq | {"norm.weight": torch.ones(2).half()},
             ringattn.UsageError),
            ("has none of the model's tensors", self.Model(), {"other": torch.ones(1)}, ringattn.UsageError),
            ("proj", self.Model(), other, ringattn.FileError),
        ):  # fmt: skip
            before = None if not hasattr(model, "proj") else model.proj
            with self.subTest(words), self.assertRaises(kind) as caught:
                load_(model, self.write(**tensors))
            self.assertIn(words, str(caught.exception))
            self.assertTrue(before is None or model.proj is before)
        folder = self.write(**awq)
        linear = torch.nn.Linear(K, N)
        for words, call in (("model is str", lambda: load_("model", self.folder)),
                            ("path is int", lambda: load_(self.Model(), 3)),
                            ("the model itself is a torch.nn.Linear", lambda: load_(linear, folder)),
                            ("device is meta", lambda: load_(self.Model(), folder, device="meta")),
                            ("device is nowhere (PyTorch says: ", lambda: load_(self.Model(), folder, device="nowhere")),
                            ("threads is x", lambda: load_(self.Model(), folder, threads="x")),
                            ("-1 threads are not possible", lambda: load_(self.Model(), folder, threads=-1))):  # fmt: skip
            with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn(words, str(caught.exception))


class Quantizing(Files):
    """What the program writes, beside the reference library."""

    def quantize(self, format: str, model: dict, *more: str):
        source, out = self.folder / "model.safetensors", self.folder / f"{format}{len(more)}"
        safetensors.torch.save_file(model, source)
        command = [PROGRAM, "quantize", "--format", format, "--input", source, "--output", out, *more]
        subprocess.run(command, check=True, capture_output=True)
        tensors = safetensors.torch.load_file(out / "model.safetensors")
        return out, tensors, json.loads((out / "config.json").read_text())["quantization_config"]

    def model(self, dtype):
        generator = torch.Generator().manual_seed(5)
        return {f"{LAYER}.weight": torch.randn(N, K, generator=generator).to(dtype),
                "lm_head.weight": torch.ones(8, K, dtype=dtype)}  # fmt: skip

    def test_the_package_reads_what_the_program_writes(self):
        model = self.model(torch.bfloat16)
        weight = model[f"{LAYER}.weight"].float()
        for format, bound in (("int8", 0.01), ("int4", 0.13)):
            errors = []
            for more in ((), ("--search", "mse")):
                out, tensors, _ = self.quantize(format, model, *more)
                self.assertTrue(torch.equal(tensors["lm_head.weight"], model["lm_head.weight"]))
                layer = read_layer(out, LAYER)
                self.assertEqual(layer.weights, format)
                if not more:
                    q = ringattn.quantize_weight(model[f"{LAYER}.weight"], format)
                    self.assertTrue(torch.equal(q.weight, layer.weight) and torch.equal(q.scales, layer.scales), format)
                errors.append((layer.dequantize(torch.float32) - weight).norm() / weight.norm())
            self.assertLess(errors[0], bound)
            self.assertLessEqual(errors[1], errors[0])

    def test_a_model_is_loaded_from_the_files(self):
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError:
            self.skipTest("needs transformers")
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        for format, tied in (("int8", False), ("int4", True)):
            config = LlamaConfig(num_hidden_layers=2, vocab_size=96, eos_token_id=None, tie_word_embeddings=tied, **sizes)
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).eval()
            source, out = self.folder / f"of-{format}", self.folder / format
            model.save_pretrained(source, max_shard_size="200KB")
            self.assertTrue((source / "model.safetensors.index.json").exists())
            command = [PROGRAM, "quantize", "--format", format, "--input", source, "--output", out]
            subprocess.run(command, check=True, capture_output=True)
            ringattn.nn.quantize_(model, format)
            with torch.device("meta"):
                empty = LlamaForCausalLM(config).eval()
            prompt = torch.arange(12)[None]
            asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
            for other in (empty, LlamaForCausalLM(config).eval()):
                report = ringattn.quantized.load_(other, out)
                self.assertEqual((len(report.layers), report.missing, report.unexpected), (14, [], []))
                self.assertIn("14 layers of ", str(report))
                for (name, expected), found in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
                    self.assertTrue(found.dtype == expected.dtype and torch.equal(found, expected), name)
                with torch.no_grad():
                    self.assertTrue(torch.equal(other.generate(prompt, **asked), model.generate(prompt, **asked)))

    @unittest.skipIf(PackedQuantizationCompressor is None, "needs compressed-tensors")
    def test_the_reference_library_decompresses_the_same_values(self):
        compressors = {"int8": "IntQuantizationCompressor", "int4": "PackedQuantizationCompressor"}
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for format, name in compressors.items():
                out, tensors, config = self.quantize(format, self.model(dtype), "--force")
                read = QuantizationConfig.model_validate(config)
                self.assertEqual(read.ignore, ["lm_head"])
                scheme = read.config_groups["group_0"]
                state = {key.removeprefix(f"{LAYER}."): value for key, value in tensors.items() if key.startswith(LAYER)}
                theirs = globals()[name].decompress(state, scheme)["weight"]
                self.assertEqual(theirs.dtype, dtype)
                self.assertTrue(torch.equal(read_layer(out, LAYER).dequantize(), theirs), (format, dtype))

    @unittest.skipIf(PackedQuantizationCompressor is None, "needs compressed-tensors")
    def test_scales_are_those_of_its_min_max_observer(self):
        model = self.model(torch.float32)
        weight = model[f"{LAYER}.weight"]
        for format, groups in (("int8", weight[:, None]), ("int4", weight.reshape(N, -1, 128))):
            _, tensors, config = self.quantize(format, model)
            arguments = QuantizationConfig.model_validate(config).config_groups["group_0"].weights
            scales, _ = calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), arguments)
            self.assertTrue(torch.equal(tensors[f"{LAYER}.weight_scale"], scales), format)

    @unittest.skipIf(PackedQuantizationCompressor is None, "needs compressed-tensors")
    def test_the_package_reads_what_the_reference_library_packs(self):
        values, zeros, scales = int4_layer()
        weight = dequantized(values, zeros, scales)
        scheme = QuantizationConfig.model_validate({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}}},
        }).config_groups["group_0"]  # fmt: skip
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": (zeros - 8).to(torch.int8)}
        made = PackedQuantizationCompressor.compress(state, scheme)
        theirs = PackedQuantizationCompressor.decompress(made, scheme)["weight"]
        layer = read_layer(self.save("theirs.safetensors", **made), LAYER)
        self.assertTrue(torch.equal(layer.zeros, zeros.to(torch.uint8)))
        self.assertTrue(torch.equal(layer.dequantize(), theirs))


if __name__ == "__main__":
    unittest.main()
