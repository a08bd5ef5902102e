# SPDX-License-Identifier: Apache-2.0
"""Tables of attention on CPUs beside PyTorch, from lines of bench/peers/sdpa_cpu.py."""

from result_lines import Group, size

README_JOBS = ((2 << 10, "causal"), (16 << 10, "causal"), (16 << 10, "full"))  # tokens and masks
README_HEAD_DIM = 128


def cells(group: Group) -> dict[tuple[str, int, str, int], str]:
    """TFLOP/s of ringattn and of PyTorch, and the median ratio, by dtype, tokens, mask and head_dim of jobs with GQA."""
    lines = [line for line in group.lines if line.get("what") == "sdpa_cpu" and line["kv_heads"] < line["heads"]]
    found = {}
    for line in lines:
        rates = (line[f"{name}_gflops"] / 1e3 for name in ("ringattn", "pytorch"))
        text = ", ".join(f"{rate:#.3g}" for rate in rates)
        found[line["dtype"], line["seq"], line["mask"], line["head_dim"]] = f"{text}: {line['ratio']:.2f}"
    return found


def rows(group: Group) -> list[list[str]]:
    found = cells(group)
    jobs = [job for dtype, *job in found if dtype == "bf16"]
    return [["8/2 heads", "bf16", "fp32"],
            *([f"{size(tokens)}, {mask}, head_dim {dim}", *(found[dtype, tokens, mask, dim] for dtype in ("bf16", "fp32"))]
              for tokens, mask, dim in jobs)]  # fmt: skip


def readme_rows(group: Group) -> list[list[str]]:
    found = cells(group)
    heads = [f"{size(tokens)}, {mask}" for tokens, mask in README_JOBS]
    return [["8/2 heads of 128: ringattn, PyTorch, ratio", *heads],
            *([dtype, *(found[dtype, *job, README_HEAD_DIM] for job in README_JOBS)] for dtype in ("bf16", "fp32"))]
