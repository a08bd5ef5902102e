# SPDX-License-Identifier: Apache-2.0
"""RINGATTN_RANGES=1 gives calls, plans and ring steps names in profilers; otherwise nothing is done for it."""

import importlib.util
import os
import subprocess
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import torch
from ringattn import _job, _ranges

RECORDER = os.environ.get("TEST_RINGATTN_NVTX")  # absent in builds without CUDA


def work(world=None) -> None:
    q = torch.ones(64, 2, 32)
    ringattn.attention(q, q, q, world=world, layout=None if world is None else "contiguous")


def traced_names() -> list[str]:
    """What the profiler has of a call on one rank, by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
        work()
    return [event.name for event in profiler.events() if event.name.startswith("ringattn")]


class Ranges(unittest.TestCase):
    def test_ranges_are_off(self):
        self.assertIs(_ranges.ranged(work, "work"), work)
        self.assertEqual(traced_names(), [])
        (prepared,) = ringattn.self_world()._objects.values()
        self.assertIs(prepared._run, _job.lib.attention_run)

    def test_calls_have_names(self):
        named = os.environ | {"RINGATTN_RANGES": "1"} | ({"NVTX_INJECTION64_PATH": RECORDER} if RECORDER else {})
        done = subprocess.run([sys.executable, __file__, "work"], env=named, capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stderr)
        again = ["ringattn.attention", "ringattn.attention.run"]
        self.assertEqual(done.stdout.split(), ["ringattn.attention", "ringattn.attention.plan", "ringattn.attention.run", *again])
        if RECORDER is None:
            return
        lines = [line for line in done.stderr.splitlines() if line.startswith("nvtx ")]
        calls = [line for line in lines if line.startswith("nvtx push ringattn.attention")]
        self.assertEqual(calls[:3], [f"nvtx push ringattn.attention.{call}" for call in ("plan", "run", "run")])
        steps = {line.removeprefix("nvtx push ringattn.ring.") for line in lines if "ring." in line}
        self.assertEqual(steps, {"post 0", "wait 0", "compute 0"})  # a short sequence is one block
        self.assertEqual(lines.count("nvtx pop"), len(lines) - lines.count("nvtx pop"))

    def test_another_value_is_refused(self):
        call = "import numpy, ringattn; q = numpy.ones((8, 1, 8), 'float32'); ringattn.attention(q, q, q)"
        done = subprocess.run([sys.executable, "-c", call], env=os.environ | {"RINGATTN_RANGES": "on"}, capture_output=True,
                              text=True, timeout=200)  # fmt: skip
        self.assertIn('RINGATTN_RANGES is "on" (it takes 0 or 1)', done.stderr)


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        print("\n".join(traced_names()))
        ringattn.run_ranks(2, work)
    else:
        unittest.main()
