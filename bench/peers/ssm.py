#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Scans, their updates and the convolution in front of them by others, on one GPU: mamba_ssm's Triton kernels, its CUDA kernel
of the selective scan and causal_conv1d where they are installed, and PyTorch's own convolution.

    bench/peers/ssm.py --shapes ssd-16k,ssd-131k,update-128 --jsonl results.jsonl
    bench/peers/ssm.py --self-check

The shapes are those of bench/ssm_gpu.cpp, by the same names. A line's time is that of the whole op, replayed as a CUDA graph,
so that it is the device's alone: from Python, a decode step takes the host longer than the device. A kernel that reads
out of bounds ends the process's use of the device, so the longest shape comes last.
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

SCHEMA = "ringattn.ssm/1"
CHUNK = 256  # of mamba_ssm's layers


@dataclass(frozen=True)
class Shape:
    """`tokens` of each sequence; a convolution's channels are the dims of one head."""

    name: str
    kind: str  # ssd, selective, update, selective-update, conv1d
    sequences: int
    tokens: int
    heads: int = 80
    head_dim: int = 64
    state_dim: int = 128
    gate: bool = False

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @property
    def bytes(self) -> int:
        """That have to be moved at least: 16-bit rows, and of an update the states, in fp32."""
        x = self.rows * self.heads * self.head_dim
        if self.kind == "conv1d":
            return 4 * x
        rows = x * (3 if self.gate else 2) + self.rows * self.heads + 2 * self.rows * self.state_dim
        states = 2 * x * self.state_dim if "update" in self.kind else 0
        return 2 * rows + 4 * states


SHAPES = [
    Shape("ssd-16k", "ssd", 1, 16 << 10),
    Shape("ssd-8x2k", "ssd", 8, 2 << 10),
    Shape("ssd-131k", "ssd", 1, 128 << 10),
    Shape("ssd-gated-131k", "ssd", 1, 128 << 10, gate=True),
    Shape("selective-131k", "selective", 1, 128 << 10, heads=5120, head_dim=1, state_dim=16, gate=True),
    Shape("update-128", "update", 128, 1),
    Shape("selective-update-128", "selective-update", 128, 1, heads=5120, head_dim=1, state_dim=16, gate=True),
    Shape("conv1d-131k", "conv1d", 1, 128 << 10, heads=1, head_dim=8448),
    Shape("ssd-2m", "ssd", 1, 2 << 20),
]


def parse_shapes(text: str) -> list[Shape]:
    known = {shape.name: shape for shape in SHAPES}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f'"{unknown[0]}" is none of {", ".join(known)}')
    return [shape for shape in SHAPES if shape.name in text.split(",")]


class Numbers:
    """Random numbers of a shape: rows as projections leave them, what heads have as bench/ssm_gpu.cpp has it."""

    def __init__(self, world: common.World, shape: Shape, dtype: Any, seed: int) -> None:
        self.torch, self.device, self.dtype = world.torch, world.device, dtype
        self.generator = world.torch.Generator(device=world.device).manual_seed(seed)
        self.shape = shape

    def rows(self, *dims: int) -> Any:
        return self.torch.empty(*dims, device=self.device, dtype=self.dtype).normal_(generator=self.generator)

    def uniform(self, least: float, most: float, *dims: int) -> Any:
        return self.torch.empty(*dims, device=self.device).uniform_(least, most, generator=self.generator)


Work = tuple[Callable[[], Any], dict[str, Any]]  # enqueues the op and hands out y; its input, for the check


def ssd(numbers: Numbers) -> Work:
    shape = numbers.shape
    scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    batch = (shape.sequences, shape.tokens)
    given = {
        "x": numbers.rows(*batch, shape.heads, shape.head_dim),
        "dt": numbers.rows(*batch, shape.heads),
        "B": numbers.rows(*batch, 1, shape.state_dim),
        "C": numbers.rows(*batch, 1, shape.state_dim),
        "A": numbers.uniform(-4.0, -0.5, shape.heads),
        "D": numbers.uniform(-1.0, 1.0, shape.heads),
        "dt_bias": numbers.uniform(-4.0, -2.0, shape.heads),
    }
    if shape.gate:
        given["z"] = numbers.rows(*batch, shape.heads, shape.head_dim)
    return lambda: scan(chunk_size=CHUNK, dt_softplus=True, **given), given


def selective(numbers: Numbers) -> Work:
    shape = numbers.shape
    interface = importlib.import_module("mamba_ssm.ops.selective_scan_interface")
    if interface.selective_scan_cuda is None:
        raise ImportError("mamba_ssm was installed without its CUDA extension, which alone has the selective scan")
    # Tokens last, as it has them.
    given = {
        "u": numbers.rows(shape.sequences, shape.heads, shape.tokens),
        "delta": numbers.rows(shape.sequences, shape.heads, shape.tokens),
        "B": numbers.rows(shape.sequences, 1, shape.state_dim, shape.tokens),
        "C": numbers.rows(shape.sequences, 1, shape.state_dim, shape.tokens),
        "z": numbers.rows(shape.sequences, shape.heads, shape.tokens),
        "A": numbers.uniform(-4.0, -0.5, shape.heads, shape.state_dim),
        "D": numbers.uniform(-1.0, 1.0, shape.heads),
        "delta_bias": numbers.uniform(-4.0, -2.0, shape.heads),
    }
    return lambda: interface.selective_scan_fn(delta_softplus=True, **given), given


def update(numbers: Numbers) -> Work:
    shape = numbers.shape
    step = importlib.import_module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
    count, heads, dim, state = shape.sequences, shape.heads, shape.head_dim, shape.state_dim
    zeros = numbers.torch.zeros
    if shape.kind == "selective-update":  # channels, without heads
        given = {
            "state": zeros(count, heads, state, device=numbers.device),
            "x": numbers.rows(count, heads),
            "dt": numbers.rows(count, heads),
            "A": numbers.uniform(-4.0, -0.5, heads, state),
            "B": numbers.rows(count, state),
            "C": numbers.rows(count, state),
            "D": numbers.uniform(-1.0, 1.0, heads),
            "z": numbers.rows(count, heads),
            "dt_bias": numbers.uniform(-4.0, -2.0, heads),
        }
    else:  # one number a head, told by strides of 0
        given = {
            "state": zeros(count, heads, dim, state, device=numbers.device),
            "x": numbers.rows(count, heads, dim),
            "dt": numbers.rows(count, heads, 1).expand(-1, -1, dim),
            "A": numbers.uniform(-4.0, -0.5, heads, 1, 1).expand(-1, dim, state),
            "B": numbers.rows(count, 1, state),
            "C": numbers.rows(count, 1, state),
            "D": numbers.uniform(-1.0, 1.0, heads, 1).expand(-1, dim),
            "dt_bias": numbers.uniform(-4.0, -2.0, heads, 1).expand(-1, dim),
        }
    return lambda: step(dt_softplus=True, **given), given


def conv1d_input(numbers: Numbers) -> dict[str, Any]:
    shape = numbers.shape
    channels = shape.head_dim
    return {
        "x": numbers.rows(shape.sequences, shape.tokens, channels).transpose(1, 2),  # channels beside each other
        "weight": numbers.uniform(-1.0, 1.0, channels, 4).to(numbers.dtype),
        "bias": numbers.uniform(-1.0, 1.0, channels).to(numbers.dtype),
    }


def causal_conv1d(numbers: Numbers) -> Work:
    run_conv1d = importlib.import_module("causal_conv1d").causal_conv1d_fn
    given = conv1d_input(numbers)
    return lambda: run_conv1d(activation="silu", **given), given


def torch_conv1d(numbers: Numbers) -> Work:
    """As mamba_ssm has it without causal_conv1d: padded on both sides, and cut."""
    given = conv1d_input(numbers)
    functional, tokens = numbers.torch.nn.functional, numbers.shape.tokens
    channels = numbers.shape.head_dim
    weight = given["weight"].unsqueeze(1)

    def run_conv1d() -> Any:
        y = functional.conv1d(given["x"], weight, given["bias"], padding=3, groups=channels)
        return functional.silu(y[..., :tokens])

    return run_conv1d, given


PEERS: dict[str, list[tuple[str, str, Callable[[Numbers], Work]]]] = {
    "ssd": [("mamba_ssm", "triton", ssd)],
    "selective": [("mamba_ssm", "cuda", selective)],
    "update": [("mamba_ssm", "triton", update)],
    "selective-update": [("mamba_ssm", "triton", update)],
    "conv1d": [("causal_conv1d", "cuda", causal_conv1d), ("pytorch", "conv1d and silu", torch_conv1d)],
}


def version_of(tool: str, torch: Any) -> str:
    if tool == "pytorch":
        return str(torch.__version__)
    try:
        return str(importlib.import_module(tool).__version__)
    except (ImportError, AttributeError):
        return "none"


def captured(torch: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    """Replays it as a graph; what is compiled or chosen at first is done before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay


def measure(world: common.World, shape: Shape, make: Callable[[Numbers], Work], seed: int) -> dict[str, Any]:
    """The measured members of a line; of a peer that can't do it, why."""
    try:
        work, _ = make(Numbers(world, shape, world.torch.bfloat16, seed))
        times = common.measure(world, captured(world.torch, work), None)
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return {"samples": 0, "ms": None, "error": common.reason(error)}
    median = common.quantile(times, 0.5)
    return {"samples": len(times), "ms": median, "bytes": shape.bytes, "gb_per_s": shape.bytes / median * 1e-6}


def line(world: common.World, shape: Shape, tool: str, kernel: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "tool": {"name": tool, "version": version_of(tool, world.torch)},
        "argv": sys.argv,
        "git": common.git_revision(),
        "devices": world.devices(),
        "kernel": kernel,
        "shape": shape.name,
        "sequences": shape.sequences,
        "tokens": shape.tokens,
        **found,
    }


def plain(torch: Any, shape: Shape, given: dict[str, Any]) -> Any:
    """By the definition, token by token in fp64, from zero: y [sequences, tokens, heads, head_dim] or, of a convolution,
    [sequences, channels, tokens]."""
    wide = {name: tensor.double() for name, tensor in given.items()}
    if shape.kind == "conv1d":
        padded = torch.nn.functional.pad(wide["x"], (3, 0))
        y = wide["bias"][:, None] + sum(wide["weight"][:, k, None] * padded[..., k : k + shape.tokens] for k in range(4))
        return y * torch.sigmoid(y)
    dims = (shape.sequences, shape.tokens, shape.heads, shape.head_dim)
    channels = shape.kind.startswith("selective")
    rows = {name: wide[name] for name in ("u", "x", "delta", "dt", "B", "C", "z") if name in wide}
    if shape.kind == "selective":
        rows = {name: tensor.movedim(-1, 1) for name, tensor in rows.items()}
    x, z = rows.get("x", rows.get("u")).reshape(dims), rows.get("z")
    dt = rows.get("dt", rows.get("delta")).reshape(*dims[:3], -1)[..., :1]
    b, c = (rows[name].reshape(*dims[:2], 1, 1, shape.state_dim) for name in ("B", "C"))
    bias = wide.get("dt_bias", wide.get("delta_bias")).reshape(shape.heads, -1)[:, :1]
    a = wide["A"].reshape(shape.heads, 1, -1) if channels else wide["A"].reshape(shape.heads, -1)[:, :1].unsqueeze(2)
    dt = torch.nn.functional.softplus(dt + bias)
    state = torch.zeros(shape.sequences, shape.heads, shape.head_dim, shape.state_dim, dtype=torch.float64, device=x.device)
    y = torch.empty_like(x)
    for t in range(shape.tokens):
        state = state * torch.exp(dt[:, t, ..., None] * a) + (dt[:, t] * x[:, t])[..., None] * b[:, t]
        y[:, t] = (state * c[:, t]).sum(-1) + wide["D"].reshape(shape.heads, -1)[:, :1] * x[:, t]
    return y if z is None else y * torch.nn.functional.silu(z.reshape(dims))


def self_check(world: common.World) -> int:
    """At 2,048 tokens of few heads; peers that aren't installed are named."""
    torch, good = world.torch, True
    for kind, peers in PEERS.items():
        single = "update" in kind
        channels = kind.startswith("selective")
        small = {"heads": 8, "head_dim": 1 if channels else 16, "state_dim": 16, "gate": channels}
        if kind == "conv1d":
            small = {"heads": 1, "head_dim": 24}
        shape = Shape(kind, kind, 3, 1 if single else 2048, **small)
        dtype = "bf16" if world.on_gpu else "fp32"
        for tool, kernel, make in peers:
            try:
                work, given = make(Numbers(world, shape, common.dtype_of(torch, dtype), 1))
                given = {name: tensor.clone() for name, tensor in given.items()}
                found = work().double()
            except (ImportError, RuntimeError) as error:
                print(f"{kind}, {tool}: not checked ({common.reason(error)})")
                continue
            wanted = plain(torch, shape, given)
            if kind == "selective":
                found = found.movedim(-1, 1)
            error = float((found.reshape(wanted.shape) - wanted).abs().max() / wanted.abs().max())
            good &= common.judge(world, f"{kind}, {tool} {kernel}", error, dtype)
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
            for tool, kernel, make in PEERS[shape.kind]:
                found = measure(world, shape, make, arguments.seed)
                print(json.dumps(line(world, shape, tool, kernel, found)), file=file, flush=True)
                told = found.get("error") or f"{found['ms']:.3f} ms"
                print(f"# {shape.name}, {tool} {kernel}: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
