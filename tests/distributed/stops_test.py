#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stops, kills or blocks one rank of a job at a named place (src/base/moment.hpp) and holds the job to its promise: it
ends within the timeout and ten seconds with one code and one message, leaves no process behind, and its output is there
as a whole or not at all. Ranks are threads, processes of mpirun, or processes that meet at RINGATTN_STORE (tcp).
Usage: stops_test.py PROGRAM [MPIRUN FLAGS...]. A sample of the cases; RINGATTN_TEST_LONG=1 runs all of them."""
import concurrent.futures
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

TIMEOUT = 3.0
BOUND = TIMEOUT + 10.0
START = 8.0  # for mpirun and the job itself on a busy machine
MARK = "TEST_RINGATTN_JOB"
STORE_RANKS = str(pathlib.Path(__file__).resolve().parents[1] / "support" / "store_ranks.py")

JOB = ["--synthetic", "7", "--seq", "1500", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--dtype", "fp32",
       "--block", "256", "--backend", "cpu", "--threads", "1", "--timeout", f"{TIMEOUT:g}"]

# Three super-segments, so states travel from rank to rank.
SCAN = ["--op", "ssd", "--synthetic", "7", "--seq", "140000", "--heads", "2", "--head-dim", "8", "--state-dim", "8",
        "--backend", "cpu", "--threads", "1", "--timeout", f"{TIMEOUT:g}"]

# In the order of a job's life. What has happened to the output when all ranks have come so far: nothing, or everything.
PLACES = {"init": False, "bootstrap": False, "split": False, "staging": False, "first-block": False,
          "middle-block": False, "last-block": False, "states": False, "writing": False, "renaming": None,
          "last-meeting": True, "parting": True, "exit": True}
OF_PROCESSES = {"bootstrap", "last-meeting", "parting"}

SAMPLE = {("mpi", "stop", 3, 2, "init"), ("mpi", "stop", 2, 1, "split"), ("mpi", "stop", 3, 0, "middle-block"),
          ("mpi", "stop", 3, 2, "writing"), ("mpi", "stop", 3, 2, "parting"), ("mpi", "stop", 3, 2, "exit"),
          ("mpi", "kill", 3, 0, "renaming"), ("tcp", "stop", 3, 2, "init"), ("tcp", "kill", 3, 0, "bootstrap"),
          ("tcp", "stop", 2, 1, "split"), ("tcp", "kill", 3, 0, "middle-block"), ("tcp", "stop", 3, 0, "middle-block"),
          ("tcp", "kill", 3, 2, "writing"), ("tcp", "stop", 3, 0, "renaming"), ("tcp", "kill", 3, 2, "parting"),
          ("tcp", "stop", 3, 2, "parting"), ("tcp", "stop", 3, 2, "exit"), ("threads", "block", 3, 2, "split"),
          ("threads", "block", 3, 0, "writing"), ("threads", "block", 2, 1, "exit"),
          ("mpi", "stop", 3, 2, "states"), ("mpi", "kill", 3, 0, "states"), ("threads", "block", 3, 0, "states")}


def job_of(place):
    return SCAN if place == "states" else JOB


def all_cases():
    """Threads can only be blocked: a signal stops or kills all ranks of a process."""
    for place, size in itertools.product(PLACES, (2, 3, 8)):
        for rank in (0, size - 1):
            for action in ("stop", "kill"):
                yield "mpi", action, size, rank, place
                yield "tcp", action, size, rank, place
            if place not in OF_PROCESSES:
                yield "threads", "block", size, rank, place


def processes_of(mark):
    """The processes whose environment carries the mark, by their number."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and "Z" not in (folder / "stat").read_text().split()[2]:
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended, or is somebody else's
    return found


def run(words, environment, limit):
    """Exit code (None: it hung), what it printed, the seconds that it took, and how many processes stayed."""
    mark = str(uuid.uuid4())
    begin = time.monotonic()
    with tempfile.TemporaryFile() as text:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=text, stderr=text, start_new_session=True,
                                   env={**environment, MARK: mark})
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - begin
        # The launcher's helpers, and ranks that it has just killed, need a moment.
        while (left := processes_of(mark)) and code is not None and time.monotonic() - begin < seconds + 3.0:
            time.sleep(0.05)
        for number in left:
            os.kill(number, signal.SIGKILL)
        process.wait()
        text.seek(0)
        return code, text.read().decode(errors="replace"), seconds, len(left)


class Matrix:
    def __init__(self, program, launcher, folder):
        self.program = program
        self.launcher = launcher
        self.folder = pathlib.Path(folder)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGATTN_")}
        self.environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                             "OMP_NUM_THREADS": "1"}
        self.whole = {}
        for place in ("init", "states"):
            whole = self.folder / "whole"
            subprocess.run([program, "run", *job_of(place), "--output", whole, "--force"], env=self.environment,
                           check=True, stdout=subprocess.DEVNULL)
            self.whole[job_of(place) is SCAN] = whole.read_bytes()

    def check(self, case):
        """What is wrong with a case, and what it printed."""
        transport, action, size, rank, place = case
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        output = folder / "out"
        job = job_of(place)
        words = [self.program, "verify", *job] if place == "split" else [self.program, "run", *job, "--output", output]
        if transport == "mpi":
            words = [*self.launcher, "-np", str(size), *words]
        elif transport == "tcp":
            words = [sys.executable, STORE_RANKS, str(size), "--except", str(rank), "--limit", str(BOUND + START), "--",
                     *words]
        else:
            words = [*words, "--ranks", str(size)]
        code, text, seconds, left = run(words, {**self.environment, "TEST_RINGATTN_MOMENT": f"{action}:{rank}:{place}"},
                                        BOUND + START + 30.0)
        return case, list(self.problems(case, code, text, seconds, left, output)), text

    def problems(self, case, code, text, seconds, left, output):
        transport, action, size, rank, place = case
        messages = text.count("ringattn: error:")
        if code is None:
            yield "it hangs"
        elif transport == "tcp":
            # The others need nobody any more where one leaves, and can't meet where rank 0 never comes.
            wanted_code = 0 if place == "exit" else 6
            alone = rank == 0 and place in ("init", "bootstrap")
            most = 0 if place == "exit" else size - 1 if alone else 1
            if code != wanted_code or not min(most, 1) <= messages <= most:
                yield f"code {code}, {messages} messages"
        elif action == "kill":
            # mpirun ends the others at once, so whether one of them still prints depends on who was faster.
            if code == 0 or messages > 1:
                yield f"code {code}, {messages} messages"
        elif code != 6 or messages != 1:
            yield f"code {code}, {messages} messages"
        if seconds > BOUND + START:
            yield f"{seconds:.1f} s"
        if left:
            yield f"{left} processes stay"
        if place == "split":
            return
        there = output.exists()
        if there and output.read_bytes() != self.whole[job_of(place) is SCAN]:
            yield "the output is torn"
        # Rank 0 renames. It may do so before mpirun ends it, or not; even if it was stopped, for mpirun wakes what it ends.
        wanted = PLACES[place]
        if wanted is None and rank == 0 and (action != "stop" or transport == "tcp"):
            wanted = False
        if wanted is not None and there != wanted:
            yield f"the output {'is there' if there else 'is missing'}"
        # A process that is stopped or killed can't remove its file, but the others can.
        others = [path.name for path in output.parent.iterdir() if path != output]
        if others:
            yield f"{others} stays"


def main():
    program, launcher = sys.argv[1], sys.argv[2:]
    long = os.environ.get("RINGATTN_TEST_LONG") == "1"
    cases = [case for case in all_cases() if (long or case in SAMPLE) and (launcher or case[0] != "mpi")]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(program, launcher, folder)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for case, problems, text in pool.map(matrix.check, cases):
                failed += bool(problems)
                print(*case, "; ".join(problems) or "ok", flush=True)
                if problems:
                    print(text, flush=True)
    print(f"{len(cases)} cases, {failed} failed")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
