#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention on one GPU, forced to cuDNN's kernel and to FlashAttention-2; and FlashAttention-3,
where its Python package (flash_attn_interface) is installed.

    bench/peers/sdpa.py --seq 1k-128k*2 --jsonl results.jsonl
    bench/peers/sdpa.py --seq 4k-32k*2 --heads 32 --kv-heads 32 --head-dim 64
    bench/peers/sdpa.py --self-check
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import Any

import common

BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash_attention_2": "FLASH_ATTENTION", "math": "MATH"}
FLASH_ATTENTION_3 = "flash_attention_3"


def has_flash_attention_3() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def flash_attention_3_version() -> str:
    for package in ("flash_attn_3", "flash-attn-3"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def attention(torch: Any, backend: str, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """q, k, v: [batch, heads, tokens, dim], as random_rows() makes them."""
    if backend == FLASH_ATTENTION_3:
        from flash_attn_interface import flash_attn_func

        out = flash_attn_func(*(rows.transpose(1, 2) for rows in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions return the LSE, too
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def inputs(world: common.World, shape: common.Shape, seed: int) -> tuple[Any, Any, Any]:
    return (
        common.random_rows(world, shape, shape.seq, shape.heads, shape.head_dim, seed),
        common.random_rows(world, shape, shape.seq, shape.kv_heads, shape.head_dim, seed + 1),
        common.random_rows(world, shape, shape.seq, shape.kv_heads, shape.head_dim_v, seed + 2),
    )


def self_check(world: common.World) -> int:
    good = True
    on_gpu = ["cudnn", "flash_attention_2", *([FLASH_ATTENTION_3] if has_flash_attention_3() else [])]
    for backend in on_gpu if world.on_gpu else ["math"]:
        for mask in ["causal", "full"]:
            shape = common.Shape(384, 2, 8, 2, 64, 64, "bf16" if world.on_gpu else "fp32", mask)
            q, k, v = inputs(world, shape, 1)
            found = attention(world.torch, backend, q, k, v, shape.causal)
            error = (found.double() - common.plain_attention(world.torch, q, k, v, shape.causal)).abs().max()
            good &= common.judge(world, f"{backend}, {mask}", float(error), shape.dtype)
    return 0 if good else 1


def line(world: common.World, kernel: str, shape: common.Shape, found: dict[str, Any]) -> dict[str, Any]:
    if kernel != FLASH_ATTENTION_3:
        return common.line(world, "pytorch sdpa", "self", kernel, shape, **found)
    # A tool of its own, which has one kernel.
    tool = {"name": FLASH_ATTENTION_3, "version": flash_attention_3_version()}
    return common.line(world, FLASH_ATTENTION_3, "self", "", shape, **found) | {"tool": tool}


def main() -> int:
    parser = common.describe(__doc__)
    common.add_job_flags(parser, "1k-128k*2")
    parser.add_argument("--kernels", default=f"cudnn,flash_attention_2,{FLASH_ATTENTION_3}", help="of %(default)s,math")
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    for kernel in kernels:
        if kernel not in (*BACKENDS, FLASH_ATTENTION_3):
            parser.error(f"--kernels has {kernel}, which is none of {', '.join([*BACKENDS, FLASH_ATTENTION_3])}")
    if FLASH_ATTENTION_3 in kernels and not has_flash_attention_3():
        kernels.remove(FLASH_ATTENTION_3)
        print(f"# {FLASH_ATTENTION_3}: skipped (flash_attn_interface isn't installed for {sys.executable})", file=sys.stderr)
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=False)
    if arguments.self_check:
        return self_check(world)
    with common.open_lines(arguments.jsonl) as file:
        for kernel in kernels:
            for shape in common.shapes(arguments):
                try:
                    q, k, v = inputs(world, shape, arguments.seed)
                    found = common.measured(
                        world, shape, arguments.samples, lambda: attention(torch, kernel, q, k, v, shape.causal)
                    )
                except RuntimeError as error:  # even the input doesn't fit
                    found = {"error": common.reason(error)}
                common.write(world, file, line(world, kernel, shape, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
