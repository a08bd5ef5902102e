#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Linear layers by PyTorch on one GPU: F.linear, which is cuBLAS, and the activation after it.

    bench/peers/linear.py --shapes 8192x4096x4096,64x12288x5376,8192x14336x4096:swiglu --jsonl results.jsonl
    bench/peers/linear.py --self-check

The method is that of bench/linear_gpu.cpp, whose --shapes are the same: rows x N x K, an activation, and how the layer is
parallel, which means nothing to one GPU. A CUDA graph holds many layers, one after the other, over copies of the tensors in
turn. "form" says who computes the activation: "eager" is PyTorch's own kernels, "compiled" is torch.compile's kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import common
import decode

SCHEMA = "ringattn.linear/1"
FAR_BEYOND_CACHE = 320 << 20
MIN_LAUNCHES = 8
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh")


@dataclass(frozen=True)
class Layer:
    rows: int
    n: int
    k: int
    activation: str = "none"
    parallel: str = "none"
    dtype: str = "bf16"

    @property
    def gated(self) -> bool:
        return "glu" in self.activation

    @property
    def sums(self) -> int:
        return self.n * (2 if self.gated else 1)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.sums * self.k

    @property
    def bytes(self) -> int:
        return (4 if self.dtype == "fp32" else 2) * (self.rows * self.k + self.sums * self.k + self.rows * self.n)

    @property
    def caches(self) -> int:
        """Copies of the tensors; decode.microseconds() knows them by this name."""
        return math.ceil(FAR_BEYOND_CACHE / self.bytes)

    @property
    def launches(self) -> int:
        return self.caches * math.ceil(MIN_LAUNCHES / self.caches)


def parse_shapes(text: str) -> list[Layer]:
    """8192x14336x4096:swiglu:row,64x12288x5376."""
    layers = []
    for entry in text.split(","):
        size, *words = entry.split(":")
        numbers = size.split("x")
        if len(numbers) != 3 or len(words) > 2 or (words and words[0] not in ACTIVATIONS):
            raise argparse.ArgumentTypeError(f'"{entry}" is no layer such as 8192x14336x4096:swiglu')
        layers.append(Layer(*(common.parse_size(number) for number in numbers), *words))
    return layers


def activated(torch: Any, z: Any, activation: str) -> Any:
    functional = torch.nn.functional
    kinds = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }
    if activation == "none":
        return z
    if activation in kinds:
        return kinds[activation](z)
    gate, up = z.chunk(2, dim=-1)
    return kinds[{"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[activation]](gate) * up


def work(world: common.World, layer: Layer, form: str, seed: int) -> tuple[Callable[[int], Any], Any, Any]:
    """multiply(i) enqueues the layer of copy i and returns its result; then all x and all weights."""
    torch = world.torch
    generator = torch.Generator(device=world.device).manual_seed(seed)
    dtype = common.dtype_of(torch, layer.dtype)
    torch.backends.cuda.matmul.allow_tf32 = False

    def normal(*shape: int) -> Any:
        return torch.empty(*shape, device=world.device, dtype=dtype).normal_(generator=generator)

    x = normal(layer.caches, layer.rows, layer.k)
    weights = normal(layer.caches, layer.sums, layer.k) / math.sqrt(layer.k)
    act: Callable[[Any], Any] = lambda z: activated(torch, z, layer.activation)  # noqa: E731
    if form == "compiled":
        act = torch.compile(act)
    return lambda i: act(torch.nn.functional.linear(x[i], weights[i])), x, weights


def measure(world: common.World, layer: Layer, form: str, seed: int) -> dict[str, Any]:
    """The measured members of a line; of a peer that can't do it, why."""
    try:
        multiply, _, _ = work(world, layer, form, seed)
        times = decode.microseconds(world.torch, layer, multiply)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"samples": 0, "ms": None, "error": common.reason(error)}
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9}
    median = common.quantile(times, 0.5)
    return {
        "samples": len(times),
        "ms": {name: common.quantile(times, part) * 1e-3 for name, part in quantiles.items()},
        "tflops": layer.flops / median * 1e-6,
        "gbytes_per_second": layer.bytes / median * 1e-3,
    }


def line(world: common.World, layer: Layer, form: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "tool": {"name": "pytorch", "version": world.torch.__version__},
        "argv": sys.argv,
        "git": common.git_revision(),
        "devices": world.devices(),
        "kernel": "cublas",
        "form": form,
        "job": {
            "rows": layer.rows,
            "n": layer.n,
            "k": layer.k,
            "activation": layer.activation,
            "parallel": layer.parallel,
            "weights": "float",
            "dtype": layer.dtype,
        },
        "cache": "cold",
        "copies": layer.caches,
        "launches": layer.launches,
        **found,
    }


def self_check(world: common.World) -> int:
    good = True
    dtype = "bf16" if world.on_gpu else "fp32"
    for activation in ACTIVATIONS:
        layer = Layer(33, 40, 72, activation, "none", dtype)
        multiply, x, weights = work(world, layer, "eager", 1)
        wanted = activated(world.torch, x[0].double() @ weights[0].double().T, activation)
        error = float(((multiply(0).double() - wanted).abs() / wanted.std()).max())
        good &= common.judge(world, activation, error, dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    shapes = "rows x N x K of each, then :activation and :parallel [%(default)s]"
    parser.add_argument("--shapes", metavar="LIST", type=parse_shapes, default="8192x4096x4096,64x12288x5376", help=shapes)
    dtypes = "bf16, fp16 or fp32, which is not rounded to TF32 [%(default)s]"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", metavar="DTYPE", help=dtypes)
    parser.add_argument("--forms", metavar="LIST", default="eager", help="eager, compiled [%(default)s]")
    arguments, world = common.one_gpu(parser)
    if arguments.self_check:
        return self_check(world)
    with common.open_lines(arguments.jsonl) as file:
        for layer in (replace(shape, dtype=arguments.dtype) for shape in arguments.shapes):
            for form in arguments.forms.split(","):
                found = measure(world, layer, form, arguments.seed)
                print(json.dumps(line(world, layer, form, found)), file=file, flush=True)
                told = found.get("error") or f"{found['ms']['median'] * 1e3:.1f} us"
                print(f"# {layer.rows}x{layer.n}x{layer.k}, {layer.activation}, {form}: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
