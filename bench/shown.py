# SPDX-License-Identifier: Apache-2.0
"""Which committed results the pages show. bench/results/shown.json names the files of each group of figures, so results that
are added for other reasons change no page. What bench/run.sh --readme measures is chosen by select()."""

from __future__ import annotations

import json
import pathlib
import re
from dataclasses import dataclass
from typing import Any

import points
from aliases import modern
from points import Point

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
SELECTION = RESULTS / "shown.json"

# For each group of bench/run.sh --readme: the required part, and the parts that belong to it. Where two files measured
# the same job, the later one counts.
PARTS = {
    "one-gpu": ("one-gpu", ("one-gpu-shapes", "one-gpu")),
    "scaling": ("scaling", ("ring-p2p", "ring-nccl", "ring-peers", "scaling")),
    "two-million": ("two-million", ("two-million",)),
    "decode": ("decode-peers", ("decode-peers",)),
    "pages": ("decode", ("decode",)),
    "sparse": ("sparse-peers", ("sparse-peers",)),
    "latents": ("latents-peers", ("latents-peers",)),
    "scans": ("scans-peers", ("scans-peers",)),
    "compressed": ("compressed", ("compressed",)),
    "compressed-ring": ("compressed-ring", ("compressed-ring",)),
    "latent-ring": ("latent-two-million", ("latent-ring", "latent-two-million", "latent-oracle")),
    "latent-prefill": ("latent-ring", ("latent-ring", "latent-two-million", "latent-oracle")),
    "scan-ranks": ("scan-ranks", ("scan-oracle", "scan-ranks")),
    "decode-ranks": ("decode-ranks", ("decode-ranks",)),
}
PACKAGES = {
    "flash_attention_3": "FlashAttention-3",
    "flash_attn": "FlashAttention-2",
    "flash_mla": "FlashMLA",
    "mamba_ssm": "mamba_ssm",
    "causal_conv1d": "causal_conv1d",
}
# Schemas of lines that peers or this project's programs write.
SCHEMAS = (points.SCHEMA, "ringattn.decode/1", "ringattn.sparse/1", "ringattn.ssm/1")


class NotShown(Exception):
    """Results that can't be shown; the text says which and why."""


@dataclass(frozen=True)
class Group:
    """The figures of some files."""

    files: tuple[str, ...]  # below bench/results
    lines: tuple[dict[str, Any], ...]
    points: tuple[Point, ...]

    @property
    def commits(self) -> tuple[str, ...]:
        """Of the builds that were measured, and beside which peers were: in the order of the files."""
        return tuple(dict.fromkeys(commit_of(line) for line in self.lines))

    @property
    def dates(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pathlib.PurePath(name).name[: len("2026-01-01")] for name in self.files))

    @property
    def peers(self) -> tuple[str, ...]:
        """Who was measured beside ours, and which version of them."""
        found = {}
        for line in self.lines:
            tool = line.get("tool") or {}
            if line.get("schema") in SCHEMAS and tool["name"] != points.OURS and not is_missing(line):
                # But for packages of their own, the programs of bench/peers run what PyTorch brings.
                name = PACKAGES.get(tool["name"], "PyTorch")
                found[f"{name} {tool['version']}"] = None
            elif "peer" in line and "source" in line:
                found[line["source"]] = None
        return tuple(found)

    @property
    def device(self) -> str:
        """The name of the GPU: "NVIDIA H200"; empty where no line names one."""
        for line in self.lines:
            devices = line.get("devices") or (line.get("world") or {}).get("devices") if "schema" in line else None
            for device in devices or []:
                return re.sub(r"^GPU \d+: | \(sm_\d+\)$", "", device)
        return ""


def is_missing(line: dict[str, Any]) -> bool:
    """Whether the line is of a peer that was not installed, or not all of it: nothing was asked of it."""
    return str(line.get("error", "")).startswith("No module named")


def commit_of(line: dict[str, Any]) -> str:
    """Seven digits, and what says that the checkout had changes."""
    tool = line.get("tool") or {}
    full = line.get("git") or line.get("beside") or tool.get("git") or "unknown"
    digits, _, changes = full.partition("-")
    return digits[:7] + ("-dirty" if changes or tool.get("dirty") else "")


def read_group(files: list[str], results: pathlib.Path = RESULTS) -> Group:
    try:
        lines = [modern(json.loads(text)) for name in files for text in (results / name).read_text(encoding="utf-8").splitlines()]
        return Group(tuple(files), tuple(lines), tuple(points.read(str(results / name) for name in files)))
    except OSError as error:
        raise NotShown(f"{error.filename} can't be read ({error.strerror})") from error
    except (ValueError, points.BadLine) as error:
        raise NotShown(f"{' or '.join(files)} can't be shown ({error})") from error


def read_selection(path: pathlib.Path = SELECTION) -> dict[str, list[str]]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotShown(f"{path.name} can't be read ({error})") from error


def read_groups() -> dict[str, Group]:
    return {name: read_group(files) for name, files in read_selection().items()}


def newest(gpu: str, part: str, results: pathlib.Path) -> tuple[str, str] | None:
    """Folder and date of a part's newest file: of several hosts' on one day, the one with the most GPUs."""
    found = []
    for path in results.glob(f"{gpu}*/*-{part}.jsonl"):
        folder, date = path.parent.name, path.name.removesuffix(f"-{part}.jsonl")
        several = re.fullmatch(re.escape(gpu) + r"(?:-x(\d+))?", folder)
        if several and re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            found.append((date, int(several[1] or 1), folder))
    if not found:
        return None
    date, _, folder = max(found)
    return folder, date


def select(gpu: str, selection: dict[str, list[str]], results: pathlib.Path = RESULTS) -> dict[str, list[str]]:
    """The selection with the newest results of a GPU, of one commit within each group."""
    chosen = dict(selection)
    for group, (needed, parts) in PARTS.items():
        found = newest(gpu, needed, results)
        if found is None:
            continue
        folder, date = found
        commits = read_group([f"{folder}/{date}-{needed}.jsonl"], results).commits
        files = [f"{folder}/{date}-{part}.jsonl" for part in parts]
        present = [name for name in files if (results / name).exists()]
        chosen[group] = [name for name in present if set(read_group([name], results).commits) <= set(commits)]
    return chosen


def write_selection(selection: dict[str, list[str]], path: pathlib.Path = SELECTION) -> None:
    path.write_text(json.dumps(selection, indent=2) + "\n", encoding="utf-8")
