#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far a kernel's sums drift over long contexts. With Q = 0 every key weighs the same, so each output is a plain mean
of V, known exactly in fp64; V > 0, so that a bias can't cancel.

    bench/peers/long_sum.py --seq 16k,128k,1m,2m --jsonl results.jsonl
    bench/peers/long_sum.py --seq 2m --heads 8 --kv-heads 1 --dtype fp16 --ringattn build/release/bin/ringattn   # ours too

V is uniform in (0, 1), times a factor between 1 and 2 that differs from column to column: means spread over the output
type's grid, its rounding averages out over thousands of columns, and what is left is the bias of the sum. --dtype fp16
shows smaller ones. A line's `accuracy`: `bias`, the mean of (out - exact) / exact over all outputs; `worst_column`, the
largest such mean of a column, its rounding included; `largest`, the largest single one.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
from typing import Any

import common
import sdpa

FILE_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
BLOCK_TOKENS = 1 << 18  # tokens that are made, or summed in fp64, at a time


def make_values(world: common.World, shape: common.Shape, seed: int) -> Any:
    """[1, kv_heads, tokens, dim], tokens outermost in memory."""
    torch = world.torch
    columns = shape.kv_heads * shape.head_dim
    scale = 1 + torch.arange(columns, device=world.device, dtype=torch.float32) / columns
    dtype = common.dtype_of(torch, shape.dtype)
    values = torch.empty(1, shape.seq, shape.kv_heads, shape.head_dim, device=world.device, dtype=dtype)
    generator = torch.Generator(device=world.device).manual_seed(seed)
    for begin in range(0, shape.seq, BLOCK_TOKENS):
        rows = min(BLOCK_TOKENS, shape.seq - begin)
        uniform = torch.rand(rows, columns, device=world.device, generator=generator)
        values[0, begin : begin + rows] = (uniform * scale).view(rows, shape.kv_heads, shape.head_dim).to(values.dtype)
    return values.transpose(1, 2)


def exact_means(values: Any) -> Any:
    """[kv_heads, dim] in fp64."""
    total = 0
    for piece in values[0].split(BLOCK_TOKENS, dim=1):
        total = total + piece.double().sum(1)
    return total / values.shape[2]


def accuracy_of(out: Any, means: Any) -> dict[str, float]:
    """`out`: [1, heads, rows, dim]; a K/V head's means stand for all of its query heads."""
    kv_heads, dim = means.shape
    grouped = out.double().reshape(kv_heads, -1, dim)
    relative = grouped / means.unsqueeze(1) - 1
    return {
        "bias": float(relative.mean()),
        "worst_column": float(relative.mean(1).abs().max()),
        "largest": float(relative.abs().max()),
    }


def make_inputs(world: common.World, shape: common.Shape, rows: int, seed: int) -> tuple[Any, Any, Any]:
    torch = world.torch
    values = make_values(world, shape, seed)
    keys = torch.zeros_like(values).normal_()  # anything: the queries are zero
    dtype = common.dtype_of(torch, shape.dtype)
    queries = torch.zeros(1, rows, shape.heads, shape.head_dim, device=world.device, dtype=dtype).transpose(1, 2)
    return queries, keys, values


def run(world: common.World, backend: str, shape: common.Shape, rows: int, seed: int) -> dict[str, float]:
    queries, keys, values = make_inputs(world, shape, rows, seed)
    out = sdpa.attention(world.torch, backend, queries, keys, values, causal=False)
    return accuracy_of(out, exact_means(values))


def run_ours(world: common.World, program: str, shape: common.Shape, rows: int, seed: int) -> tuple[dict[str, float], str]:
    """The same through files, with ringattn; the accuracy and the kernel's name."""
    torch = world.torch
    queries, keys, values = make_inputs(world, shape, rows, seed)
    with tempfile.TemporaryDirectory() as folder:
        path, result, report = (os.path.join(folder, name) for name in ("in", "out", "report"))
        write_safetensors(path, shape.dtype, {"q": queries, "k": keys, "v": values})
        del queries, keys
        command = [program, "run", "--input", path, "--output", result, "--json", report, "--mask", "full", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        with open(report, encoding="utf-8") as file:
            kernel = json.load(file)["kernel"]
        out = read_out(torch, result, shape, rows)
    return accuracy_of(out.to(world.device), exact_means(values)), kernel


def write_safetensors(path: str, dtype: str, tensors: dict[str, Any]) -> None:
    """[1, heads, tokens, dim] each, written as [tokens, heads, dim]."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = [tensor.shape[2], tensor.shape[1], tensor.shape[3]]
        header[name] = {"dtype": FILE_DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for piece in tensor[0].transpose(0, 1).split(BLOCK_TOKENS):
                rows = piece.contiguous().cpu()
                file.write(ctypes.string_at(rows.data_ptr(), rows.numel() * rows.element_size()))


def read_out(torch: Any, path: str, shape: common.Shape, rows: int) -> Any:
    """ringattn's `out` as [1, heads, rows, dim]."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))["out"]["data_offsets"]
        file.seek(8 + length + begin)
        data = bytearray(file.read(end - begin))
    flat = torch.frombuffer(data, dtype=common.dtype_of(torch, shape.dtype))
    return flat.view(rows, shape.heads, shape.head_dim).transpose(0, 1).unsqueeze(0)


def self_check(world: common.World) -> int:
    shape = common.Shape(3000, 1, 8, 2, 64, 64, "fp32", "full")
    found = run(world, "math", shape, 16, 1)
    good = common.judge(world, "plain mean of 3,000 keys in fp32", found["largest"], "fp32")
    # The figure can see a bias: outputs one part in a thousand too small.
    means = exact_means(make_values(world, shape, 1))
    shown = accuracy_of((means * 0.999).repeat_interleave(4, 0).view(1, 8, 1, 64), means)["bias"]
    good &= common.judge(world, "a bias of a thousandth is seen", abs(shown + 1e-3), "fp32")
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    common.add_job_flags(parser, "16k,128k,1m,2m")
    parser.add_argument("--rows", type=int, default=1024, help="queries; enough that no kernel splits the keys (default: 1024)")
    parser.add_argument("--kernels", default="cudnn,flash_attention_2", help="of %(default)s,math; or none")
    parser.add_argument("--ringattn", metavar="PROGRAM", help="measure it too, through files in TMPDIR")
    arguments = parser.parse_args()
    arguments.batch, arguments.mask = 1, "full"
    torch = common.import_torch(arguments.self_check)
    world = common.World(torch, wanted=False)
    torch.set_grad_enabled(False)
    if arguments.self_check:
        return self_check(world)
    kernels = [name for name in arguments.kernels.split(",") if name != "none"]
    with common.open_lines(arguments.jsonl) as file:
        for kernel in [*kernels, *(["ringattn"] if arguments.ringattn else [])]:
            for shape in common.shapes(arguments):
                tool = "long sum"
                try:
                    if kernel == "ringattn":
                        tool = "ringattn"
                        accuracy, name = run_ours(world, arguments.ringattn, shape, arguments.rows, arguments.seed)
                    else:
                        accuracy, name = run(world, kernel, shape, arguments.rows, arguments.seed), kernel
                    found: dict[str, Any] = {"accuracy": accuracy}
                    print(f"# {name}, {shape.seq} keys: {accuracy}", file=sys.stderr)
                except RuntimeError as error:
                    name, found = kernel, {"error": common.reason(error)}
                line = common.line(world, tool, "self", name, shape, measured="bias of a long sum", rows=arguments.rows, **found)
                common.write(world, file, line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
