#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures for which share of a job ranks wait for blocks, on a link slowed to the rate of the computation.

Runs a full-mask job on two ranks as fast as it goes, then with RINGATTN_PACE such that moving the blocks takes as long
as folding them, with and without overlap, as threads and under mpirun. The plan knows both rates. Prints a JSON line
a run.
Usage: bench/overlap.py [--ringattn PROGRAM] [--max-exposed PERCENT] > results.jsonl"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

JOB = ["run", "--synthetic", "1", "--seq", "16k", "--heads", "4", "--kv-heads", "2", "--head-dim", "128",
       "--mask", "full", "--threads", "1"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]


def measure(ringattn, world, pace, flops, overlap):
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        machine = os.path.join(folder, "machine.json")
        with open(machine, "w") as file:
            json.dump({"name": "paced", "flops_per_second": flops, "link_bytes_per_second": pace or 5e9,
                       "latency_seconds": 2e-5}, file)
        words = [ringattn, *JOB, "--overlap", overlap, "--machine", machine, "--json", report, "--quiet"]
        command = [*MPIRUN, *words] if world == "mpi" else [*words, "--ranks", "2"]
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        if pace:
            environment["RINGATTN_PACE"] = str(int(pace))
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        with open(report) as file:
            return json.load(file)


def measure_worlds(ringattn):
    """Prints the lines. Returns the greatest percentage of exposed communication with overlap."""
    worst = 0.0
    for world in ["threads"] + (["mpi"] if shutil.which("mpirun") else []):
        fast = measure(ringattn, world, 0, 5e10, "on")
        flops = fast["tflops_per_rank"] * 1e12
        pace = fast["plan"]["bytes_moved"] / 2 / (fast["time_ms"]["median"] / 1e3)
        for overlap in ["on", "off"]:
            report = measure(ringattn, world, pace, flops, overlap)
            percent = 100.0 * report["exposed_comm_ms"] / report["time_ms"]["median"]
            if overlap == "on":
                worst = max(worst, percent)
            line = {"what": "overlap", "world": world, "overlap": overlap, "pace_bytes_per_second": int(pace),
                    "time_ms": report["time_ms"]["median"], "exposed_comm_ms": report["exposed_comm_ms"],
                    "exposed_percent": round(percent, 2), "blocks": report["plan"]["blocks"],
                    "git": report["tool"]["git"], "command": " ".join(report["argv"][1:])}
            print(json.dumps(line), flush=True)
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ringattn", default="build/release/bin/ringattn")
    parser.add_argument("--max-exposed", type=float, help="fail above this percentage of exposed waiting")
    arguments = parser.parse_args()
    try:
        worst = measure_worlds(arguments.ringattn)
    except (OSError, subprocess.CalledProcessError) as error:  # a run's own message stands above
        print(f"error: a run failed ({error}).", file=sys.stderr)
        return 4
    if arguments.max_exposed is not None and worst > arguments.max_exposed:
        print(f"exposed waiting of {worst:.1f} % is above {arguments.max_exposed} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
