#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""backward() of ringattn.attention, of PyTorch's scaled_dot_product_attention with cuDNN's kernel and with FlashAttention-2, and
of FlashAttention-3 where its Python package (flash_attn_interface) is installed, on one GPU.

    export RINGATTN_LIBRARY=build/release/lib/libringattn_c.so PYTHONPATH=python
    bench/peers/attention_backward.py turn --jsonl results.jsonl
    bench/peers/attention_backward.py turn --shapes 1x16kx32/32x64,1x8kx128/128x192/128
    bench/peers/attention_backward.py repeat --shapes 2x2kx32/8x128 --runs 1000
    bench/peers/attention_backward.py bias --shapes 1x1mx8/8x128:full --dtype fp16
    bench/peers/attention_backward.py --self-check

A shape is SEQUENCESxTOKENSxHEADS/KV_HEADSxHEAD_DIM, with /HEAD_DIM_V if it differs, and causal unless :full follows.

turn: the time of backward() alone. The kernels take turns, in rounds, and a line has the median of all repeats of one. FLOPs
count 2.5 times those of the forward, as other projects do. A kernel that refuses a shape says why in its line.

repeat: the same gradients over and over, while the GPU has other work on a second stream, and between repetitions writes more
than its L2 cache. The memory that gradients get is full of NaN. A line has the number of repetitions whose dQ, dK or dV
differ from the first in any bit.

bias: how far sums over many queries drift. With Q = 0 every query gives its few keys the same weight, so dV is a plain mean of
dO times a power of two, known exactly in fp64. dO > 0, so that a bias can't cancel, and its columns have different factors,
so that the rounding of dV averages out (long_sum.py has the figures). --dtype fp16 shows smaller ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable
from typing import Any

import common
import long_sum
import sdpa

SCHEMA = "ringattn.backward/1"
OURS = "ringattn"
SHAPES = {
    "turn": "2x8kx32/8x128,1x16kx32/8x128,1x32kx32/8x128,4x4kx16/2x128,2x8kx16/2x128,1x8kx32/8x128:full,1x16kx32/32x64,"
    "1x8kx128/128x192/128,1x16kx16/4x256",
    "repeat": "2x2kx32/8x128,1x4kx16/2x128,1x3000x8/8x64,1x2kx16/16x192/128",
    "bias": "1x1mx8/8x128:full",
}
ROUNDS = 5
WARM_MS = 100.0  # of each kernel and shape, so that a clock that rose in a pause has fallen again
ROUND_MS = 50.0  # of each kernel in a round, at least
FAR_BEYOND_CACHE = 256 << 20  # bytes, several times the L2 cache of any GPU
BIAS_KEYS = 64  # a power of two, so that weights are exact in 16 bits


def parse_shape(text: str, dtype: str) -> common.Shape:
    found = re.fullmatch(r"(\d+)x(\w+)x(\d+)/(\d+)x(\d+)(?:/(\d+))?(:full)?", text)
    numbers = [int(number) for number in (found.groups(default="1")[i] for i in (0, 2, 3, 4, 5))] if found else [0]
    if min(numbers) < 1 or numbers[1] % numbers[2]:
        examples = "2x8kx32/8x128, 1x8kx128/128x192/128 or 1x8kx32/8x128:full"
        raise argparse.ArgumentTypeError(f'"{text}" is no shape such as {examples}')
    batch, heads, kv_heads, head_dim, _ = numbers
    mask = "full" if found[7] else "causal"
    return common.Shape(common.parse_size(found[2]), batch, heads, kv_heads, head_dim, int(found[6] or head_dim), dtype, mask)


def flops(shape: common.Shape) -> float:
    return 2.5 * shape.flops()


def import_ours() -> Any:
    """ringattn, or None with the reason on stderr."""
    try:
        import ringattn
    except (ImportError, OSError) as error:
        print(f"# {OURS}: skipped ({common.reason(error)}). Set PYTHONPATH and RINGATTN_LIBRARY.", file=sys.stderr)
        return None
    return ringattn


def chosen_kernels(names: str) -> list[str]:
    kernels = names.split(",")
    for kernel in kernels:
        if kernel not in (OURS, *sdpa.BACKENDS, sdpa.FLASH_ATTENTION_3):
            raise argparse.ArgumentTypeError(f"{kernel} is none of {', '.join([OURS, *sdpa.BACKENDS, sdpa.FLASH_ATTENTION_3])}")
    if sdpa.FLASH_ATTENTION_3 in kernels and not sdpa.has_flash_attention_3():
        kernels.remove(sdpa.FLASH_ATTENTION_3)
        print(f"# {sdpa.FLASH_ATTENTION_3}: skipped (flash_attn_interface isn't installed for {sys.executable})", file=sys.stderr)
    if OURS in kernels and import_ours() is None:
        kernels.remove(OURS)
    return kernels


class Layer:
    """A forward pass that was recorded, so that its gradients can be computed again and again. All tensors are [batch, heads,
    tokens, dim], and lie as [batch, tokens, heads, dim]."""

    def __init__(self, world: common.World, kernel: str, causal: bool, q: Any, k: Any, v: Any, dout: Any) -> None:
        self.torch = world.torch
        self.inputs = [rows.detach().requires_grad_() for rows in (q, k, v)]
        self.dout = dout
        with self.torch.enable_grad():
            self.out = self._forward(kernel, causal)

    def _forward(self, kernel: str, causal: bool) -> Any:
        if kernel != OURS:
            return sdpa.attention(self.torch, kernel, *self.inputs, causal)
        import ringattn

        rows = (tensor.transpose(1, 2) for tensor in self.inputs)
        return ringattn.attention(*rows, mask="causal" if causal else "full")[0].transpose(1, 2)

    def backward(self) -> tuple[Any, Any, Any]:
        """dQ, dK, dV"""
        return self.torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


def make_inputs(world: common.World, shape: common.Shape, seed: int) -> tuple[Any, Any, Any, Any]:
    """q, k, v and dout."""
    dout = common.random_rows(world, shape, shape.seq, shape.heads, shape.head_dim_v, seed + 3)
    return *sdpa.inputs(world, shape, seed), dout


def line(world: common.World, kernel: str, shape: common.Shape, measured: str, **found: Any) -> dict[str, Any]:
    tool = {"name": "pytorch sdpa", "version": world.torch.__version__}
    if kernel == OURS:
        import ringattn

        tool = {"name": OURS, "version": getattr(ringattn, "__version__", "unknown")}
    elif kernel == sdpa.FLASH_ATTENTION_3:
        tool = {"name": kernel, "version": sdpa.flash_attention_3_version()}
    members = common.line(world, "", "self", "" if tool["name"] == kernel else kernel, shape, **found)
    return members | {"schema": SCHEMA, "tool": tool, "measured": measured}


def refused(world: common.World, error: BaseException) -> dict[str, str]:
    """What a line says of a kernel that can't do a shape. Memory of the attempt goes back."""
    if world.on_gpu:
        world.torch.cuda.empty_cache()
    return {"error": common.reason(error)}


# ---- turn

def timed(world: common.World, work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each repeat. All are enqueued before the first is waited for."""
    cuda = world.torch.cuda
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def take_turns(world: common.World, shape: common.Shape, kernels: list[str], seed: int) -> dict[str, dict[str, Any]]:
    """What a line of each kernel says."""
    inputs = make_inputs(world, shape, seed)
    found: dict[str, dict[str, Any]] = {}
    layers, repeats = {}, {}
    samples: dict[str, list[float]] = {}
    for kernel in kernels:
        try:
            layer = Layer(world, kernel, shape.causal, *inputs)
            timed(world, layer.backward, 1)  # loads and plans
            estimate = max(timed(world, layer.backward, 2))
            timed(world, layer.backward, max(1, int(WARM_MS / estimate)))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            found[kernel] = refused(world, error)
            continue
        layers[kernel], samples[kernel] = layer, []
        repeats[kernel] = max(2, int(ROUND_MS / estimate))
    for _ in range(ROUNDS):
        for kernel, layer in layers.items():
            samples[kernel] += timed(world, layer.backward, repeats[kernel])
    for kernel, times in samples.items():
        found[kernel] = common.timed(world, shape, times, 0) | {"memory_peak_bytes": None}
        found[kernel]["tflops_per_rank"] = flops(shape) / found[kernel]["ms"]["median"] * 1e-9
    return found


def measure_turns(world: common.World, file: Any, shapes: list[common.Shape], kernels: list[str], seed: int) -> None:
    for shape in shapes:
        found = take_turns(world, shape, kernels, seed)
        for kernel in kernels:
            common.write(world, file, line(world, kernel, shape, "backward, in turn", **found[kernel]))


# ---- repeat

def bits(torch: Any, rows: Any) -> Any:
    return rows.view(torch.int16 if rows.element_size() == 2 else torch.int32)


def digest(torch: Any, rows: Any) -> str:
    return hashlib.sha256(bits(torch, rows.contiguous()).cpu().numpy().tobytes()).hexdigest()[:16]


class OtherWork:
    """What shares the GPU with the gradients: GEMMs of changing sizes on a second stream, and writes beyond the L2 cache."""

    def __init__(self, world: common.World) -> None:
        self.torch = torch = world.torch
        self.on_gpu = world.on_gpu
        size = 2048 if world.on_gpu else 8
        self.matrix = torch.ones(size, size, device=world.device, dtype=torch.bfloat16 if world.on_gpu else torch.float32)
        self.far = torch.empty(FAR_BEYOND_CACHE if world.on_gpu else 1, dtype=torch.uint8, device=world.device)
        self.stream = torch.cuda.Stream() if world.on_gpu else None

    def between(self, nth: int) -> None:
        if nth % 3 == 0:
            self.far.fill_(nth % 251)
        if not self.on_gpu:
            return
        part = self.matrix[: 256 << nth % 4]
        with self.torch.cuda.stream(self.stream):
            part @ self.matrix

    def poison(self, gradients: tuple[Any, ...]) -> None:
        """Memory of these shapes that is free, and full of NaN: the allocator hands it to the next gradients."""
        for rows in gradients:
            self.torch.full_like(rows, float("nan"))


def differing_repeats(
    world: common.World, compute: Callable[[], tuple[Any, ...]], runs: int
) -> tuple[int, dict[str, str]]:
    """How many repeats differ from the first, and the digests of the first."""
    torch = world.torch
    first = [rows.clone() for rows in compute()]
    other = OtherWork(world)
    differ = torch.zeros((), dtype=torch.int64, device=world.device)
    for nth in range(runs):
        other.between(nth)
        other.poison(tuple(first))
        made = compute()
        same = [(bits(torch, a) == bits(torch, b)).all() for a, b in zip(made, first, strict=True)]
        differ += ~torch.stack(same).all()
        del made
    return int(differ), {name: digest(torch, rows) for name, rows in zip(("dq", "dk", "dv"), first, strict=True)}


def measure_repeats(
    world: common.World, file: Any, shapes: list[common.Shape], kernels: list[str], runs: int, seed: int
) -> int:
    """The exit code: 1 if gradients of ringattn differ."""
    differ = 0
    for shape in shapes:
        inputs = make_inputs(world, shape, seed)
        for kernel in kernels:
            try:
                layer = Layer(world, kernel, shape.causal, *inputs)
                count, digests = differing_repeats(world, layer.backward, runs)
                found: dict[str, Any] = {"runs": runs, "runs_that_differ": count, "digests": digests}
                differ += count if kernel == OURS else 0
                print(f"# {kernel}: {count} of {runs} runs differ", file=sys.stderr)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found = refused(world, error)
            common.write(world, file, line(world, kernel, shape, "repeated gradients", **found))
    return 1 if differ else 0


# ---- bias

def bias_of(world: common.World, kernel: str, shape: common.Shape, keys: int, seed: int) -> dict[str, float]:
    torch = world.torch
    # [1, heads, tokens, dim]; each query head's mean, and with GQA the sum over the heads of a group.
    rows = dataclasses.replace(shape, kv_heads=shape.heads, head_dim=shape.head_dim_v)
    dout = long_sum.make_values(world, rows, seed)
    group = shape.heads // shape.kv_heads
    exact = long_sum.exact_means(dout).view(shape.kv_heads, group, -1).sum(1) * (shape.seq / keys)
    dtype = common.dtype_of(torch, shape.dtype)
    q = torch.zeros(1, shape.seq, shape.heads, shape.head_dim, device=world.device, dtype=dtype).transpose(1, 2)
    k = common.random_rows(world, shape, keys, shape.kv_heads, shape.head_dim, seed + 1)
    v = common.random_rows(world, shape, keys, shape.kv_heads, shape.head_dim_v, seed + 2)
    _, _, dv = Layer(world, kernel, False, q, k, v, dout).backward()
    return long_sum.accuracy_of(dv, exact)


def measure_bias(world: common.World, file: Any, shapes: list[common.Shape], kernels: list[str], seed: int) -> None:
    for shape in shapes:
        for kernel in kernels:
            try:
                found: dict[str, Any] = {"keys": BIAS_KEYS, "accuracy": bias_of(world, kernel, shape, BIAS_KEYS, seed)}
                print(f"# {kernel}, {shape.seq} queries: {found['accuracy']}", file=sys.stderr)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found = refused(world, error)
            common.write(world, file, line(world, kernel, shape, "bias of dV", **found))


# ---- self-check

def check_gradients(world: common.World, kernel: str, shape: common.Shape) -> bool:
    torch = world.torch
    *rows, dout = make_inputs(world, shape, 1)
    made = Layer(world, kernel, shape.causal, *rows, dout).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in rows]
    with torch.enable_grad():
        out = common.plain_attention(torch, *exact, shape.causal)
    expected = torch.autograd.grad(out, exact, dout.double())
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(made, expected, strict=True))
    return common.judge(world, f"gradients of {kernel}, {shape.mask}", error, shape.dtype)


def self_check(world: common.World) -> int:
    dtype = "bf16" if world.on_gpu else "fp32"
    kernels = ["cudnn", "flash_attention_2"] if world.on_gpu else ["math"]
    if import_ours() is not None:
        kernels.append(OURS)
    good = True
    for kernel in kernels:
        for mask in ("causal", "full"):
            good &= check_gradients(world, kernel, common.Shape(320, 2, 8, 2, 64, 64, dtype, mask))
    # The figures can see what they are for: a repeat that differs in one bit, and sums that are too small.
    rows = world.torch.ones(3, 5, device=world.device)
    repeats = iter([rows, rows, rows.nextafter(2 * rows), rows])
    count, _ = differing_repeats(world, lambda: (next(repeats),) * 3, 3)
    good &= common.judge(world, "one of three repeats differs", abs(count - 1), dtype)
    shape = common.Shape(3000, 1, 8, 2, 64, 64, dtype, "full")
    for kernel in kernels:
        good &= common.judge(world, f"dV of {kernel}, a plain sum", abs(bias_of(world, kernel, shape, 8, 1)["bias"]), dtype)
    return 0 if good else 1


def main() -> int:
    parser = common.describe(__doc__)
    parser.add_argument("measurement", nargs="?", choices=[*SHAPES], default="turn", help="(default: turn)")
    parser.add_argument("--shapes", metavar="LIST", help="(default: those of the measurement)")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument(
        "--kernels",
        type=chosen_kernels,
        metavar="LIST",
        default=f"{OURS},cudnn,flash_attention_2,{sdpa.FLASH_ATTENTION_3}",
        help="of %(default)s,math",
    )
    parser.add_argument("--runs", type=common.parse_size, default=1000, help="repetitions of each shape (default: 1000)")
    arguments, world = common.one_gpu(parser)
    if arguments.self_check:
        return self_check(world)
    try:
        texts = arguments.shapes or SHAPES[arguments.measurement]
        shapes = [parse_shape(text, arguments.dtype) for text in texts.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if arguments.measurement == "bias" and any(shape.causal or shape.batch > 1 for shape in shapes):
        parser.error("bias takes one sequence with a full mask, such as 1x1mx8/8x128:full")
    with common.open_lines(arguments.jsonl) as file:
        if arguments.measurement == "turn":
            measure_turns(world, file, shapes, arguments.kernels, arguments.seed)
        elif arguments.measurement == "repeat":
            return measure_repeats(world, file, shapes, arguments.kernels, arguments.runs, arguments.seed)
        else:
            measure_bias(world, file, shapes, arguments.kernels, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
