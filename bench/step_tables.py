# SPDX-License-Identifier: Apache-2.0
"""The tables of decoding steps, of sparse lists, of codes, of latents and of scans, which bench/tables.py writes where
somebody has measured them."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Callable

import points
import steps
from markdown import columns
from shown import Group, is_missing

# What stands above the tables in docs/results.md.
ABOUT_DECODE = """\
One query token per sequence, bf16. A CUDA graph holds several decode steps, each over a different KV cache, so at
least 512 MiB are read before a cache is used again. Times are medians; ringattn and the peers took turns on one GPU.
Each peer was called in several ways (`bench/peers/decode.py --help`), and its fastest counts. A ratio below 1 means
that ringattn is faster."""
ABOUT_PAGES = """\
Decode time over a paged KV cache as a multiple of the time over a dense one, measured in turn. The pages of all
sequences are shuffled."""
ABOUT_SPARSE = """\
Prefill with a [block-sparse mask](block-sparse.md) of 128 queries by 128 keys, the same for all heads: bf16, causal,
32 query heads, 8 K/V heads, head_dim 128. ringattn and FlexAttention (compiled) took turns on one GPU over the same
masks (`bench/peers/sparse.py --help`). The rows *all* are the causal job, for ringattn without a block mask; the last
column is the speedup over it."""
NO_SPARSE = (
    "Prefill with a [block-sparse mask](block-sparse.md) has not been measured yet (`bench/run.sh sparse-peers` does it)."
)
ABOUT_COMPRESSED = """\
bf16, 32 query heads, 8 K/V heads, head_dim 128. The ratio after each time is relative to the unquantized bf16 cache,
measured in turn. A decode step has one query token per sequence and reads the quantized values in place; prefill
dequantizes a KV block before it attends to it."""
ABOUT_MLA = """\
Latents of 512 dims and rotary keys of 64 in shuffled pages of 64 tokens, bf16. A CUDA graph holds several decode
steps, and at least 512 MiB are read before a cache is used again. Times are medians; ringattn and FlashMLA took turns
on one GPU (`bench/peers/mla.py --help`). A ratio below 1 means that ringattn is faster."""
ABOUT_SSM = """\
bf16. Mamba-2 has 80 heads of 64 dims and a state of 128, Mamba-1 has 5,120 channels and a state of 16, and the
conv1d has 8,448 channels and a width of 4. ringattn and the peers took turns on one GPU (`bench/peers/ssm.py
--help`). \"can't\": the kernel refuses the shape, or reads out of bounds. GB/s counts the minimum of bytes that must
be moved."""
SSM_SHAPES = {
    "ssd": "Mamba-2",
    "ssd-gated": "Mamba-2, gated",
    "selective": "Mamba-1",
    "update": "Mamba-2, decode step",
    "selective-update": "Mamba-1, decode step",
    "conv1d": "conv1d",
}

# The steps of the README's table: sequences, and keys of each.
README_STEPS = ((1, 1 << 10), (1, 16 << 10), (1, 128 << 10), (1, 1 << 20), (32, 4 << 10))


def decode_rows(group: Group, wanted: Callable[[steps.Step], bool]) -> str:
    found = steps.table(steps.read_lines(group.lines))
    names = [f"{name}, µs" for name in (points.OURS, *steps.PEERS)]
    rows = [["heads, head_dim", "sequences x keys", *names, "ringattn / cuDNN"]]
    for step in sorted({step for _, step in found if wanted(step)}, key=lambda step: (step.goal is None, step)):
        figures = [steps.figure(found.get((who, step))) for who in (points.OURS, *steps.PEERS)]
        part = steps.ratio(found, steps.CUDNN, step)
        heads = f"{step.heads}/{step.kv_heads} of {step.head_dim}"
        rows.append([heads, f"{step.batch} x {points.size(step.keys)}", *figures, f"{part:.2f}" if part else "—"])
    return columns(rows, left=2)


def decode(group: Group) -> str:
    return decode_rows(group, lambda step: True)


def decode_short(group: Group) -> str:
    """The README's choice, with what it is of."""
    told = "One decode step in a CUDA graph, one query token per sequence, over a KV cache that is not in the L2 cache:"
    return f"{told}\n\n{decode_rows(group, lambda step: step.goal is not None and (step.batch, step.keys) in README_STEPS)}"


def pages(group: Group) -> str:
    """Ours alone: caches in pages beside the same dense, measured in turn."""
    found = steps.table(steps.read_lines(group.lines))
    dense = {step for who, step in found if who == points.OURS and not step.page_size and step.rows == 1}
    sizes = sorted({step.page_size for _, step in found if step.page_size})
    rows = [["heads, head_dim", "sequences x keys", "dense, µs", *(f"pages of {size}" for size in sizes)]]
    for step in sorted(dense):
        whole = found[points.OURS, step]
        paged = [found.get((points.OURS, dataclasses.replace(step, page_size=size))) for size in sizes]
        cells = [f"{one.us / whole.us:.3f} x" if one and one.us and whole.us else "—" for one in paged]
        if any(paged):
            heads = f"{step.heads}/{step.kv_heads} of {step.head_dim}"
            rows.append([heads, f"{step.batch} x {points.size(step.keys)}", steps.figure(whole), *cells])
    return columns(rows, left=2)


FLEX = "FlexAttention"


def mask_pattern(line: dict) -> str:
    """Of a line of ours: the name of its file of lists, or "dense" without one."""
    mask = points.asked(line, "--block-mask")
    return pathlib.PurePath(mask).stem if mask else "dense"


def sparse(group: Group) -> str:
    """Medians of all rounds; the peer's lines say how many blocks a pattern lists."""
    times: dict[tuple[str, int, str], list[float]] = {}
    density: dict[tuple[int, str], float] = {}
    for line in group.lines:
        if not line.get("ms"):
            continue
        seq = line["job"]["seq"]
        if line["schema"] == "ringattn.sparse/1":
            who, pattern = FLEX, line["pattern"]
            density[seq, pattern] = line["density"]
        else:
            who, pattern = points.OURS, mask_pattern(line)
        times.setdefault((who, seq, pattern), []).append(line["ms"]["median"])

    def median(who: str, seq: int, pattern: str) -> float | None:
        return statistics.median(times[who, seq, pattern]) if (who, seq, pattern) in times else None

    def part(of: float | None, by: float | None) -> str:
        return f"{of / by:.2f}" if of and by else "—"

    rows = [["mask", "tokens", "density", f"{points.OURS}, ms", f"{FLEX}, ms", f"{FLEX} / ringattn", "speedup over all"]]
    for seq, pattern in sorted({key[1:] for key in times}, key=lambda key: (key[0], key[1] != "dense", key[1])):
        ours, theirs = median(points.OURS, seq, pattern), median(FLEX, seq, pattern)
        listed = f"{100 * density[seq, pattern]:.1f} %" if (seq, pattern) in density else "—"
        figures = [f"{ms:.2f}" if ms else "—" for ms in (ours, theirs)]
        told = [*figures, part(theirs, ours), part(median(points.OURS, seq, "dense"), ours)]
        rows.append(["all" if pattern == "dense" else pattern, points.size(seq), listed, *told])
    return columns(rows)


def beside_plain(times: dict[str, float], form: str, digits: int) -> str:
    """A time, and its part of that over a plain cache, whose form is empty."""
    if form not in times:
        return "—"
    told = f"{times[form]:.{digits if times[form] < 99.95 else 0}f}"
    return f"{told} ({times[form] / times['']:.2f} x)" if form and "" in times else told


def compressed(group: Group) -> str:
    """Steps, prefill, and the making of codes: a table each."""
    by_step: dict[steps.Step, dict[str, float]] = {}
    forms = ("", "fp8", "int8", "int4")
    for (_, form, step), reading in steps.read_lines(group.lines).items():
        if reading.us and form in forms:
            by_step.setdefault(step, {})[form] = reading.us
    rows = [["decode step, µs", "bf16", *forms[1:]]]
    for step, times in sorted(by_step.items()):
        rows.append([f"{step.batch} x {points.size(step.keys)}", *(beside_plain(times, form, 1) for form in forms)])
    tables = [columns(rows)] if by_step else []

    several: dict[int, dict[str, list[float]]] = {}
    for line in group.lines:
        if line.get("schema") == points.SCHEMA and line.get("ms"):
            form = points.asked(line, "--cache-format") or "bf16"
            several.setdefault(line["job"]["seq"], {}).setdefault("" if form == "bf16" else form, []).append(line["ms"]["median"])
    rows = [["prefill, ms", "bf16", "fp8", "int4"]]
    for seq, found in sorted(several.items()):
        times = {form: statistics.median(of_form) for form, of_form in found.items()}
        rows.append([f"1 x {points.size(seq)}", *(beside_plain(times, form, 2) for form in ("", "fp8", "int4"))])
    tables += [columns(rows)] if several else []

    rates: dict[str, dict[str, list[dict]]] = {}
    for line in group.lines:
        if line.get("schema") == "ringattn.compress/1" and line["what"] != "copy":
            rates.setdefault(line["format"], {}).setdefault(line["what"], []).append(line)
    rows = [["128k tokens, 8 heads", "compress, GB/s", "of memcpy bandwidth", "decompress, GB/s", "of memcpy bandwidth"]]
    for form, found in rates.items():
        cells = []
        for what in ("compress", "decompress"):
            cells += [f"{statistics.median(line['gb_per_s'] for line in found[what]):.0f}"] if what in found else ["—"]
            cells += [f"{statistics.median(line['of_copy'] for line in found[what]):.2f}"] if what in found else ["—"]
        rows.append([form, *cells])
    tables += [columns(rows)] if rates else []
    return "\n\n".join(tables)


def latents(group: Group) -> str:
    """Ours in the forms that its kernels chose."""
    readings = steps.read_lines(group.lines)
    found = steps.table(readings)
    forms = {"sm90_mla": "", "sm90_mla_split1k": "sm90_mla_split1k"}  # of readings, as steps.py has them
    forms = {name: form for name, form in forms.items() if any(key[:2] == (points.OURS, form) for key in readings)}
    rows = [["heads, queries", "sequences x tokens", *(f"{name}, µs" for name in forms), f"{steps.FLASH_MLA}, µs"]]
    rows[0] += [f"{name} / {steps.FLASH_MLA}" for name in forms]
    for step in sorted({step for _, step in found}, key=lambda step: (-step.heads, step.rows, step)):
        told = [f"{step.heads}, {step.rows}", f"{step.batch} x {points.size(step.keys)}"]
        theirs = found.get((steps.FLASH_MLA, step))
        ours = [readings.get((points.OURS, form, step)) for form in forms.values()]
        parts = [steps.ours_of_theirs(one, theirs) for one in ours]
        figures = [steps.figure(one) for one in (*ours, theirs)]
        rows.append([*told, *figures, *(f"{part:.2f}" if part else "—" for part in parts)])
    return columns(rows, left=2)


def amount(count: int) -> str:
    """143.2 MiB, 2.2 GiB"""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def latent_ring(group: Group) -> str:
    """Runs over latents, what all ranks together got of them, and what their keys and values would have been."""
    rows = [["tokens", "GPUs", "time", "TFLOP/s per GPU", "latents moved", "keys and values instead", "digest of O"]]
    runs = [line for line in group.lines if line.get("command") == "run"]
    for line in sorted(runs, key=lambda line: (line["job"]["q_tokens"], line["world"]["ranks"])):
        ms, plan = line["time_ms"]["median"], line["plan"]
        time = f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1e3:#.3g} s"
        moved = [amount(plan[name]) if plan[name] else "—" for name in ("bytes_moved", "bytes_moved_expanded")]
        told = [f"{line['job']['q_tokens']:,}", str(line["world"]["ranks"]), time, f"{line['tflops_per_rank']:.0f}", *moved]
        rows.append([*told, f"`{line['digest']['out'][:8]}…`"])
    return columns(rows)


def scans(group: Group) -> str:
    """Each shape with the median of what was measured of it, in the order of the lines."""
    found: dict[tuple[str, str], list[dict]] = {}
    for line in group.lines:
        if line.get("schema") == "ringattn.ssm/1" and not is_missing(line):
            found.setdefault((line["shape"], line["tool"]["name"]), []).append(line)
    shapes = dict.fromkeys(shape for shape, _ in found)
    others = sorted({who for _, who in found} - {points.OURS})
    names = [f"{'PyTorch' if who == 'pytorch' else who}, ms" for who in (points.OURS, *others)]
    rows = [["op", "sequences x tokens", *names, "fastest peer / ringattn", "GB/s"]]

    def milliseconds(shape: str, who: str) -> float | None:
        times = [line["ms"] for line in found.get((shape, who), []) if line["ms"]]
        return statistics.median(times) if times else None

    for shape in shapes:
        ours = milliseconds(shape, points.OURS)
        if not ours:
            continue
        (one, *_) = found[shape, points.OURS]
        cells = [f"{ours:.3g}"]
        for who in others:
            theirs = milliseconds(shape, who)
            cells.append(f"{theirs:.3g}" if theirs else "can't" if (shape, who) in found else "—")
        best = min((theirs for theirs in (milliseconds(shape, who) for who in others) if theirs), default=None)
        cells += [f"{best / ours:.2f}" if best else "—", f"{one['bytes'] / ours * 1e-6:.0f}"]
        rows.append([SSM_SHAPES[shape.rpartition("-")[0]], f"{one['sequences']} x {points.size(one['tokens'])}", *cells])
    return columns(rows, left=2)


# By the names of their groups: title, what stands above a table, and the table.
SECTIONS = {
    "decode": ("Decode step", ABOUT_DECODE, decode),
    "pages": ("Paged KV cache", ABOUT_PAGES, pages),
    "sparse": ("Prefill compared with FlexAttention", ABOUT_SPARSE, sparse, NO_SPARSE),
    "compressed": ("Decode, prefill and compression", ABOUT_COMPRESSED, compressed),
    "latents": ("Decode step compared with FlashMLA", ABOUT_MLA, latents),
    "scans": ("One GPU", ABOUT_SSM, scans),
}
