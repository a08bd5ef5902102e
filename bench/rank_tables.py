# SPDX-License-Identifier: Apache-2.0
"""The tables of latents, scans and decode steps on several ranks, and of codes on a slowed link, which bench/tables.py
writes where somebody has measured them."""

from __future__ import annotations

import dataclasses
from typing import Any

import points
from markdown import columns
from shown import Group

ABOUT_MLA_PREFILL = """\
Expanded form, latents of 512 dims and rotary keys of 64: bf16, causal, 16 heads. Ranks pass the latents around the
ring and expand each block to keys of 192 dims and values of 128. *Plain* is attention over keys and values of the
same dims that exist already; *compute only* has every KV block in place."""
ABOUT_SSM_RANKS = """\
Mamba-2, bf16: 80 heads of 64 dims, a state of 128, one sequence. Ranks own consecutive super-segments and pass on
states."""
ABOUT_DECODE_RANKS = """\
One decode step over one sequence, bf16, 32 query heads, 8 K/V heads, head_dim 128. Each rank attends to its share of
the KV splits, and the partial results are merged."""
ABOUT_COMPRESSED_RING = """\
Two CPU ranks under mpirun, on a link slowed to 4 MB/s (`RINGATTN_PACE`): bf16, causal, 8/8 heads, head_dim 128, 8k
tokens. KV blocks are sent as they are stored, and each rank dequantizes the blocks that it receives."""


def gpus(world: int) -> str:
    return "1 GPU" if world == 1 else f"{world} GPUs"


def of_digest(digest: str | None) -> str:
    return f"`{digest[:8]}…`" if digest else "—"


def time_of(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 1e4 else f"{ms:.0f} ms" if ms >= 100 else f"{ms:.2f} ms"


@dataclasses.dataclass
class Reading:
    """What was measured of a job on some ranks."""

    ms: float
    tflops: float
    waited_ms: float
    digest: str | None = None


def timed_lines(group: Group) -> list[dict[str, Any]]:
    return [line for line in group.lines if line.get("schema") == points.SCHEMA and line.get("ms")]


def reading_of(line: dict[str, Any]) -> Reading:
    return Reading(line["ms"]["median"], line["tflops_per_rank"], line.get("exposed_comm_ms") or 0.0, line.get("digest"))


def reports(group: Group, command: str) -> list[dict[str, Any]]:
    return [line for line in group.lines if line.get("schema") == points.REPORT and line.get("command") == command]


def checked(group: Group) -> str:
    """The sentences about rows that were compared with fp64; empty where none were."""
    told = []
    for line in reports(group, "verify"):
        found = line["accuracy"]
        part = found["out"]["greatest_error"] / found["out"]["allowed"]
        judged = "passed" if line["verdict"] == "pass" else "FAILED"
        tokens = points.size(line["job"].get("q_tokens") or line["job"]["tokens"])
        of = f"{found['rows']} rows of {tokens} tokens of {line['job']['heads']} heads"
        told.append(f"{of}, compared with fp64: {judged}, the greatest error is {part:.2f} of the allowed error.")
    return "".join(f"\n\n{text}" for text in told)


def mla_prefill(group: Group) -> str:
    """Of a length that several lines have, those that ran it by itself have its digest."""
    latents: dict[tuple[int, int], Reading] = {}
    folds: dict[tuple[int, int], Reading] = {}
    plain: dict[tuple[int, int], Reading] = {}
    for line in timed_lines(group):
        kind = folds if line["mode"] == "compute" else latents if line["job"].get("op") == "mla" else plain
        kind[line["job"]["seq"], line["world"]] = reading_of(line)
    for line in reports(group, "run"):
        key = (line["job"]["q_tokens"], line["world"]["ranks"])
        measured = Reading(line["time_ms"]["median"], line["tflops_per_rank"], line["exposed_comm_ms"])
        latents.setdefault(key, measured).digest = line["digest"]["out"]
    heads = ["time", "TFLOP/s per GPU", "compute only", "plain", "plain time / this", "exposed comm", "digest of O"]
    rows = [["tokens", "on", *heads]]
    for tokens, world in sorted(latents):
        this, alone, beside = latents[tokens, world], folds.get((tokens, world)), plain.get((tokens, world))
        told = [time_of(this.ms), f"{this.tflops:.0f}", f"{alone.tflops:.0f}" if alone else "—"]
        told += [f"{beside.tflops:.0f}", f"{beside.ms / this.ms:.3f}"] if beside else ["—", "—"]
        waiting = f"{100 * this.waited_ms / this.ms:.1f} %"
        rows.append([points.size(tokens), gpus(world), *told, waiting, of_digest(this.digest)])
    return columns(rows, left=2) + checked(group)


def speed_up(found: dict[tuple[int, int, str], Reading], tokens: int, this: Reading) -> str:
    one = next((reading for (length, world, _), reading in found.items() if (length, world) == (tokens, 1)), None)
    return f"{one.ms / this.ms:.2f} x" if one else "—"


def by_ranks(group: Group, op: str) -> dict[tuple[int, int, str], Reading]:
    """By tokens of a sequence, ranks and transport."""
    lines = [line for line in timed_lines(group) if line["job"].get("op") == op]
    return {(line["job"]["seq"], line["world"], line["transport"]): reading_of(line) for line in lines}


def world_name(world: int, transport: str) -> str:
    return gpus(world) + (f", {transport}" if world > 1 else "")


def ssm_ranks(group: Group) -> str:
    found = by_ranks(group, "ssd")
    rows = [["tokens", "on", "time", "speedup", "exposed comm", "digest of y"]]
    for (tokens, world, transport), this in sorted(found.items(), key=lambda item: (*item[0][:2], item[0][2] != "p2p")):
        waiting = f"{100 * this.waited_ms / this.ms:.1f} %"
        told = [time_of(this.ms), speed_up(found, tokens, this), waiting, of_digest(this.digest)]
        rows.append([points.size(tokens), world_name(world, transport), *told])
    return columns(rows, left=2) + checked(group)


def decode_ranks(group: Group) -> str:
    found = by_ranks(group, "decode")
    rows = [["keys", "on", "decode step", "speedup", "digest of O"]]
    for (keys, world, transport), this in sorted(found.items(), key=lambda item: (*item[0][:2], item[0][2] != "p2p")):
        told = [f"{this.ms * 1e3:.0f} µs", speed_up(found, keys, this), of_digest(this.digest)]
        rows.append([points.size(keys), world_name(world, transport), *told])
    return columns(rows, left=2)


def compressed_ring(group: Group) -> str:
    """The rows as they were measured, of which the first has keys and values as they are."""
    runs = reports(group, "run")
    rows = [["stored as", "bytes moved", "of bf16", "time", "exposed comm", "digest of O"]]
    for line in runs:
        moved, ms = line["plan"]["bytes_moved"], line["time_ms"]["median"]
        part = f"{moved / runs[0]['plan']['bytes_moved']:.3f}"
        told = [f"{moved / 1e6:.1f} MB", part, f"{ms / 1e3:.2f} s", f"{100 * line['exposed_comm_ms'] / ms:.0f} %"]
        rows.append([line["config"]["cache-format"], *told, of_digest(line["digest"]["out"])])
    return columns(rows)


# By the names of their groups: title, what stands above a table, and the table.
SECTIONS = {
    "compressed-ring": ("Ring on a slow link", ABOUT_COMPRESSED_RING, compressed_ring),
    "decode-ranks": ("Decode step on several GPUs", ABOUT_DECODE_RANKS, decode_ranks),
    "latent-prefill": ("Prefill", ABOUT_MLA_PREFILL, mla_prefill),
    "scan-ranks": ("Several GPUs", ABOUT_SSM_RANKS, ssm_ranks),
}
