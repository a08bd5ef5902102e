#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stops, kills or blocks a rank of a job, or two, at a named failpoint (src/base/failpoint.hpp) and holds the job to its
promise. Counted from that moment, its message comes within the timeout and five seconds and names the rank, and it ends within
the timeout and ten seconds with one code; it leaves no process behind, and its output is there as a whole or not at
all. Ranks are threads, processes of mpirun (mpi), the same under launch/ringattn-mpirun (launcher), or processes that
meet at RINGATTN_STORE (tcp). With --gpus ranks are threads that share a GPU, and processes with a GPU each (p2p, nccl).
Usage: stops_test.py [--gpus] [--faults LIBRARY] PROGRAM [MPIRUN FLAGS...]. LIBRARY is tests/support/faults.cpp, for the
cases that need it. A sample of the cases; RINGATTN_TEST_LONG=1 runs all."""
import concurrent.futures
import itertools
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid

TIMEOUT = 3.0
LONG_TIMEOUT = 6.0  # longer than a failed rank gets to end
NOTICED = 5.0  # so long after the timeout the message has come at the latest
BOUND = 10.0   # and the job has ended
SLACK = 0.5  # for looking and printing on a busy machine
START = 30.0  # for all that comes before the moment
MARK = "TEST_RINGATTN_JOB"
ERROR = "ringattn: error:"
LAUNCHER_ERROR = "ringattn-mpirun: error:"
STORE_RANKS = str(pathlib.Path(__file__).resolve().parents[1] / "support" / "store_ranks.py")
LAUNCHER = str(pathlib.Path(__file__).resolve().parents[2] / "launch" / "ringattn-mpirun")

JOB = ["--synthetic", "7", "--seq", "1500", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--dtype", "fp32",
       "--block", "256", "--backend", "cpu", "--threads", "1", "--timeout", f"{TIMEOUT:g}"]

# Three super-segments, so states are sent from rank to rank.
SSM = ["--op", "ssd", "--synthetic", "7", "--seq", "140000", "--heads", "2", "--head-dim", "8", "--state-dim", "8",
        "--backend", "cpu", "--threads", "1", "--timeout", f"{TIMEOUT:g}"]

GPU_JOB = ["--synthetic", "7", "--seq", "1500", "--heads", "2", "--kv-heads", "1", "--head-dim", "64", "--dtype", "bf16",
           "--block", "256", "--backend", "cuda", "--timeout", f"{TIMEOUT:g}"]

# A job whose ranks take half a minute for reading their queries, a piece a second (FAULT_PREAD_SECONDS).
SLOW_JOB = ["--input", "", "--layout", "striped", "--stripe", "32", "--backend", "cpu", "--threads", "1",
            "--timeout", f"{LONG_TIMEOUT:g}"]
SLOW_TOKENS = 3000

# In the order of a job's life. What has happened to the output when all ranks have come so far: nothing, or everything.
FAILPOINTS = {"init": False, "bootstrap": False, "joining": False, "split": False, "staging": False,
          "slow-staging": False,  # the others have much to read when the first rank is at "staging"
          "first-block": False,
          "middle-block": False, "last-block": False, "states": False, "writing": False, "renaming": None,
          "last-collective": True, "leaving": True, "exit": True, "left": True}
OF_PROCESSES = {"bootstrap", "slow-staging", "last-collective", "leaving"}
OF_LAUNCHER = {"left"}  # MPI has ended, and plain mpirun waits for ever for a rank that is stopped
# Where MPI itself starts and ends, it doesn't say for whom it waits.
UNNAMED = {("mpi", "init"), ("mpi", "exit"), ("p2p", "exit"), ("nccl", "exit")}
# How messages name ranks that are missed.
BLAME = (r"error: (.*) (?:fell silent|did not come|is gone|left while)", r"waits for (.*?)\)",
         r"can't reach (rank 0)'s")

SAMPLE = {("mpi", "stop", 3, 0, "init"), ("mpi", "stop", 3, 2, "bootstrap"), ("mpi", "stop", 2, 1, "split"),
          ("mpi", "stop", 3, 0, "middle-block"),
          ("mpi", "stop", 3, 2, "writing"), ("mpi", "stop", 3, 2, "leaving"), ("mpi", "stop", 3, 2, "exit"),
          ("mpi", "kill", 3, 0, "renaming"), ("tcp", "stop", 3, 2, "init"), ("tcp", "kill", 3, 0, "bootstrap"),
          ("tcp", "stop", 2, 1, "split"), ("tcp", "kill", 3, 0, "middle-block"), ("tcp", "stop", 3, 0, "middle-block"),
          ("tcp", "kill", 3, 2, "writing"), ("tcp", "stop", 3, 0, "renaming"), ("tcp", "kill", 3, 2, "leaving"),
          ("tcp", "stop", 3, 2, "leaving"), ("tcp", "stop", 3, 2, "exit"), ("threads", "block", 3, 2, "split"),
          ("threads", "block", 3, 0, "writing"), ("threads", "block", 2, 1, "exit"),
          ("threads", "block", 2, 1, "init"),
          ("launcher", "kill", 3, 0, "middle-block"), ("launcher", "kill", 3, 2, "init"),
          ("launcher", "kill", 2, 1, "exit"), ("launcher", "stop", 3, 2, "left"),
          ("mpi", "stop", 3, 2, "states"), ("mpi", "kill", 3, 0, "states"),
          ("threads", "block", 3, 0, "states"), ("mpi", "stop", 3, (0, 1), "init"), ("mpi", "stop", 4, (0, 1), "init"),
          ("mpi", "stop", 3, 1, "slow-staging"), ("tcp", "stop", 3, 1, "slow-staging")}


# In "joining" devices meet: p2p tries who reaches whose memory, NCCL makes its communicator.
GPU_FAILPOINTS = ("joining", "staging", "middle-block", "writing", "leaving", "exit")


def gpu_cases(gpus):
    """Threads share a GPU, which processes can't."""
    for failpoint, size in itertools.product(GPU_FAILPOINTS, (2, 3)):
        for rank in (0, size - 1):
            if failpoint not in OF_PROCESSES:
                yield "threads", "block", size, rank, failpoint
            if size <= gpus:
                for transport, action in itertools.product(("p2p", "nccl"), ("stop", "kill")):
                    yield transport, action, size, rank, failpoint


def all_cases():
    """Threads can only be blocked: a signal stops or kills all ranks of a process."""
    for size in (3, 4, 8):
        yield "mpi", "stop", size, (0, 1), "init"  # then the turn is that of all others
    for transport, rank in itertools.product(("mpi", "tcp"), (0, 1, 2)):
        yield transport, "stop", 3, rank, "slow-staging"
    for size, action in itertools.product((2, 3, 8), ("stop", "kill")):
        for rank, failpoint in itertools.product((0, size - 1), OF_LAUNCHER):
            yield "launcher", action, size, rank, failpoint
    failpoints = [failpoint for failpoint in FAILPOINTS if failpoint not in {"joining", "slow-staging", *OF_LAUNCHER}]
    for failpoint, size in itertools.product(failpoints, (2, 3, 8)):
        for rank in (0, size - 1):
            for action in ("stop", "kill"):
                yield "mpi", action, size, rank, failpoint
                if action == "kill":
                    yield "launcher", action, size, rank, failpoint
                yield "tcp", action, size, rank, failpoint
            if failpoint not in OF_PROCESSES:
                yield "threads", "block", size, rank, failpoint


def ranks_of(case):
    """The ranks that something is done to."""
    return case[3] if isinstance(case[3], tuple) else (case[3],)


def processes_of(mark):
    """The processes whose environment carries the mark, by their number."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and "Z" not in (folder / "stat").read_text().split()[2]:
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended, or belongs to another user
    return found


class Ended:
    """A job: its exit code (None: it hung), what it printed, how many of its processes stayed, and when after the
    moment its first message came and it ended (None: that didn't happen)."""

    def __init__(self, words, environment, failpoint_file):
        mark = str(uuid.uuid4())
        limit = time.monotonic() + START + LONG_TIMEOUT + BOUND + 30.0
        self.code = None
        message = end = None
        with tempfile.TemporaryFile() as text:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=text, stderr=text,
                                       start_new_session=True, env={**environment, MARK: mark})
            while end is None and time.monotonic() < limit:
                time.sleep(0.02)
                self.code = process.poll()
                if message is None and ERROR.encode() in os.pread(text.fileno(), 1 << 20, 0):
                    message = time.time()
                if self.code is not None:
                    end = time.time()
            # The launcher's helpers, and ranks that it has just killed, need a moment.
            give_up_at = time.monotonic() + 3.0
            while (left := processes_of(mark)) and end is not None and time.monotonic() < give_up_at:
                time.sleep(0.05)
            for number in left:
                os.kill(number, signal.SIGKILL)
            process.wait()
            self.text = os.pread(text.fileno(), 1 << 20, 0).decode(errors="replace")
        self.left = len(left)
        moment = failpoint_file.stat().st_mtime if failpoint_file.exists() else None
        self.noticed = message - moment if message and moment else None
        self.ended = end - moment if end and moment else None


def blamed(message):
    """The words of a message that name ranks."""
    return " ".join(words for pattern in BLAME for words in re.findall(pattern, message))


class Matrix:
    def __init__(self, program, launcher, faults, folder, gpus):
        self.program = program
        self.launcher = launcher
        self.faults = faults
        self.folder = pathlib.Path(folder)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGATTN_")}
        self.environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                             "OMP_NUM_THREADS": "1"}
        self.gpus = gpus
        self.wholes = {}

    def job_of(self, failpoint):
        if failpoint == "slow-staging":
            return ["--input", str(self.slow_input()), *SLOW_JOB[2:]]
        return GPU_JOB if self.gpus else SSM if failpoint == "states" else JOB

    def slow_input(self):
        """A file of zeros."""
        path = self.folder / "slow.safetensors"
        if not path.exists():
            header, end = [], 0
            for name, heads in (("q", 2), ("k", 1), ("v", 1)):
                begin, end = end, end + SLOW_TOKENS * heads * 32 * 4
                header.append(f'"{name}":{{"dtype":"F32","shape":[{SLOW_TOKENS},{heads},32],"data_offsets":[{begin},{end}]}}')
            text = ("{" + ",".join(header) + "}").encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
        return path

    def make_wholes(self, failpoints):
        """What each job of the cases gives when nothing happens."""
        for job in {tuple(self.job_of(failpoint)) for failpoint in failpoints}:
            whole = self.folder / "whole"
            subprocess.run([self.program, "run", *job, "--output", whole, "--force"], env=self.environment, check=True,
                           stdout=subprocess.DEVNULL)
            self.wholes[job] = whole.read_bytes()

    def check(self, case):
        """What is wrong with a case, and what it printed."""
        transport, action, size, rank, failpoint = case
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        output = folder / "out"
        failpoint_file = self.folder / f"{folder.name}.moment"
        job = self.job_of(failpoint)
        words = [self.program, "verify", *job] if failpoint == "split" else [self.program, "run", *job, "--output", output]
        ranks = ",".join(map(str, ranks_of(case)))
        environment = {**self.environment, "TEST_RINGATTN_FAILPOINT": f"{action}:{ranks}:{failpoint.removeprefix('slow-')}",
                       "TEST_RINGATTN_FAILPOINT_FILE": str(failpoint_file)}
        if failpoint == "slow-staging":
            environment |= {"LD_PRELOAD": self.faults, "FAULT_PREAD_SECONDS": "1",
                            "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0"}
        if transport == "launcher":
            words = [LAUNCHER, "--oversubscribe", "-np", str(size), *words[1:]]
            environment["RINGATTN_PROGRAM"] = self.program
        elif transport == "mpi":
            words = [*self.launcher, "-np", str(size), *words]
        elif transport in ("p2p", "nccl"):
            words = [*self.launcher, "-np", str(size), *words, "--transport", transport]
        elif transport == "tcp":
            words = [sys.executable, STORE_RANKS, str(size), "--except", ranks, "--limit",
                     str(START + LONG_TIMEOUT + BOUND), "--", *words]
        else:
            words = [*words, "--ranks", str(size)]
        ended = Ended(words, environment, failpoint_file)
        return case, list(self.problems(case, ended, output)), ended

    def problems(self, case, ended, output):
        transport, action, size, rank, failpoint = case
        timeout = LONG_TIMEOUT if failpoint == "slow-staging" else TIMEOUT
        code, messages = ended.code, ended.text.count(ERROR)
        if code is None:
            yield "it hangs"
        elif transport == "tcp":
            # The other ranks no longer need a rank that leaves, and can't meet where rank 0 never comes.
            wanted_code = 0 if failpoint == "exit" else 6
            alone = rank == 0 and failpoint in ("init", "bootstrap")
            most = 0 if failpoint == "exit" else size - 1 if alone else 1
            if code != wanted_code or not min(most, 1) <= messages <= most:
                yield f"code {code}, {messages} messages"
        elif transport == "launcher":
            # As below, but the code is the launcher's, and it says that a rank is gone unless a rank could.
            if code != 6 or messages > 1 or ended.text.count(LAUNCHER_ERROR) + messages < 1:
                yield f"code {code}, {messages} messages"
        elif action == "kill":
            # mpirun ends the others at once, so whether one of them still prints depends on who was faster.
            if code == 0 or messages > 1:
                yield f"code {code}, {messages} messages"
        elif code != 6 or messages != 1:
            yield f"code {code}, {messages} messages"
        if ended.ended is None:
            yield "the moment didn't come"
        elif ended.ended > timeout + BOUND + SLACK:
            yield f"it ended after {ended.ended:.1f} s"
        if ended.noticed is not None and ended.noticed > timeout + NOTICED + SLACK:
            yield f"the message came after {ended.noticed:.1f} s"
        # mpirun's way of killing the others leaves them no time to find out who is missing.
        if (transport == "tcp" or action != "kill") and (transport, failpoint) not in UNNAMED:
            for message in re.findall(f"{ERROR}.*", ended.text):
                for missed in ranks_of(case):
                    if not re.search(rf"\brank {missed}\b", blamed(message)):
                        yield f"rank {missed} isn't named"
        if ended.left:
            yield f"{ended.left} processes stay"
        if failpoint == "split":
            return
        there = output.exists()
        if there and output.read_bytes() != self.wholes[tuple(self.job_of(failpoint))]:
            yield "the output is torn"
        # Rank 0 renames. It may do so before mpirun ends it, or not; even if it was stopped, for mpirun wakes what it ends.
        wanted = FAILPOINTS[failpoint]
        if wanted is None and rank == 0 and (action != "stop" or transport == "tcp"):
            wanted = False
        if wanted is not None and there != wanted:
            yield f"the output {'is there' if there else 'is missing'}"
        # A process that is stopped or killed can't remove its file, but the others can.
        others = [path.name for path in output.parent.iterdir() if path != output]
        if others:
            yield f"{others} stays"


def main():
    words = sys.argv[1:]
    gpus = 0
    if words[0] == "--gpus":
        del words[0]
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) \
            if shutil.which("nvidia-smi") else None
        gpus = listed.stdout.count("UUID: GPU-") if listed else 0
        if gpus == 0:
            print("skipped: needs a GPU")
            return 77
    faults = words[1] if words[0] == "--faults" else None
    program, launcher = (words[2], words[3:]) if faults else (words[0], words[1:])
    long = os.environ.get("RINGATTN_TEST_LONG") == "1"
    possible = (case for case in (gpu_cases(gpus) if gpus else all_cases()) if launcher or case[0] in ("threads", "tcp"))
    cases = [case for case in possible if (gpus or long or case in SAMPLE) and (faults or case[-1] != "slow-staging")]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(program, launcher, faults, folder, gpus)
        matrix.make_wholes({case[-1] for case in cases})
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for case, problems, ended in pool.map(matrix.check, cases):
                failed += bool(problems)
                told = "no message" if ended.noticed is None else f"message after {ended.noticed:.1f} s"
                print(*case, f"({told})", "; ".join(problems) or "ok", flush=True)
                if problems:
                    print(ended.text, flush=True)
    print(f"{len(cases)} cases, {failed} failed")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
