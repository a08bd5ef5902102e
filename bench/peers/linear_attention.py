#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Linear attention and the gated delta rule by flash-linear-attention's Triton kernels on one GPU.

    bench/peers/linear_attention.py --shapes gla-4k,gdn-16-64-32k --jsonl results.jsonl
    bench/peers/linear_attention.py --self-check

The shapes are those of bench/ssm_gpu.cpp and bench/gated_delta_gpu.cpp, by the same names. A line's time is that of the whole
op, replayed as a CUDA graph as in ssm.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import ssm

DIM = 128


@dataclass(frozen=True)
class Shape:
    name: str
    op: str  # lightning, token-decay, gla, gdn, kda
    tokens: int
    heads: int  # of v
    key_heads: int
    sequences: int = 1

    @property
    def schema(self) -> str:
        return "ringattn.gated_delta/1" if self.op in ("gdn", "kda") else "ringattn.ssm/1"


SHAPES = [
    Shape("lightning-4k", "lightning", 4 << 10, 64, 64),
    Shape("token-decay-4k", "token-decay", 4 << 10, 64, 64),
    Shape("token-decay-32k", "token-decay", 32 << 10, 64, 64),
    Shape("gla-4k", "gla", 4 << 10, 64, 64),
    Shape("gla-32k", "gla", 32 << 10, 64, 64),
    Shape("gdn-16-64-32k", "gdn", 32 << 10, 64, 16),
    Shape("gdn-16-64-8k", "gdn", 8 << 10, 64, 16),
    Shape("gdn-2-8-32k", "gdn", 32 << 10, 8, 2),
    Shape("kda-64-8k", "kda", 8 << 10, 64, 64),
]
MODULES = {
    "lightning": ("simple_gla", "chunk_simple_gla"),
    "token-decay": ("simple_gla", "chunk_simple_gla"),
    "gla": ("gla", "chunk_gla"),
    "gdn": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("kda", "chunk_kda"),
}


def parse_shapes(text: str) -> list[Shape]:
    known = {shape.name: shape for shape in SHAPES}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f'"{unknown[0]}" is none of {", ".join(known)}')
    return [shape for shape in SHAPES if shape.name in text.split(",")]


def inputs(world: common.World, shape: Shape, seed: int) -> dict[str, Any]:
    torch = world.torch
    generator = torch.Generator(device=world.device).manual_seed(seed)

    def rows(heads: int, *dims: int, dtype: Any = torch.bfloat16) -> Any:
        size = (shape.sequences, shape.tokens, heads, *dims)
        return torch.empty(size, device=world.device, dtype=dtype).uniform_(-1, 1, generator=generator)

    given = {"q": rows(shape.key_heads, DIM), "k": rows(shape.key_heads, DIM), "v": rows(shape.heads, DIM)}
    if shape.op == "lightning":
        given["g_gamma"] = -torch.linspace(0.01, 1, shape.heads, device=world.device)
        return given
    dims = (DIM,) if shape.op in ("gla", "kda") else ()
    given["g"] = (rows(shape.heads, *dims, dtype=torch.float32) - 1) / 20  # -0.1 to 0
    if shape.op in ("gdn", "kda"):
        given["beta"] = (rows(shape.heads, dtype=torch.float32) + 1) / 2
        given["use_qk_l2norm_in_kernel"] = True
    return given


def work_of(shape: Shape, given: dict[str, Any]) -> Callable[[], Any]:
    module, name = MODULES[shape.op]
    chunk = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    return lambda: chunk(**given)[0]


def plain(torch: Any, shape: Shape, given: dict[str, Any]) -> Any:
    """By the definition, token by token in fp64, from zero: out [sequences, tokens, heads, DIM]."""
    q, k, v = (given[name].double().repeat_interleave(shape.heads // given[name].shape[2], 2) for name in "qkv")
    if "use_qk_l2norm_in_kernel" in given:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = given["g"].double() if "g" in given else given["g_gamma"].double().expand(v.shape[:3])
    decay = torch.exp(g if g.dim() == 4 else g[..., None])
    state = torch.zeros(shape.sequences, shape.heads, DIM, DIM, dtype=torch.float64, device=v.device)
    out = torch.empty_like(v)
    for t in range(shape.tokens):
        state = state * decay[:, t, ..., None]
        u = v[:, t]
        if "beta" in given:
            u = given["beta"][:, t, :, None].double() * (u - (k[:, t, ..., None] * state).sum(-2))
        state = state + k[:, t, ..., None] * u[..., None, :]
        out[:, t] = (q[:, t, ..., None] * state).sum(-2) * DIM**-0.5
    return out


def measure(world: common.World, shape: Shape, seed: int) -> dict[str, Any]:
    """The measured members of a line; of a peer that can't do it, why."""
    try:
        work = work_of(shape, inputs(world, shape, seed))
        times = common.measure(world, ssm.captured(world.torch, work), None)
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"samples": 0, "ms": None, "error": common.reason(error)}
    found = {"samples": len(times), "ms": common.quantile(times, 0.5)}
    return found | {"p10_ms": common.quantile(times, 0.1), "p90_ms": common.quantile(times, 0.9)}


def self_check(world: common.World) -> int:
    """At 300 tokens of few heads."""
    good = True
    for op in MODULES:
        shape = Shape(op, op, 300, 4, 2 if op == "gdn" else 4, 2)
        given = inputs(world, shape, 1)
        wanted = plain(world.torch, shape, given)
        try:
            found = work_of(shape, given)().double()
        except (ImportError, RuntimeError) as error:
            print(f"{op}: not checked ({common.reason(error)})")
            continue
        good &= common.judge(world, op, float((found - wanted).abs().max() / wanted.abs().max()), "bf16")
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    everything = ",".join(shape.name for shape in SHAPES)
    parser.add_argument("--shapes", metavar="LIST", type=parse_shapes, default=everything, help="[all: %(default)s]")
    arguments, world = common.one_gpu(parser)
    if arguments.self_check:
        return self_check(world)
    with common.open_lines(arguments.jsonl) as file:
        for shape in arguments.shapes:
            found = measure(world, shape, arguments.seed)
            line = ssm.line(world, shape, "fla", MODULES[shape.op][1], found) | {"schema": shape.schema}
            print(json.dumps(line), file=file, flush=True)
            print(f"# {shape.name}: {found.get('error') or found['ms']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
