#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two builds of attention_gpu_bench in turn on one card: is the newer one slower anywhere?

  bench/gate.py OLD/bin/attention_gpu_bench NEW/bin/attention_gpu_bench [--rounds 3] [--output lines.jsonl] [--least 0.99]

Each round measures every head_dim with the old build and then with the new one, so both see the card equally warm. Of
each point the medians over the rounds are compared. Prints a line a point, and exits 1 if new / old is below --least
anywhere. --output keeps every line of both builds, marked "build": "old" or "new", with the round."""
import argparse
import json
import statistics
import subprocess
import sys

HEAD_DIMS = (128, 64, 256, 192, 96)
POINT = ("heads", "kv_heads", "head_dim", "head_dim_v", "mask", "seq")


def lines_of(program, head_dim):
    done = subprocess.run([program, "gate", "sm90_attention", str(head_dim)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"gate.py: {program} failed ({done.stderr.strip()}). Build it for this GPU.")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)), help="the ones to measure")
    parser.add_argument("--least", type=float, default=0.99, help="the smallest new / old that passes")
    parser.add_argument("--output", help="a JSONL file for every line of both builds")
    options = parser.parse_args()

    rates, kept = {}, []
    for round_number in range(options.rounds):
        for head_dim in map(int, options.head_dims.split(",")):
            for build, program in (("old", options.old), ("new", options.new)):
                for line in lines_of(program, head_dim):
                    kept.append({"build": build, "round": round_number, **line})
                    point = tuple(line[key] for key in POINT)
                    rates.setdefault(point, {}).setdefault(build, []).append(line["tflops"])
    if options.output:
        with open(options.output, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in kept)

    slower = 0
    for point, builds in rates.items():
        old, new = (statistics.median(builds[build]) for build in ("old", "new"))
        heads, kv_heads, dim, dim_v, mask, seq = point
        dims = str(dim) if dim == dim_v else f"{dim}/{dim_v}"
        verdict = "" if new / old >= options.least else "  slower"
        slower += bool(verdict)
        print(f"{dims:>8} {heads:>3}/{kv_heads:<3} {mask:<7} {seq:>7}  {old:6.1f} -> {new:6.1f}  {new / old:.3f}{verdict}")
    print(f"{len(rates)} points, {slower} below {options.least}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
