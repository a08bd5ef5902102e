#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding by PyTorch's scaled_dot_product_attention on one GPU, forced to cuDNN's kernel and to FlashAttention-2: one query
row a sequence over all keys of its cache. FlashAttention-2's own package (flash_attn) is measured too, where it is installed.

    bench/peers/decode.py --steps 1x1k,1x128k,32x4k --jsonl results.jsonl
    bench/peers/decode.py --steps 32x4k --heads 32 --kv-heads 4
    bench/peers/decode.py --self-check

The method is that of bench/decode_gpu.cpp, whose words --steps, --heads, --kv-heads and --head-dim are the same. A CUDA graph
holds several steps, one behind the other. Each of them reads the next of several caches, so at least 512 MiB are read between
two uses of one cache, and nothing of it is left in the L2 cache. A line's time is that of a replay, divided by its steps.

A peer may be asked in several variants, and each has a line of its own; its "form" says which:
  grouped        query heads beside their K/V head, as the library takes them (enable_gqa)
  rows           the query heads of a K/V head as rows of one query, which is the same without any mask, and needs no
                 library that knows of groups
  token-major    the cache lies as [sequences, keys, heads, dim], as ours does
  head-major     the cache lies as [sequences, heads, keys, dim]
  own package    by flash_attn_with_kvcache of flash_attn, grouped and token-major
No form copies or expands K or V.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import common

SCHEMA = "ringattn.decode/1"
FAR_BEYOND_CACHE = 512 << 20  # bytes read between two uses of a cache, at least
MIN_LAUNCHES = 4  # of a graph
REPLAYS = 11
WARM_MS = 100.0  # of replays before the first that counts

PACKAGE = "flash_attn"
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash_attention_2": "FLASH_ATTENTION", "math": "MATH"}


@dataclass(frozen=True)
class Step:
    """One query row of each of `batch` sequences of `keys` keys."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bf16"

    @property
    def cache_bytes(self) -> int:
        """Of K, and of V."""
        return self.batch * self.keys * self.kv_heads * self.head_dim * {"bf16": 2, "fp16": 2, "fp32": 4}[self.dtype]

    @property
    def caches(self) -> int:
        return math.ceil(FAR_BEYOND_CACHE / (2 * self.cache_bytes))

    @property
    def launches(self) -> int:
        """Each cache is used equally often, so the first use of a replay is no repetition of the last one."""
        return self.caches * math.ceil(MIN_LAUNCHES / self.caches)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": 1, "head_dim_v": self.head_dim, "page_size": 0}


@dataclass(frozen=True)
class Variant:
    """How a peer is asked."""

    kernel: str
    grouped: bool
    token_major: bool

    @property
    def form(self) -> str:
        if self.kernel == PACKAGE:
            return "own package"
        return f"{'grouped' if self.grouped else 'rows'}, {'token' if self.token_major else 'head'}-major"


def variants(kernel: str, step: Step) -> list[Variant]:
    if kernel == PACKAGE:
        return [Variant(kernel, True, True)]  # it takes one order, and packs heads into rows itself
    packed = [True, False] if step.heads != step.kv_heads else [True]
    return [Variant(kernel, grouped, token_major) for grouped in packed for token_major in (True, False)]


def parse_steps(text: str) -> list[tuple[int, int]]:
    """1x4k,32x16k: one sequence of 4,096 keys, and 32 of 16,384."""
    steps = []
    for entry in text.split(","):
        batch, cross, keys = entry.partition("x")
        if not cross:
            raise argparse.ArgumentTypeError(f'"{entry}" is no step such as 32x16k, sequences x keys')
        steps.append((common.parse_size(batch), common.parse_size(keys)))
    return steps


class Pool:
    """Random numbers, which every variant of every step takes its caches from."""

    def __init__(self, world: common.World, steps: list[Step], seed: int) -> None:
        torch = world.torch
        size = max(step.cache_bytes * step.caches for step in steps)
        generator = torch.Generator(device=world.device).manual_seed(seed)
        dtype = common.dtype_of(torch, steps[0].dtype)
        self.halves = []
        for _ in range(2):
            numbers = torch.empty(size // dtype.itemsize, device=world.device, dtype=dtype)
            self.halves.append(numbers.normal_(generator=generator))

    def cache(self, step: Step, token_major: bool, index: int) -> tuple[Any, Any]:
        """K and V of one cache: [batch, kv_heads, keys, dim]."""
        return tuple(self._view(half, step, token_major, index) for half in self.halves)

    @staticmethod
    def _view(half: Any, step: Step, token_major: bool, index: int) -> Any:
        count = step.batch * step.keys * step.kv_heads * step.head_dim
        numbers = half[index * count : (index + 1) * count]
        if token_major:
            return numbers.view(step.batch, step.keys, step.kv_heads, step.head_dim).transpose(1, 2)
        return numbers.view(step.batch, step.kv_heads, step.keys, step.head_dim)


def attend(torch: Any, variant: Variant, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """q: [batch, heads, 1, dim]; k, v: [batch, kv_heads, keys, dim]; `lengths`: keys of each sequence. The result is as q, or
    [batch, kv_heads, heads / kv_heads, dim] where heads are rows: giving it q's shape could take a copy, and time."""
    if variant.kernel == PACKAGE:
        from flash_attn import flash_attn_with_kvcache

        out = flash_attn_with_kvcache(*(rows.transpose(1, 2) for rows in (q, k, v)), cache_seqlens=lengths)
        return out.transpose(1, 2)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not variant.grouped:
        q = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
    with sdpa_kernel(getattr(SDPBackend, BACKENDS[variant.kernel])):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def microseconds(torch: Any, step: Step, use: Callable[[int], object]) -> list[float]:
    """Of a step, in each replay of a graph of step.launches steps; use(i) enqueues one over cache i."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for cache in range(step.caches):  # what is loaded, planned or compiled at first is none of a step's time
            use(cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in range(step.launches):
            use(launch % step.caches)

    def replay() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    warm = 0.0
    while warm < WARM_MS:
        warm += replay()
    return [replay() * 1e3 / step.launches for _ in range(REPLAYS)]


def measure(world: common.World, pool: Pool, variant: Variant, step: Step, seed: int) -> dict[str, Any]:
    """The measured members of a line; of a peer that can't do it, why."""
    torch = world.torch
    caches = [pool.cache(step, variant.token_major, index) for index in range(step.caches)]
    q = query(world, step, seed)
    lengths = torch.full((step.batch,), step.keys, dtype=torch.int32, device=world.device)
    try:
        times = microseconds(torch, step, lambda index: attend(torch, variant, q, *caches[index], lengths))
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"samples": 0, "us": None, "error": common.reason(error)}
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9}
    return {"samples": len(times), "us": {name: common.quantile(times, part) for name, part in quantiles.items()}}


def query(world: common.World, step: Step, seed: int) -> Any:
    torch = world.torch
    generator = torch.Generator(device=world.device).manual_seed(seed + 1)
    dtype = common.dtype_of(torch, step.dtype)
    rows = torch.empty(step.batch, step.heads, 1, step.head_dim, device=world.device, dtype=dtype)
    return rows.normal_(generator=generator)


def line(world: common.World, variant: Variant, step: Step, found: dict[str, Any]) -> dict[str, Any]:
    tool = {"name": "pytorch sdpa", "version": world.torch.__version__}
    if variant.kernel == PACKAGE:
        tool = {"name": PACKAGE, "version": package_version()}
    return {
        "schema": SCHEMA,
        "tool": tool,
        "argv": sys.argv,
        "git": common.git_revision(),
        "devices": world.devices(),
        "kernel": "flash_attention_2" if variant.kernel == PACKAGE else variant.kernel,
        "job": step.as_json(),
        "form": variant.form,
        "caches": step.caches,
        "launches": step.launches,
        **found,
    }


def package_version() -> str:
    try:
        return importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def self_check(world: common.World) -> int:
    torch = world.torch
    package = [PACKAGE] if importlib.util.find_spec(PACKAGE) else []
    good = True
    for kernel in ["cudnn", "flash_attention_2", *package] if world.on_gpu else ["math"]:
        for heads, kv_heads in ((8, 2), (4, 4)):
            step = Step(3, 130, heads, kv_heads, 64, "bf16" if world.on_gpu else "fp32")
            pool = Pool(world, [step], 1)
            q = query(world, step, 1)
            lengths = torch.full((step.batch,), step.keys, dtype=torch.int32, device=world.device)
            for variant in variants(kernel, step):
                k, v = pool.cache(step, variant.token_major, step.caches - 1)
                found = attend(torch, variant, q, k, v, lengths).reshape(q.shape)
                error = (found.double() - common.plain_attention(torch, q, k, v, causal=False)).abs().max()
                good &= common.judge(world, f"{kernel}, {heads}/{kv_heads}, {variant.form}", float(error), step.dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    sizes = "sequences x keys of each [%(default)s]"
    parser.add_argument("--steps", metavar="LIST", type=parse_steps, default="1x4k", help=sizes)
    parser.add_argument("--heads", type=int, default=32, help="query heads [%(default)s]")
    parser.add_argument("--kv-heads", type=int, default=8, help="K/V heads; they divide the query heads [%(default)s]")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernels", default=f"cudnn,flash_attention_2,{PACKAGE}", help="of %(default)s,math")
    parser.add_argument("--seed", type=int, default=1, help="of the random input")
    parser.add_argument("--jsonl", metavar="FILE", default="-", help="lines are appended to it; - is stdout")
    parser.add_argument("--self-check", action="store_true", help="compare with a plain computation at a small size, and stop")
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    for kernel in kernels:
        if kernel not in (*BACKENDS, PACKAGE):
            parser.error(f"--kernels has {kernel}, which is none of {', '.join([*BACKENDS, PACKAGE])}")
    if PACKAGE in kernels and not importlib.util.find_spec(PACKAGE):
        kernels.remove(PACKAGE)
        why = f"it isn't installed for {sys.executable}; PyTorch's own form stands for it"
        print(f"# {PACKAGE}: skipped ({why})", file=sys.stderr)
    torch = common.import_torch(arguments.self_check)
    torch.set_grad_enabled(False)
    world = common.World(torch, wanted=False)
    if arguments.self_check:
        return self_check(world)
    heads = (arguments.heads, arguments.kv_heads, arguments.head_dim)
    steps = [Step(batch, keys, *heads) for batch, keys in arguments.steps]
    pool = Pool(world, steps, arguments.seed)
    with common.open_lines(arguments.jsonl) as file:
        for step in steps:
            for kernel in kernels:
                for variant in variants(kernel, step):
                    found = measure(world, pool, variant, step, arguments.seed)
                    print(json.dumps(line(world, variant, step, found)), file=file, flush=True)
                    told = found.get("error") or f"{found['us']['median']:.1f} us"
                    print(f"# {kernel}, {variant.form}, {step.batch} x {step.keys}: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
