#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""support.py PROGRAM [--check]: writes the tables of docs/support.md from the kernels that `PROGRAM info` lists; with --check it
says whether they are up to date. A build without CUDA lists its own kernels only, so it checks these and writes nothing."""

import json
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "support.md"
DTYPES = ("bf16", "fp16", "fp32")
# A column, and the kernels that run there, by the beginning of their names.
COLUMNS = (("H100, H200 (9.0)", ("sm90_", "sm80_", "cuda_")), ("Other NVIDIA GPUs from 8.0 on", ("sm80_", "cuda_")),
           ("CPU", ("cpu_",)))  # fmt: skip


def kernels_of(program: str) -> list[dict]:
    said = subprocess.run([program, "info", "--json", "-"], capture_output=True, text=True, check=True).stdout
    return json.loads(said)["kernels"]


def dtypes_of(kernel: dict) -> list[str]:
    return kernel["supports"].split(";")[0].split(", ")


def by_architecture(kernels: list[dict]) -> list[str]:
    """Kernels in order of preference, for each op, dtype and column. Dtypes with the same kernels share a row."""
    lines = [f"| Op | Dtype | {' | '.join(title for title, _ in COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for op in dict.fromkeys(kernel["op"] for kernel in kernels):
        rows: dict[tuple[str, ...], list[str]] = {}
        for dtype in DTYPES:
            able = [kernel["name"] for kernel in kernels if kernel["op"] == op and dtype in dtypes_of(kernel)]
            cells = (", ".join(f"`{name}`" for name in able if name.startswith(begins)) for _, begins in COLUMNS)
            rows.setdefault(tuple(cell or "—" for cell in cells), []).append(dtype)
        lines += [f"| {op} | {', '.join(dtypes)} | {' | '.join(cells)} |" for cells, dtypes in rows.items()]
    return lines


def of_each(kernels: list[dict]) -> list[str]:
    lines = ["| Kernel | Op | Takes |", "|---|---|---|"]
    return lines + [f"| `{kernel['name']}` | {kernel['op']} | {kernel['supports']} |" for kernel in kernels]


def with_tables(text: str, kernels: list[dict]) -> str:
    for name, lines in (("architectures", by_architecture(kernels)), ("kernels", of_each(kernels))):
        begin, end = f"<!-- table:{name} -->\n", f"<!-- /table:{name} -->"
        text = re.sub(f"{begin}.*?{end}", lambda _: begin + "\n".join(lines) + "\n" + end, text, flags=re.DOTALL)  # noqa: B023
    return text


def main() -> int:
    program, *options = sys.argv[1:]
    kernels, text = kernels_of(program), PAGE.read_text(encoding="utf-8")
    if not any(kernel["backend"] == "cuda" for kernel in kernels):
        lines = [line for line in of_each(kernels)[2:] if line not in text]
        print("\n".join(lines) or "the CPU kernels are up to date; this build has no others")
        return 1 if lines else 0
    current = with_tables(text, kernels)
    if options == ["--check"]:
        print("up to date" if current == text else f"{PAGE.name} is not up to date. Run docs/reference/support.py {program}.")
        return 0 if current == text else 1
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
