#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables and pictures of README.md and the pages of docs/ from the results that bench/results/shown.json names.
A table stands between <!-- table:NAME --> and <!-- /table:NAME --> on its page; everything else there is left alone.

    bench/tables.py                        # writes them
    bench/tables.py --check                # code 1 where one doesn't follow from the results
    bench/tables.py --select nvidia-h200   # from now on shows what bench/run.sh --readme measured last on this GPU
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable

import plot
import points
import rank_tables
import shown
import step_tables
import svg
from aliases import modern
from markdown import columns
from points import Job, Point
from rank_tables import gpus
from shown import Group, NotShown

MAIN = "bf16 32/8 x 128 causal"
NAMES = {
    ("pytorch sdpa", "cudnn"): "cuDNN",
    ("pytorch sdpa", "flash_attention_2"): "FlashAttention-2",
    ("flash_attention_3", ""): "FlashAttention-3",
}
ON_ONE_GPU = ("ringattn", "FlashAttention-3", "cuDNN", "FlashAttention-2")
# The groups of the README's figures.
README_PARTS = {
    "one-gpu": "one GPU",
    "scaling": "several GPUs",
    "two-million": "2,097,152 tokens",
    "decode": "decode",
}
# What stands above the tables.
ABOUT_SUMS = """\
The mean relative error of O, where all softmax weights are equal and the values lie in (0, 1): the exact mean is
known, and a bias can't cancel (`bench/peers/long_sum.py`). One unit in the last place of bf16 is 4e−3."""
ABOUT_SPEED = """\
bf16, causal, 32 query heads, 8 K/V heads, head_dim 128. Batches hold 16k tokens in total up to a length of 16k.
FlashAttention-3 is commit 0251105 of its repository; cuDNN and FlashAttention-2 are PyTorch's SDPA backends."""
ABOUT_SHAPES = """\
bf16; batches hold 16k tokens in total up to a length of 16k."""
ABOUT_SCALING = """\
bf16, causal, 32 query heads, 8 K/V heads, head_dim 128. *Compute only* is the same computation with every KV block
already in place. The zigzag ring is our own re-implementation (`bench/peers/zigzag_ring.py`): cuDNN's kernel, NCCL,
and a merge in fp32."""
ABOUT_TWO_MILLION = """\
bf16, causal, 32 query heads, 8 K/V heads, head_dim 128. *Exposed comm* is exposed communication: the time in which a
GPU waits for a KV block. Two GPUs halve the shards, but add two KV blocks and the attention state of the rows, which
one GPU does not need."""
ABOUT_LAYERS = """\
Host overhead of 32 enqueued layers: bf16, causal, 32 query heads, 8 K/V heads, head_dim 128. On one GPU, *compute
only* is 32 launches of the kernel on one task, measured in turn with the layers. On two GPUs it is the compute time
of jobs that the host waits for one by one; the events that time them add a few µs."""
ABOUT_CPU = """\
A 16-core Intel Xeon with AVX-512; each time is one run. The figures were measured before version 0.2.0, which changed
the digests of sequences of more than 64 tiles ([how it works](how-it-works.md)): the current program prints different
digests."""
ABOUT_LATENT_RING = """\
bf16, causal, 16 heads, `--form expanded`. *Latents moved* is what all GPUs together received; the next column is the
size that expanded keys and values would have had."""
# The rows of the README's table: jobs, and the length that each is shown at.
README_ROWS = (
    *((MAIN, length << 10) for length in (1, 32, 128)),
    ("bf16 32/8 x 128 full", 32 << 10),
    ("bf16 32/32 x 64 causal", 32 << 10),
    ("bf16 8/8 x 256 causal", 32 << 10),
    ("bf16 128/128 x 192/128 causal", 8 << 10),
)
ZIGZAG = "zigzag ring"
Groups = dict[str, Group]


def joined(words: Iterable[str]) -> str:
    """a, b and c"""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def commits(group: Group) -> str:
    return joined(f"`{commit}`" for commit in group.commits)


def origin(group: Group) -> str:
    """Whence a table is: files that hold each line's command and commit."""
    files = joined(f"[{name}](../bench/results/{name})".replace(".jsonl]", "]") for name in group.files)
    plural = "s" if len(group.commits) > 1 else ""
    told = f"Commit{plural} {commits(group)}{f', {group.device}' if group.device else ''}. Raw results: {files}."
    return told + (f" Compared with: {'; '.join(group.peers)}." if group.peers else "")


def device_name(group: Group) -> str:
    """For headings: "H200", "CPU"."""
    found = re.match(r"NVIDIA (\w+)", group.device) or re.match(r"nvidia-(\w+)", group.files[0])
    return found[1].upper() if found else "CPU"


def described(job: Job) -> str:
    """What a row is of: "head_dim 192/128, 128/128 heads, causal"."""
    dims = f"{job.head_dim}" if job.head_dim == job.head_dim_v else f"{job.head_dim}/{job.head_dim_v}"
    return f"{dims}, {job.heads}/{job.kv_heads} heads, {job.mask}"


def who(point: Point) -> str:
    if point.tool == points.OURS:
        return points.OURS + point.form
    return NAMES.get((point.tool, point.kernel), point.name)


def timed(group: Group) -> list[Point]:
    return [point for point in group.points if point.tflops and point.mode != "compute"]


def rate(point: Point | None) -> str:
    return f"{point.tflops:.0f}" if point and point.tflops else "—"


def rates(cells: list[Point | None]) -> list[str]:
    """The fastest is bold."""
    best = rate(max((point for point in cells if point), key=lambda point: point.tflops or 0.0, default=None))
    return [f"**{rate(point)}**" if point and rate(point) == best else rate(point) for point in cells]


def on_one_gpu(groups: Groups) -> dict[tuple[str, int, str], Point]:
    return {(p.job.kind, p.job.seq, who(p)): p for p in timed(groups["one-gpu"]) if p.world == 1}


def measured(groups: Groups) -> str:
    """The sentence about the figures of the README."""
    parts = {name: what for name, what in README_PARTS.items() if name in groups}
    every = dict.fromkeys(commit for name in parts for commit in groups[name].commits)
    gpu = f"{groups['one-gpu'].device}, bf16"
    if len(every) == 1:
        dates = joined(dict.fromkeys(date for name in parts for date in groups[name].dates))
        return f"All figures here were measured at commit `{next(iter(every))}` ({gpu}, {dates})."
    told = [f"{commits(groups[name])} ({what})" for name, what in parts.items()]
    return f"The figures ({gpu}) were measured at several commits: {joined(told)}."


def measured_there(found: Iterable[tuple[str, int, str]]) -> list[str]:
    """Ours, and the peers that were there to be measured."""
    return [name for name in ON_ONE_GPU if any(who == name for _, _, who in found)]


def speed(groups: Groups) -> str:
    """The README's choice."""
    found = on_one_gpu(groups)
    names = measured_there(found)
    rows = [["head_dim, heads, mask", "tokens", *names]]
    for kind, length in README_ROWS:
        cells = [found.get((kind, length, name)) for name in names]
        if cells[0]:
            rows.append([described(cells[0].job), points.size(length), *rates(cells)])
    return columns(rows)


def speed_main(groups: Groups) -> str:
    """The shape that peers are measured at, at every length."""
    found = on_one_gpu(groups)
    names = measured_there(found)
    lengths = sorted({length for kind, length, name in found if kind == MAIN and name in names})
    cells = {length: rates([found.get((MAIN, length, name)) for name in names]) for length in lengths}
    rows = [["TFLOP/s", *map(points.size, lengths)]]
    rows += [[name, *(cells[length][at] for length in lengths)] for at, name in enumerate(names)]
    return columns(rows)


def speed_shapes(groups: Groups) -> str:
    """Every other shape, and ours in other forms."""
    found = {key: point for key, point in on_one_gpu(groups).items() if key[0] != MAIN or key[2] not in ON_ONE_GPU}
    lengths = sorted({length for _, length, _ in found})
    jobs = {kind: point.job for (kind, _, _), point in found.items()}
    rows = [["head_dim, heads, mask", "who", *map(points.size, lengths)]]
    for kind, job in sorted(jobs.items(), key=lambda of: (of[1].mask, of[1].head_dim, of[1].kv_heads)):
        names = sorted({name for of, _, name in found if of == kind}, key=lambda name: (order_of(name), name))
        cells = [rates([found.get((kind, length, name)) for name in names]) for length in lengths]
        rows += [[described(job), name, *(cell[at] for cell in cells)] for at, name in enumerate(names)]
    return columns(rows, left=2)


def order_of(name: str) -> int:
    return ON_ONE_GPU.index(name) if name in ON_ONE_GPU else len(ON_ONE_GPU)


def scaling_points(groups: Groups) -> list[Point]:
    """Of the shape that scaling is measured at: whole jobs from 32k tokens on, and what ran once where nothing else is."""
    found = [p for name in ("two-million", "scaling") for p in timed(groups[name]) if p.job.kind == MAIN and not p.form]
    found = [p for p in found if p.job.seq >= 32 << 10 and (p.world > 1 or p.tool == points.OURS)]
    return list({(p.tool, p.kernel, p.world, p.transport, p.job.seq): p for p in found}.values())


def scaling_name(point: Point, transports: bool) -> str:
    if point.tool == ZIGZAG:  # bench/peers/zigzag_ring.py
        parts = f", {point.kernel}, {point.transport}".replace(", cudnn", ", cuDNN") if transports else ""
        return f"{ZIGZAG} (own re-implementation{parts}), {gpus(point.world)}"
    if point.tool != points.OURS:
        return f"{point.name}, {gpus(point.world)}" if transports else f"{point.tool}, {gpus(point.world)}"
    return f"ringattn, {gpus(point.world)}" + (f", {point.transport}" if transports and point.world > 1 else "")


def scaling_lines(found: list[Point], transports: bool) -> dict[str, list[tuple[int, float]]]:
    """Ours first, by the number of GPUs."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for point in sorted(found, key=lambda p: (p.tool != points.OURS, p.world, p.transport != "p2p", p.name, p.job.seq)):
        lines.setdefault(scaling_name(point, transports), []).append((point.job.seq, point.tflops or 0.0))
    return lines


def scaling(groups: Groups) -> str:
    lines = scaling_lines(scaling_points(groups), transports=True)
    alone = [p for p in groups["scaling"].points if p.mode == "compute" and p.tflops and p.job.kind == MAIN]
    for point in sorted(alone, key=lambda p: (p.world, p.transport != "p2p", p.job.seq)):
        name = f"— compute only, {gpus(point.world)}, {point.transport}"
        lines.setdefault(name, []).append((point.job.seq, point.tflops or 0.0))
    lengths = sorted({length for line in lines.values() for length, _ in line})
    rows = [["TFLOP/s per GPU", *map(points.size, lengths)]]
    for name, line in lines.items():
        of = dict(line)
        rows.append([name, *(f"{of[length]:.0f}" if length in of else "—" for length in lengths)])
    return columns(rows)


def two_million(groups: Groups) -> str:
    rows = [["2,097,152 tokens", "time", "TFLOP/s per GPU", "memory per GPU (planned)", "exposed comm", "digest of O"]]
    runs = [line for line in groups["two-million"].lines if line.get("command") == "run"]
    for line in sorted(runs, key=lambda line: (line["world"]["ranks"], line["world"]["transport"])):
        seconds = line["time_ms"]["median"] / 1e3
        memory, planned = line["memory_peak_bytes"] / 2**30, line["plan"]["memory_per_rank"] / 2**30
        told = [f"{seconds:.1f} s", f"{line['tflops_per_rank']:.0f}", f"{memory:.1f} GiB ({planned:.1f})"]
        told.append(f"{line['exposed_comm_ms']:.1f} ms")
        rows.append([gpus(line["world"]["ranks"]), *told, f"`{line['digest']['out'][:8]}…`"])
    return columns(rows)


def layers(groups: Groups) -> str:
    rows = [["32 layers in sequence", "time per layer", "compute only", "overhead", "host time per call"]]
    # Where two files measured the same job, the later one counts.
    chosen = {(line["ranks"], line["tokens"], line["transport"] != "p2p"): line for line in groups["layers"].lines}
    for _, line in sorted(chosen.items()):
        told = f"{gpus(line['ranks'])}, {points.size(line['tokens'])}" + (f", {line['transport']}" if line["ranks"] > 1 else "")
        lost = f"{100 * line['lost']:.1f} %" if line["lost"] > 0 else "none"
        rows.append([told, f"{line['ms_a_layer']:.3f} ms", f"{line['compute_ms']:.3f} ms", lost, f"{line['host_us']:.0f} µs"])
    return columns(rows)


def sums(groups: Groups) -> str:
    found = {}
    for line in groups["sums"].lines:
        name = points.OURS if line["tool"]["name"] == points.OURS else NAMES[("pytorch sdpa", line["kernel"])]
        found[(line["job"]["dtype"], name, line["job"]["tokens"])] = line["accuracy"]["bias"]
    lengths = sorted({length for _, _, length in found})
    rows = [["mean of (O − exact) / exact", *(f"{points.size(length)} keys" for length in lengths)]]
    for dtype, name in dict.fromkeys((dtype, name) for dtype, name, _ in found):
        rows.append([f"{dtype}, {name}", *(f"{found[(dtype, name, length)]:.1e}".replace("-", "−") for length in lengths)])
    return columns(rows)


def cpu(groups: Groups) -> str:
    rows = [["bf16, 8/2 heads of 128, causal", "time", "TFLOP/s per rank", "digest of O"]]
    for line in sorted(groups["cpu"].lines, key=lambda line: (line["tokens"], line["ranks"])):
        told = "1 rank with 16 threads" if line["ranks"] == 1 else f"{line['ranks']} ranks under mpirun"
        seconds, tflops = f"{line['time_ms'] / 1e3:#.3g} s", f"{line['tflops_per_rank']:#.3g}"
        rows.append([f"{points.size(line['tokens'])} tokens, {told}", seconds, tflops, f"`{line['digest']['out'][:8]}…`"])
    return columns(rows)


def part(name: str, title: str, about: str, table: Callable[[Groups], str]) -> Callable[[Groups], str]:
    """A subsection of a page that is always there, as section() makes it."""
    return lambda groups: section(name, title, about, lambda group: table(groups))(groups)


def speed_picture(groups: Groups) -> str:
    found = on_one_gpu(groups)
    lines = {name: sorted((p.job.seq, p.tflops or 0.0) for (kind, _, of), p in found.items() if (kind, of) == (MAIN, name))
             for name in ON_ONE_GPU}
    title = f"Causal attention on one {groups['one-gpu'].device}"
    subtitle = f"bf16, 32 query heads, 8 K/V heads, head_dim 128, commit {joined(groups['one-gpu'].commits)}"
    chart = plot.speed_chart(title, subtitle, {name: line for name, line in lines.items() if line})
    return svg.charts(f"{title}: TFLOP/s against sequence length. {subtitle}.", [chart])


def scaling_picture(groups: Groups) -> str:
    found = [p for p in scaling_points(groups) if p.transport != "nccl" or p.tool == ZIGZAG]
    found = [p for p in found if p.tool in (points.OURS, ZIGZAG)]
    title = f"Scaling: TFLOP/s per GPU, {groups['scaling'].device}"
    subtitle = "causal attention, bf16; with perfect scaling all lines lie on the line of 1 GPU"
    chart = plot.speed_chart(title, subtitle, scaling_lines(found, transports=False), y_label="TFLOP/s per GPU")
    return svg.charts(f"{title}, against sequence length. {subtitle}.", [chart])


def compression_lines() -> list[dict]:
    text = (shown.ROOT / "bench" / "results" / "compression.jsonl").read_text(encoding="utf-8")
    return [modern(json.loads(line)) for line in text.splitlines() if line.strip()]


def compression(_: Groups) -> str:
    """A row for each format, with the change of O on each kind of data."""
    found: dict[tuple[str, str], dict[str, dict]] = defaultdict(dict)
    for line in compression_lines():
        stored = line["k"] if line["k"] == line["v"] else f"{line['k']}, {line['v']}"
        kept, tokens = line.get("kept", 1), line.get("tokens", 1)
        if kept < tokens:
            stored = f"{kept} of {tokens} tokens" + ("" if stored == "plain" else f", {stored}")
        found[(line["method"], stored)][line["data"]] = line
    rows = [["method", "stored k, v", "bytes per token and head", "removed", "error of O, Gaussian data", "with outlier channels",
             "compress, ns", "decompress, ns"]]  # fmt: skip
    for (method, stored), data in found.items():
        changes = [f"{data[kind]['change_of_o']:.4f}" if kind in data else "—" for kind in ("normal", "outliers")]
        one = next(iter(data.values()))
        times = [min(line[what] for line in data.values()) for what in ("compress_ns", "decompress_ns")]
        shown_times = [f"{time:,.0f}" if time > 0 else "—" for time in times]
        rows.append([f"`{method}`", stored, f"{one['bytes']:.4g}", f"{one['removed']:.3f}", *changes, *shown_times])
    return columns(rows)


def compression_picture(_: Groups) -> str:
    return plot.draw_compression(plot.compression_series(compression_lines()))


def section(
    name: str, title: str, about: str, table: Callable[[Group], str], unmeasured: str = ""
) -> Callable[[Groups], str]:
    """A subsection of a page, whose heading names the device. Without results: a sentence that says so, or nothing."""

    def make(groups: Groups) -> str:
        group = groups.get(name)
        if not group:
            return unmeasured
        return f"### {title}, {device_name(group)}\n\n{about}\n\n{origin(group)}\n\n{table(group)}"

    return make


SECTIONS = step_tables.SECTIONS | rank_tables.SECTIONS
# By the names of their places: the group, the title, what stands above the table, and the table.
PARTS = {
    "sums": ("sums", "Bias of long sums", ABOUT_SUMS, sums),
    "speed": ("one-gpu", "One shape at every length", ABOUT_SPEED, speed_main),
    "shapes": ("one-gpu", "Other shapes", ABOUT_SHAPES, speed_shapes),
    "scaling": ("scaling", "Scaling", ABOUT_SCALING, scaling),
    "two-million": ("two-million", "Two million tokens", ABOUT_TWO_MILLION, two_million),
    "layers": ("layers", "A stack of layers", ABOUT_LAYERS, layers),
    "cpu": ("cpu", "Prefill", ABOUT_CPU, cpu),
}
PAGES: dict[str, dict[str, Callable[[Groups], str]]] = {
    "README.md": {
        "measured": measured,
        "speed": speed,
        "decode": lambda groups: step_tables.decode_short(groups["decode"]) if "decode" in groups else "",
        "two-million": two_million,
    },
    "docs/compression.md": {"accuracy": compression},
    "docs/mla.md": {"latent-ring": section("latent-ring", "Latents moved", ABOUT_LATENT_RING, step_tables.latent_ring)},
    "docs/results.md": {
        **{name: part(*of) for name, of in PARTS.items()},
        **{name: section(name, *of) for name, of in SECTIONS.items()},
    },
}
# Tables that a page need not have a place for. Their names are those of their groups.
OPTIONAL = {"README.md": {"decode"}}
PICTURES = {"docs/pictures/speed.svg": speed_picture, "docs/pictures/scaling.svg": scaling_picture,
            "docs/pictures/compression.svg": compression_picture}


def places(text: str) -> list[str]:
    return re.findall(r"^<!-- table:(\S+) -->$", text, re.MULTILINE)


def without_world(page: str, text: str) -> set[str]:
    """The optional tables that a page leaves out."""
    return OPTIONAL.get(page, set()) - set(places(text))


def fill(page: str, text: str, tables: dict[str, str]) -> str:
    """The page's text with its tables in their places."""
    names = places(text)
    if sorted(names) != sorted(tables):
        raise NotShown(f"{page} has places for {', '.join(names) or 'no tables'}, where there are {', '.join(tables)}")
    for name, table in tables.items():
        begin, end = f"<!-- table:{name} -->\n", f"<!-- /table:{name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise NotShown(f"{page} has no {end.strip()} behind {begin.strip()}")
        text = before + begin + (table + "\n" if table else "") + end + after
    return text


def make_files(groups: Groups) -> dict[str, str]:
    """What each page and picture should hold, by its path below the checkout."""
    files = {}
    for page, tables in PAGES.items():
        text = (shown.ROOT / page).read_text(encoding="utf-8")
        left_out = without_world(page, text)
        there = {name: group for name, group in groups.items() if name not in left_out}
        files[page] = fill(page, text, {name: make(there) for name, make in tables.items() if name not in left_out})
    return files | {picture: make(groups) for picture, make in PICTURES.items()}


def current(path: str) -> str:
    file = shown.ROOT / path
    return file.read_text(encoding="utf-8") if file.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; code 1 where a file would change")
    what.add_argument("--select", metavar="GPU", help="a folder of bench/results, and those of several (GPU-x4)")
    arguments = parser.parse_args()
    try:
        if arguments.select:
            shown.write_selection(shown.select(arguments.select, shown.read_selection()))
        groups = shown.read_groups()
        changed = {path: text for path, text in make_files(groups).items() if text != current(path)}
    except (NotShown, OSError, KeyError) as error:
        print(f"error: the tables can't be made ({error}).", file=sys.stderr)
        return 3
    for path, text in changed.items():
        if arguments.check:
            print(f"{path} doesn't follow from bench/results/shown.json: bench/tables.py writes it", file=sys.stderr)
        else:
            (shown.ROOT / path).parent.mkdir(exist_ok=True)
            (shown.ROOT / path).write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    parts = (README_PARTS.keys() & groups.keys()) - without_world("README.md", current("README.md"))
    several = dict.fromkeys(commit for name in README_PARTS if name in parts for commit in groups[name].commits)
    if len(several) > 1:
        print(f"# the README's figures are of {len(several)} commits: {', '.join(several)}", file=sys.stderr)
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
