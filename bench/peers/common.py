# SPDX-License-Identifier: Apache-2.0
"""What the peers share: shapes as ringattn's flags give them, a timer, and lines in ringattn's bench schema.

A line is one point (a shape on a world). Times are CUDA events around each repeat; all repeats are enqueued before
anything is waited for, so the host's work hides behind the device's, as it does in a model.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TextIO

SCHEMA = "ringattn.bench/1"
MIN_SAMPLES = 10
MIN_SECONDS = 0.5
MAX_SAMPLES = 1000
SKIPPED = 77  # ctest's exit code for a test that can't run here
CANT_BE_DONE = 4  # ringattn's exit code for a missing device or library


@dataclass(frozen=True)
class Shape:
    """A job: `batch` sequences of `seq` tokens, queries and keys alike."""

    seq: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    mask: str

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    def flops(self) -> float:
        """The field's convention, whatever is skipped or masked inside tiles: 2 * pairs * heads * (D + DV)."""
        pairs = self.seq * (self.seq + 1) / 2 if self.causal else float(self.seq) ** 2
        return 2.0 * self.batch * pairs * self.heads * (self.head_dim + self.head_dim_v)

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.batch * self.seq, **asdict(self)}


def parse_size(text: str) -> int:
    """4096, 8k, 2m, 1g: k, m, g are powers of 1024."""
    scale = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower())
    try:
        value = int(text[:-1]) * scale if scale else int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no number such as 4096, 8k or 2m')
    return value


def parse_sizes(text: str) -> list[int]:
    """8k,64k or 8k-2m*2 (8k, 16k, ... up to 2m), or both mixed."""
    sizes = []
    for entry in text.split(","):
        if "-" not in entry:
            sizes.append(parse_size(entry))
            continue
        ends, _, factor = entry.partition("*")
        first, last = (parse_size(end) for end in ends.split("-", 1))
        if not factor.isdigit() or int(factor) < 2:
            raise argparse.ArgumentTypeError(f'"{entry}" names no factor of at least 2, as 8k-2m*2 does')
        while first <= last:
            sizes.append(first)
            first *= int(factor)
    return sizes


def add_job_flags(parser: argparse.ArgumentParser, seq: str) -> None:
    job = parser.add_argument_group("job, as ringattn's flags (the defaults are the shape that peers are measured at)")
    job.add_argument("--seq", metavar="LIST", type=parse_sizes, default=seq, help="tokens of each sequence")
    job.add_argument("--batch", type=int, help="sequences; without it as many as make --total-tokens")
    job.add_argument("--total-tokens", metavar="N", type=parse_size, default="16k", help="short sequences are batched up to it")
    job.add_argument("--heads", type=int, default=32, help="query heads")
    job.add_argument("--kv-heads", type=int, default=8, help="K/V heads; they divide the query heads")
    job.add_argument("--head-dim", type=int, default=128)
    job.add_argument("--head-dim-v", type=int, help="dimension of v and out (default: head-dim)")
    job.add_argument("--mask", choices=["full", "causal"], default="causal")
    job.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    run = parser.add_argument_group("measurement")
    run.add_argument("--samples", type=int, help=f"repeats (default: {MIN_SAMPLES}, or {MIN_SECONDS} s if that is longer)")
    run.add_argument("--seed", type=int, default=1, help="of the random input")
    run.add_argument("--jsonl", metavar="FILE", default="-", help="lines are appended to it; - is stdout")
    run.add_argument("--self-check", action="store_true", help="compare with a plain computation at a small size, and stop")


def shapes(arguments: argparse.Namespace) -> list[Shape]:
    result = []
    for seq in arguments.seq:
        batch = arguments.batch or max(1, arguments.total_tokens // seq)
        result.append(
            Shape(
                seq,
                batch,
                arguments.heads,
                arguments.kv_heads,
                arguments.head_dim,
                arguments.head_dim_v or arguments.head_dim,
                arguments.dtype,
                arguments.mask,
            )
        )
    return result


def add_cpu_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Flags of the programs that take turns with PyTorch on CPU cores (on_cpu())."""
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--git", default="unknown", help="commit of the library")
    parser.add_argument("--jsonl")
    parser.add_argument("--self-check", action="store_true", help="only compare the results of a small shape")


def on_cpu(
    args: argparse.Namespace,
    self_check: Callable[[Any, Any], object],
    lines: Callable[[Any, Any], Iterable[dict[str, Any]]],
) -> int:
    """Prints the lines that lines(torch, ringattn) measures, and appends them to --jsonl. Returns the exit code."""
    try:
        import ringattn
        import torch
    except (ImportError, OSError) as error:
        print(f"skipped: needs PyTorch and ringattn ({error})")
        return SKIPPED
    torch.set_num_threads(args.threads)
    if args.self_check:
        self_check(torch, ringattn)
        return 0
    for content in lines(torch, ringattn):
        text = json.dumps(content | {"torch": torch.__version__, "git": args.git, "command": " ".join(sys.argv)})
        print(text, flush=True)
        if args.jsonl:
            with open(args.jsonl, "a") as file:
                file.write(text + "\n")
    return 0


def take_turns(calls: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of wall and of processor time of each call in each round, one call after the other. A call gets the number of its
    round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call(turn)
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return times


def describe(program: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=program, formatter_class=argparse.RawDescriptionHelpFormatter)


def import_torch(self_check: bool) -> Any:
    """torch, or the end of the program with one line that says what is missing."""
    try:
        import torch
    except ImportError as error:
        if self_check:
            print(f"skipped: needs PyTorch ({error})")
            sys.exit(SKIPPED)
        print(f"error: PyTorch isn't installed ({error}). Try pip install torch==2.11.*", file=sys.stderr)
        sys.exit(CANT_BE_DONE)
    if not self_check and not torch.cuda.is_available():
        print("error: no GPU is visible (torch.cuda.is_available() is false). --self-check runs without one.", file=sys.stderr)
        sys.exit(CANT_BE_DONE)
    return torch


class World:
    """The ranks of torchrun (`python3 -m torch.distributed.run --nproc-per-node N`), or one alone."""

    def __init__(self, torch: Any, wanted: bool) -> None:
        self.torch = torch
        self.rank = int(os.environ.get("RANK", "0")) if wanted else 0
        self.size = int(os.environ.get("WORLD_SIZE", "1")) if wanted else 1
        self.on_gpu = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0")) if wanted else 0
        self.device = torch.device("cuda", local) if self.on_gpu else torch.device("cpu")
        self.started = False
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        if wanted and "RANK" in os.environ:
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no NVLink multicast
            if self.on_gpu:
                torch.distributed.init_process_group("nccl", device_id=self.device)
            else:
                torch.distributed.init_process_group("gloo")
            self.started = True

    def barrier(self) -> None:
        """Enqueues a barrier: what is enqueued behind it begins on all ranks at about the same time."""
        if self.started:
            self.torch.distributed.all_reduce(self.torch.zeros(1, device=self.device))

    def max_over_ranks(self, values: list[float]) -> list[float]:
        """Of each value the largest of all ranks."""
        if not self.started:
            return values
        tensor = self.torch.tensor(values, dtype=self.torch.float64, device=self.device)
        self.torch.distributed.all_reduce(tensor, op=self.torch.distributed.ReduceOp.MAX)
        return [float(value) for value in tensor.cpu()]

    def devices(self) -> list[str]:
        name = self.torch.cuda.get_device_name(self.device) if self.on_gpu else "cpu"
        return [name] * self.size

    def close(self) -> None:
        if self.started:
            self.torch.distributed.destroy_process_group()


def one_gpu(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, World]:
    """Adds the words that all programs for one GPU take, and returns what they said and the World to measure in."""
    parser.add_argument("--seed", type=int, default=1, help="of the random input")
    parser.add_argument("--jsonl", metavar="FILE", default="-", help="lines are appended to it; - is stdout")
    parser.add_argument("--self-check", action="store_true", help="compare with a plain computation at a small size, and stop")
    arguments = parser.parse_args()
    torch = import_torch(arguments.self_check)
    torch.set_grad_enabled(False)
    return arguments, World(torch, wanted=False)


def measure(world: World, work: Callable[[], object], samples: int | None) -> list[float]:
    """Milliseconds of each repeat on the rank that was slowest in it."""
    torch = world.torch

    def once() -> float:
        world.barrier()
        if not world.on_gpu:
            begin = time.perf_counter()
            work()
            return (time.perf_counter() - begin) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    first = world.max_over_ranks([once()])[0]
    # The first run loads and plans; a second tells how long one lasts, and more only matter where runs are short.
    estimate = world.max_over_ranks([once()])[0] if first < 5e3 else first
    if estimate < 100:
        for _ in range(3):
            once()
    count = samples or max(MIN_SAMPLES, min(MAX_SAMPLES, math.ceil(MIN_SECONDS * 1e3 / max(estimate, 1e-3))))
    if not world.on_gpu:
        return world.max_over_ranks([once() for _ in range(count)])
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in events:
        world.barrier()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return world.max_over_ranks([begin.elapsed_time(end) for begin, end in events])


def quantile(values: list[float], part: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@functools.cache
def git_revision() -> str:
    """Of the source that measures; BENCH_GIT says it where git can't."""
    if os.environ.get("BENCH_GIT"):
        return os.environ["BENCH_GIT"]
    here = pathlib.Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], cwd=here, capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def line(world: World, tool: str, transport: str, kernel: str, shape: Shape, **more: Any) -> dict[str, Any]:
    """The members that every line has, null where a peer can't know; `more` fills them in or adds to them."""
    return {
        "schema": SCHEMA,
        "tool": {"name": tool, "version": world.torch.__version__},
        "argv": sys.argv,
        "git": git_revision(),
        "host": socket.gethostname(),
        "devices": world.devices(),
        "world": world.size,
        "transport": transport,
        "kernel": kernel,
        "job": shape.as_json(),
        "samples": 0,
        "ms": None,
        "tflops_per_rank": None,
        "exposed_comm_ms": None,
        "estimated_ms": None,
        "memory_peak_bytes": None,
        **more,
    }


def timed(world: World, shape: Shape, samples: list[float], peak_bytes: int) -> dict[str, Any]:
    """The measured members of a line."""
    median = quantile(samples, 0.5)
    return {
        "samples": len(samples),
        "ms": {"median": median, "p10": quantile(samples, 0.1), "p90": quantile(samples, 0.9)},
        "tflops_per_rank": shape.flops() / median / world.size * 1e-9,
        "memory_peak_bytes": peak_bytes,
    }


def measured(world: World, shape: Shape, samples: int | None, work: Callable[[], object]) -> dict[str, Any]:
    """Runs and times `work`; a peer that can't do it says why in the line, and the sweep goes on."""
    torch = world.torch
    if world.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        times = measure(world, work, samples)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"error": reason(error)}
    peak = int(world.max_over_ranks([float(torch.cuda.max_memory_allocated())])[0]) if world.on_gpu else 0
    return timed(world, shape, times, peak)


def reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def open_lines(path: str) -> TextIO:
    return sys.stdout if path == "-" else open(path, "a", encoding="utf-8")


def write(world: World, file: TextIO, content: dict[str, Any]) -> None:
    """One line, from rank 0; on stderr a short form for those who watch."""
    if world.rank != 0:
        return
    print(json.dumps(content), file=file, flush=True)
    job = content["job"]
    told = content.get("error") or (f"{content['tflops_per_rank']:.1f} TFLOP/s" if content["ms"] else "done")
    name = content["kernel"] or content["tool"]["name"]
    print(f"# {name}, {job['batch']} x {job['seq']}, world {content['world']}: {told}", file=sys.stderr)


def dtype_of(torch: Any, name: str) -> Any:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def random_rows(world: World, shape: Shape, tokens: int, heads: int, dim: int, seed: int) -> Any:
    """Normal numbers [batch, heads, tokens, dim] that lie as [batch, tokens, heads, dim], as projections leave them."""
    torch = world.torch
    generator = torch.Generator(device=world.device).manual_seed(seed)
    rows = torch.empty(shape.batch, tokens, heads, dim, device=world.device, dtype=dtype_of(torch, shape.dtype))
    return rows.normal_(generator=generator).transpose(1, 2)


def plain_attention(torch: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Straight from the formula, in fp64: what peers are checked against. q, k, v: [batch, heads, tokens, dim]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(3) @ v


# Largest error of a peer's 16-bit result (rows of unit variance) that is rounding and nothing else.
TOLERANCE = {"bf16": 0.03, "fp16": 0.005, "fp32": 1e-4}


def judge(world: World, name: str, error: float, dtype: str) -> bool:
    worst = world.max_over_ranks([error])[0]
    good = worst <= TOLERANCE[dtype]
    if world.rank == 0:
        print(f"{name}: {'ok' if good else 'WRONG'}, largest error {worst:.2e}, allowed {TOLERANCE[dtype]:.0e}")
    return good
