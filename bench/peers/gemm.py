#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The products around a latent by PyTorch on one GPU, which hands them to cuBLAS: matmul where all heads share the rows,
else bmm.

    bench/peers/gemm.py --shapes expand:32kx16,absorb:128x128,back:128x128 --cache cold,warm --jsonl results.jsonl
    bench/peers/gemm.py --self-check

The method is that of bench/gemm_gpu.cpp, whose words --shapes and --cache are the same: use:rows x heads. A CUDA graph
holds many products, one behind the other, over copies of the tensors in turn (cold), or over the same ones (warm).

  expand   [rows, 512] times [512, heads x 128]: one matmul. Its result is dense, where ours lies in rows of 192.
  absorb   queries [rows, heads, 128], in rows of 192, times [heads, 128, 512]
  back     [rows, heads, 512] times [heads, 512, 128]
"form" says how heads follow each other in the result: "heads first" is bmm's own; "rows first" has it write where a layer
wants it, [rows, heads, dim], through a view.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import decode

SCHEMA = "ringattn.gemm/1"
FAR_BEYOND_CACHE = 512 << 20
MIN_LAUNCHES = 16
HEAD_DIM, ROPE_DIM, LATENT_DIM = 128, 64, 512
FORMS = {"expand": ["matmul"], "absorb": ["bmm, heads first", "bmm, rows first"], "back": ["bmm, heads first", "bmm, rows first"]}


@dataclass(frozen=True)
class Gemm:
    use: str
    rows: int
    heads: int
    cold: bool = False
    dtype: str = "bf16"

    @property
    def k(self) -> int:
        return HEAD_DIM if self.use == "absorb" else LATENT_DIM

    @property
    def n(self) -> int:
        return LATENT_DIM if self.use == "absorb" else HEAD_DIM

    @property
    def row_heads(self) -> int:
        return 1 if self.use == "expand" else self.heads

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.heads * self.k * self.n

    @property
    def bytes(self) -> int:
        """Of 16-bit elements that are read and written, each once."""
        weights = self.heads * self.k * self.n
        return 2 * (self.rows * self.row_heads * self.k + weights + self.rows * self.heads * self.n)

    @property
    def caches(self) -> int:
        """Copies of the tensors; decode.microseconds() knows them by this name."""
        return math.ceil(FAR_BEYOND_CACHE / self.bytes) if self.cold else 1

    @property
    def launches(self) -> int:
        return self.caches * math.ceil(MIN_LAUNCHES / self.caches)


def parse_shapes(text: str) -> list[tuple[str, int, int]]:
    """expand:32kx16,back:128x128."""
    shapes = []
    for entry in text.split(","):
        use, colon, size = entry.partition(":")
        rows, cross, heads = size.partition("x")
        if not colon or not cross or use not in FORMS:
            raise argparse.ArgumentTypeError(f'"{entry}" is no shape such as back:128x16, use:rows x heads')
        shapes.append((use, common.parse_size(rows), common.parse_size(heads)))
    return shapes


def parse_caches(text: str) -> list[bool]:
    caches = text.split(",")
    if not set(caches) <= {"cold", "warm"}:
        raise argparse.ArgumentTypeError(f'"{text}" is none of cold, warm, and no list of them')
    return [cache == "cold" for cache in caches]


def work(world: common.World, gemm: Gemm, form: str, seed: int) -> tuple[Callable[[int], object], Callable[[int], Any]]:
    """multiply(i) enqueues the gemm of copy i; result(i) is what it left, [rows, heads, n]."""
    torch = world.torch
    generator = torch.Generator(device=world.device).manual_seed(seed)
    dtype = common.dtype_of(torch, gemm.dtype)

    def normal(*shape: int) -> Any:
        return torch.empty(*shape, device=world.device, dtype=dtype).normal_(generator=generator)

    copies, rows, heads = gemm.caches, gemm.rows, gemm.heads
    width = HEAD_DIM + ROPE_DIM if gemm.use == "absorb" else LATENT_DIM
    left = normal(copies, rows, gemm.row_heads, width)[..., : gemm.k]
    right = normal(copies, heads, HEAD_DIM, LATENT_DIM)
    if gemm.use == "expand":
        out = torch.empty(copies, rows, heads * HEAD_DIM, device=world.device, dtype=dtype)
        flat = right.view(copies, heads * HEAD_DIM, LATENT_DIM)
        return (
            lambda i: torch.matmul(left[i, :, 0], flat[i].T, out=out[i]),
            lambda i: out[i].view(rows, heads, HEAD_DIM),
        )
    matrices = right if gemm.use == "absorb" else right.transpose(2, 3)
    if form.endswith("rows first"):
        out = torch.empty(copies, rows, heads, gemm.n, device=world.device, dtype=dtype).transpose(1, 2)
    else:
        out = torch.empty(copies, heads, rows, gemm.n, device=world.device, dtype=dtype)
    return (
        lambda i: torch.bmm(left[i].transpose(0, 1), matrices[i], out=out[i]),
        lambda i: out[i].transpose(0, 1),
    )


def expected(world: common.World, gemm: Gemm, seed: int, copy: int) -> Any:
    """In fp64 from the same numbers."""
    torch = world.torch
    generator = torch.Generator(device=world.device).manual_seed(seed)
    dtype = common.dtype_of(torch, gemm.dtype)
    width = HEAD_DIM + ROPE_DIM if gemm.use == "absorb" else LATENT_DIM
    left = torch.empty(gemm.caches, gemm.rows, gemm.row_heads, width, device=world.device, dtype=dtype)
    left = left.normal_(generator=generator)[copy, ..., : gemm.k].double()
    right = torch.empty(gemm.caches, gemm.heads, HEAD_DIM, LATENT_DIM, device=world.device, dtype=dtype)
    right = right.normal_(generator=generator)[copy].double()
    left = left.expand(-1, gemm.heads, -1)
    return torch.einsum("rhi,hio->rho" if gemm.use == "absorb" else "rhi,hoi->rho", left, right)


def measure(world: common.World, gemm: Gemm, form: str, seed: int) -> dict[str, Any]:
    """The measured members of a line; of a peer that can't do it, why."""
    try:
        multiply, _ = work(world, gemm, form, seed)
        times = decode.microseconds(world.torch, gemm, multiply)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"samples": 0, "ms": None, "error": common.reason(error)}
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9}
    median = common.quantile(times, 0.5)
    return {
        "samples": len(times),
        "ms": {name: common.quantile(times, part) * 1e-3 for name, part in quantiles.items()},
        "tflops": gemm.flops / median * 1e-6,
        "gbytes_per_second": gemm.bytes / median * 1e-3,
    }


def line(world: common.World, gemm: Gemm, form: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "tool": {"name": "pytorch", "version": world.torch.__version__},
        "argv": sys.argv,
        "git": common.git_revision(),
        "devices": world.devices(),
        "kernel": "cublas",
        "form": form,
        "job": {
            "use": gemm.use,
            "rows": gemm.rows,
            "heads": gemm.heads,
            "k": gemm.k,
            "n": gemm.n,
            "dtype": gemm.dtype,
        },
        "cache": "cold" if gemm.cold else "warm",
        "copies": gemm.caches,
        "launches": gemm.launches,
        **found,
    }


def self_check(world: common.World) -> int:
    good = True
    dtype = "bf16" if world.on_gpu else "fp32"
    for use, forms in FORMS.items():
        gemm = Gemm(use, 33, 3, False, dtype)
        for form in forms:
            multiply, result = work(world, gemm, form, 1)
            multiply(0)
            wanted = expected(world, gemm, 1, 0)
            error = float(((result(0).double() - wanted).abs() / wanted.std()).max())
            good &= common.judge(world, f"{use}, {form}", error, dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    shapes = "use:rows x heads of each; a use is expand, absorb or back [%(default)s]"
    parser.add_argument(
        "--shapes", metavar="LIST", type=parse_shapes, default="expand:32kx16,absorb:128x128,back:128x128", help=shapes
    )
    parser.add_argument("--cache", metavar="LIST", type=parse_caches, default="cold,warm", help="[%(default)s]")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16", help="[%(default)s]")
    arguments, world = common.one_gpu(parser)
    if arguments.self_check:
        return self_check(world)
    with common.open_lines(arguments.jsonl) as file:
        for use, rows, heads in arguments.shapes:
            for cold in arguments.cache:
                gemm = Gemm(use, rows, heads, cold, arguments.dtype)
                for form in FORMS[use]:
                    found = measure(world, gemm, form, arguments.seed)
                    print(json.dumps(line(world, gemm, form, found)), file=file, flush=True)
                    told = found.get("error") or f"{found['ms']['median'] * 1e3:.1f} us"
                    print(f"# {use}, {form}, {rows} x {heads}, {'cold' if cold else 'warm'}: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
