# SPDX-License-Identifier: Apache-2.0
"""Reads linear layers from files: floating-point layers, and layers quantized by compressed-tensors (int-quantized,
pack-quantized), GPTQ or AWQ. All formats are converted to the same layout, as torch tensors in host memory.

    layer = ringattn.quantized.read_layer("model-int4", "model.layers.0.mlp.down_proj")
    layer.weight, layer.scales, layer.zeros     # uint8 [N, K / 2], fp32 [N, K / 128], uint8 [N, K / 128] or None
    layer.dequantize(torch.bfloat16)            # [N, K]

docs/linear.md has the formats. The library unpacks them (src/ops/linear/layer_weights.cpp), and so does the program."""

import ctypes
import os
from typing import NamedTuple

from . import _abi, _structs
from ._abi import lib
from ._arguments import as_int, as_text
from ._errors import refuse, unsupported

__all__ = ["Layer", "load_", "read_layer"]

GROUP = 128
_WEIGHTS = ("float", "int8", "int4")


class Layer(NamedTuple):
    """A linear layer, or a part of it, with N rows of K features, as PyTorch tensors in host memory.

    Attributes:
        name: name of the layer in the file.
        format: "float", "int-quantized", "pack-quantized", "gptq", "gptq_v2" or "awq".
        weights: "float", "int8" or "int4".
        weight: [N, K] of a floating-point dtype or int8; "int4": uint8 [N, K / 2], the even element in the low half.
        scales: float32, "int8" [N], "int4" [N, K / 128]; "float": None.
        zeros: "int4": uint8 [N, K / 128]; None: all are 8.
        bias: [N], or None.
        dtype: dtype of a floating-point weight, or of the scales in the file."""

    name: str
    format: str  # "float", "int-quantized", "pack-quantized", "gptq", "gptq_v2", "awq"
    weights: str  # "float", "int8", "int4"
    weight: object  # [N, K] of a floating-point dtype or int8; "int4": uint8 [N, K / 2], the even element in the low half
    scales: object  # fp32: "int8" [N], "int4" [N, K / 128]; "float": None
    zeros: object  # "int4": uint8 [N, K / 128]; None: all are 8
    bias: object  # [N], or None
    dtype: object  # of floating-point weights, or of the scales in the file

    @property
    def in_features(self) -> int:
        """K, the features of this part."""
        return self.weight.shape[1] * (2 if self.weights == "int4" else 1)

    @property
    def out_features(self) -> int:
        """N, the rows of this part."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight, its scales and zeros."""
        return sum(part.nbytes for part in (self.weight, self.scales, self.zeros) if part is not None)

    def dequantize(self, dtype=None):
        """The weight [N, K] in floating point: scale · (value − zero), rounded once to dtype. None: the dtype of the scales in
        the file."""
        torch = _torch()
        dtype = self.dtype if dtype is None else dtype
        if self.weights == "float":
            return self.weight.to(dtype)
        if self.weights == "int8":
            return (self.weight.float() * self.scales[:, None]).to(dtype)
        values = torch.stack([self.weight & 15, self.weight >> 4], dim=-1).reshape(self.out_features, -1, GROUP).float()
        values -= 8 if self.zeros is None else self.zeros[:, :, None].float()
        return (values * self.scales[:, :, None]).reshape(self.out_features, -1).to(dtype)


def read_layer(path, name: str = "", *, rows=None, features=None, quantization_config=None) -> Layer:
    """Reads a linear layer, or a part of it.

    Args:
        path: a safetensors file, its *.index.json, or a model's folder.
        name: name of the layer, such as "model.layers.0.mlp.down_proj". "": the tensors without a prefix, or the only layer of
            the file.
        rows, features: pairs (begin, end) of a part. None: all. Features of int4 layers are whole groups of 128.
        quantization_config: a config.json. None: the one beside the file.

    Returns:
        A Layer.

    Raises:
        FileError: the file can't be read, has no such layer, or has it in an unsupported format.
        UsageError: the layer does not have these rows or features.
        UnsupportedError: PyTorch is missing.

    Formula:
        docs/linear.md has the formats.

    Example:
        >>> import os, tempfile, safetensors.torch
        >>> path = os.path.join(tempfile.mkdtemp(), "layer.safetensors")
        >>> safetensors.torch.save_file({"weight": torch.ones(8, 64)}, path)
        >>> layer = ringattn.quantized.read_layer(path, rows=(0, 4))
        >>> layer.format, list(layer.weight.shape)
        ('float', [4, 64])
    """
    torch = _torch()
    config = None if quantization_config is None else _path(quantization_config, "quantization_config")
    handle = _abi.Handle()
    lib.layer_open(_path(path, "path"), as_text(name, "name"), config, ctypes.byref(handle))
    try:
        facts = _structs.layer_facts()
        lib.layer_get_facts(handle, facts)
        kind = _WEIGHTS[facts.weights]
        row, count = _range(rows, facts.out_features, 1, "rows")
        feature, width = _range(features, facts.in_features, GROUP if kind == "int4" else 1, "features")
        dtype = _dtype(torch, facts.dtype)
        groups = width // GROUP
        weight = {
            "float": lambda: torch.empty(count, width, dtype=dtype),
            "int8": lambda: torch.empty(count, width, dtype=torch.int8),
            "int4": lambda: torch.empty(count, width // 2, dtype=torch.uint8),
        }[kind]()
        shape = {"float": None, "int8": (count,), "int4": (count, groups)}[kind]
        scales = None if shape is None else torch.empty(shape, dtype=torch.float32)
        zeros = torch.empty(shape, dtype=torch.uint8) if facts.zeros else None
        bias = torch.empty(count, dtype=_dtype(torch, facts.bias)) if facts.bias.bits else None
        parts = [None if part is None else ctypes.c_void_p(part.data_ptr()) for part in (weight, scales, zeros, bias)]
        lib.layer_read(handle, row, count, feature, width, *parts)
        return Layer(facts.name.decode(), facts.format.decode(), kind, weight, scales, zeros, bias, dtype)
    finally:
        lib.layer_destroy(handle)


def load_(model, path, *, quantization_config=None, device=None, threads: int = 0):
    """Fills a model in place from the files of a quantized model: files that `ringattn quantize` wrote, or files of
    compressed-tensors, GPTQ or AWQ. Quantized layers become ringattn.nn.Linear modules, and all other parameters and buffers are
    loaded too. Everything is checked before the first layer is replaced.

    Args:
        model: a torch.nn.Module whose names match the files, such as a Hugging Face model. Parameters on the meta device get the
            dtypes of the files, and nothing is allocated twice. Other parameters keep dtype and device.
        path: the model's folder, its *.index.json, or a safetensors file.
        quantization_config: a config.json. None: the one beside the files.
        device: device for parameters that were on the meta device. None: the CPU.
        threads: threads for calls of a quantized layer on a CPU. 0: all processors.

    Returns:
        A LoadReport: the quantized layers and their formats, the other tensors that were read, tensors that the files lack, and
        tensors that the model does not have. print() it.

    Raises:
        FileError: a file can't be read, or has a layer in an unsupported format (bitsandbytes, torchao, fp8, act-order).
        UsageError: a layer or tensor of the files does not fit the model, or none of the files' tensors is in the model.

    Formula:
        docs/linear.md has the formats.

    Example:
        >>> import os, tempfile, safetensors.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> safetensors.torch.save_file(model.state_dict(), path)
        >>> print(ringattn.quantized.load_(model, path))
        no quantized layers, 2 other tensors
    """
    _torch()
    from ._load_model import load_ as load  # noqa: PLC0415, needs torch

    return load(model, _path(path, "path").decode(), quantization_config=quantization_config, device=device, threads=threads)


def _torch():
    try:
        import torch
    except ImportError:
        unsupported("layers are read as torch tensors, and torch can't be imported", "PyTorch is missing", "Install it.")
    return torch


def _dtype(torch, said):
    return {(2, 32): torch.float32, (2, 16): torch.float16, (4, 16): torch.bfloat16}[said.code, said.bits]


def _path(path, name: str) -> bytes:
    if not isinstance(path, (str, bytes, os.PathLike)):
        refuse(f"{name} is {type(path).__name__}", "it should be a file or a folder", "Pass its path.")
    return as_text(os.fsdecode(path), name)


def _range(pair, whole: int, unit: int, name: str) -> tuple[int, int]:
    """The begin and the length of a part, in rows or features. They are checked before memory is allocated."""
    if pair is None:
        return 0, whole
    try:
        begin, end = pair
    except (TypeError, ValueError):
        refuse(f"{name} is {pair!r}", "it is a pair (begin, end)", "Pass two numbers.")
    begin, end = as_int(begin, name), as_int(end, name)
    if not 0 <= begin <= end <= whole or begin % unit or end % unit:
        refuse(f"{name} is {pair!r}", f"the layer has {whole}" + (f", in groups of {unit}" if unit > 1 else ""),
               "Check the range.")  # fmt: skip
    return begin, end - begin
