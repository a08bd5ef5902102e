#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts a program as the ranks of a world that meets at RINGATTN_STORE, without MPI, and ends with the code that all of
them end with; 99 where they differ, 98 where they don't end.
Usage: store_ranks.py RANKS [--except RANK] [--missing RANK] [--limit SECONDS] [--host HOST] [--set RANK NAME=VALUE]...
-- COMMAND...
The rank of --except is killed or stopped, or leaves, by itself: its code doesn't count, and it is ended when the others
have. That of --missing is not started."""
import argparse
import os
import signal
import socket
import subprocess
import sys
import time


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_arguments(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("--except", type=int, default=None, dest="excepted")
    parser.add_argument("--missing", type=int, default=None)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--host", default="127.0.0.1")  # of the store's address
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("RANK", "NAME=VALUE"))
    split = words.index("--")
    return parser.parse_args(words[:split]), words[split + 1:]


def start(words, options):
    # No variables of the launcher that may have started this process.
    strangers = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "RINGATTN_STORE_SECRET")
    common = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
    common |= {"RINGATTN_STORE": f"{options.host}:{free_port()}", "WORLD_SIZE": str(options.ranks)}
    processes = {}
    for rank in range(options.ranks):
        own = dict(pair.split("=", 1) for of, pair in options.set if int(of) == rank)
        if rank != options.missing:
            processes[rank] = subprocess.Popen(words, stdin=subprocess.DEVNULL, env={**common, "RANK": str(rank)} | own)
    return processes


def main():
    options, words = read_arguments(sys.argv[1:])
    processes = start(words, options)
    counted = {rank: process for rank, process in processes.items() if rank != options.excepted}
    end = time.monotonic() + options.limit
    hung = False
    for process in counted.values():
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung = True
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    codes = {rank: process.returncode for rank, process in counted.items()}
    if hung or len(set(codes.values())) != 1:
        print(f"codes of the ranks: {codes}", file=sys.stderr)
        return 98 if hung else 99
    return codes.popitem()[1]


if __name__ == "__main__":
    sys.exit(main())
