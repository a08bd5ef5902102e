#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Decoding over latents by FlashMLA's dense kernel on one GPU, where its package (flash_mla) is installed.

    bench/peers/mla.py --steps 128x4k,1x128k --heads 128 --jsonl results.jsonl
    bench/peers/mla.py --self-check

The method is that of bench/decode_gpu.cpp, whose words --steps, --rows and --heads are the same, for latents of 512 with rotary
keys of 64, in pages of 64: a CUDA graph holds several steps, and each of them reads the next of several caches, so at least
512 MiB are read between two uses of one. The pages of all sequences are shuffled. What FlashMLA makes of the lengths before a
step is made once, as in a model whose layers share it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import common
import decode

PACKAGE = "flash_mla"
LATENT, ROTARY, PAGE = 512, 64, 64


@dataclass(frozen=True)
class Step:
    """The last `rows` tokens of each of `batch` sequences of `keys` tokens."""

    batch: int
    keys: int
    rows: int
    heads: int

    @property
    def pages(self) -> int:
        """Of one sequence."""
        return -(-self.keys // PAGE)

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.pages * PAGE * (LATENT + ROTARY) * 2

    @property
    def caches(self) -> int:
        """decode.microseconds() knows them by this name, and the next."""
        return math.ceil(decode.FAR_BEYOND_CACHE / self.cache_bytes)

    @property
    def launches(self) -> int:
        return self.caches * math.ceil(decode.MIN_LAUNCHES / self.caches)

    def as_json(self) -> dict[str, Any]:
        dims = {"kv_heads": 1, "head_dim": LATENT + ROTARY, "head_dim_v": LATENT, "dtype": "bf16", "page_size": PAGE}
        return {"batch": self.batch, "keys": self.keys, "rows": self.rows, "heads": self.heads, **dims}


class Input:
    """Random latents in shuffled pages, and queries."""

    def __init__(self, world: common.World, step: Step, seed: int, caches: int) -> None:
        torch = world.torch
        generator = torch.Generator(device=world.device).manual_seed(seed)

        def normal(*dims: int) -> Any:
            return torch.empty(*dims, device=world.device, dtype=torch.bfloat16).normal_(generator=generator)

        count = step.batch * step.pages
        self.q = normal(step.batch, step.rows, step.heads, LATENT + ROTARY)
        self.caches = normal(caches, count, PAGE, 1, LATENT + ROTARY)
        order = torch.randperm(count, device=world.device, generator=generator)
        self.table = order.to(torch.int32).view(step.batch, step.pages)
        self.lengths = torch.full((step.batch,), step.keys, dtype=torch.int32, device=world.device)


def attend(given: Input, cache: int, plan: Any) -> Any:
    """O: [batch, rows, heads, 512]."""
    import flash_mla

    out, _ = flash_mla.flash_mla_with_kvcache(
        given.q, given.caches[cache], given.table, given.lengths, LATENT, plan, causal=given.q.shape[1] > 1
    )
    return out


def plan_of(given: Input) -> Any:
    """For all steps over these lengths."""
    import flash_mla

    return flash_mla.get_mla_metadata(given.lengths, given.q.shape[1] * given.q.shape[2], 1)[0]


def measure(world: common.World, step: Step, seed: int) -> dict[str, Any]:
    """The measured members of a line; of a step that it can't do, why."""
    try:
        given = Input(world, step, seed, step.caches)
        plan = plan_of(given)
        times = decode.microseconds(world.torch, step, lambda cache: attend(given, cache, plan))
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"samples": 0, "us": None, "error": common.reason(error)}
    quantiles = {"median": 0.5, "p10": 0.1, "p90": 0.9}
    return {"samples": len(times), "us": {name: common.quantile(times, part) for name, part in quantiles.items()}}


def line(world: common.World, step: Step, found: dict[str, Any]) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(PACKAGE.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "schema": decode.SCHEMA,
        "tool": {"name": PACKAGE, "version": version},
        "argv": sys.argv,
        "git": common.git_revision(),
        "devices": world.devices(),
        "kernel": PACKAGE,
        "job": step.as_json(),
        "form": "own package",
        "caches": step.caches,
        "launches": step.launches,
        **found,
    }


def plain(torch: Any, given: Input, step: Step) -> Any:
    """By the formula, in fp64."""
    rows = given.caches[0][given.table.long()].reshape(step.batch, -1, LATENT + ROTARY)[:, : step.keys].double()
    scores = torch.einsum("brhd,bkd->brhk", given.q.double(), rows) / math.sqrt(LATENT + ROTARY)
    last = step.keys - step.rows + torch.arange(step.rows, device=scores.device)
    hidden = torch.arange(step.keys, device=scores.device)[None, :] > last[:, None]
    scores = scores.masked_fill(hidden[None, :, None], -math.inf)
    return torch.einsum("brhk,bkd->brhd", scores.softmax(3), rows[..., :LATENT])


def self_check(world: common.World) -> int:
    if not world.on_gpu or not importlib.util.find_spec(PACKAGE):
        print(f"skipped: needs a GPU and {PACKAGE}")
        return common.SKIPPED
    good = True
    for rows in (1, 2):
        step = Step(3, 200, rows, 16)
        given = Input(world, step, 1, 1)
        error = (attend(given, 0, plan_of(given)).double() - plain(world.torch, given, step)).abs().max()
        good &= common.judge(world, f"{PACKAGE}, {rows} rows", float(error), "bf16")
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    sizes = "sequences x tokens of each [%(default)s]"
    parser.add_argument("--steps", metavar="LIST", type=decode.parse_steps, default="128x4k", help=sizes)
    parser.add_argument("--rows", type=int, default=1, help="queries of each sequence [%(default)s]")
    parser.add_argument("--heads", type=int, default=128, help="query heads [%(default)s]")
    arguments, world = common.one_gpu(parser)
    if arguments.self_check:
        return self_check(world)
    if not importlib.util.find_spec(PACKAGE):
        print(f"error: {PACKAGE} isn't installed for {sys.executable}. Try its repository's setup.py", file=sys.stderr)
        return common.CANT_BE_DONE
    with common.open_lines(arguments.jsonl) as file:
        for batch, keys in arguments.steps:
            step = Step(batch, keys, arguments.rows, arguments.heads)
            found = measure(world, step, arguments.seed)
            print(json.dumps(line(world, step, found)), file=file, flush=True)
            told = found.get("error") or f"{found['us']['median']:.1f} us"
            print(f"# {PACKAGE}, {batch} x {keys}, {arguments.rows} rows of {arguments.heads} heads: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
