# SPDX-License-Identifier: Apache-2.0
"""The program takes the words of every part of bench/run.sh: each command of ours is planned by the program itself, on a
host without a GPU, where the part has the masks and the machine model that it makes. Usage: words_test.py PROGRAM."""

import os
import pathlib
import shlex
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True

import checkout  # noqa: E402  (it lies beside this)

PROGRAM = pathlib.Path(sys.argv.pop()).resolve() if len(sys.argv) > 1 else pathlib.Path()
# Plans the words instead of doing them. Ranks are threads here, and transports are those of the host.
WRAPPER = """
import json, os, subprocess, sys

words, ranks, kept, files = sys.argv[1:], [], [], {{}}
if words == ["--version"]:
    print("ringattn 1 (git abc, x)")
    sys.exit()
if words[0] == "-np":
    ranks, words = ["--ranks", words[1]], words[2:]
pending = list(words)
while pending:
    word = pending.pop(0)
    if word in ("--jsonl", "--json", "--machine") and not (word == "--machine" and os.path.exists(pending[0])):
        files[word] = pending.pop(0)
    elif word == "--transport":
        assert pending.pop(0) in ("p2p", "nccl")
    else:
        kept.append(word)
if words[0] == "info":
    model = {{"name": "a", "flops_per_second": 1e12, "link_bytes_per_second": 5e9, "latency_seconds": 2e-5}}
    open(files["--machine"], "w").write(json.dumps(model))
    sys.exit()
environment = {{**os.environ, "CUDA_VISIBLE_DEVICES": ""}}
environment.pop("RINGATTN_PROGRAM", None)
done = subprocess.run([{program!r}, *kept, *ranks, "--dry-run"], capture_output=True, text=True, env=environment)
if done.returncode:
    sys.exit(f"{{' '.join(words)}}: code {{done.returncode}}, {{done.stderr}}")
line = {{"tool": "ours", "kernel": "sm90_attention", "words": " ".join(words)}}
open(files.get("--jsonl") or files["--json"], "w").write(json.dumps(line) + "\\n")
"""
OTHERS = ("attention_gpu_bench", "decode_gpu_bench", "compress_gpu_bench", "gemm_gpu_bench", "ssm_gpu_bench")


class Words(checkout.Checkout):
    def setUp(self):
        super().setUp()
        script = self.root / "plan.py"
        script.write_text(WRAPPER.format(program=str(PROGRAM)))
        plan = f'exec {shlex.quote(sys.executable)} -B {script} "$@"\n'
        self.executable("bin/ringattn", plan)
        self.executable("launch/ringattn-mpirun", plan)
        for program in OTHERS:
            self.words_bench(program)
        # Lists are written by the peer itself.
        real = f'case $* in *--write-masks*) exec {shlex.quote(sys.executable)} -B "$@";; esac\n'
        peer = (self.root / "bin/torch").read_text().removeprefix("#!/bin/sh\n")
        self.executable("bin/torch", real + peer)
        (self.root / "bench/peers").mkdir()
        for name in ("sparse.py", "common.py"):
            (self.root / "bench/peers" / name).write_bytes((checkout.ROOT / "bench/peers" / name).read_bytes())

    def test_of_every_part_on_two_gpus(self):
        self.gpus(2)
        self.environment |= {"BENCH_ROUNDS": "1"}
        listed = subprocess.run(["bash", str(self.root / "bench/run.sh"), "--list"], capture_output=True, text=True,
                                env=self.environment)  # fmt: skip
        parts = [line.split()[0] for line in listed.stdout.splitlines()]
        self.assertGreater(len(parts), 25)
        done = self.bench(0, "--minutes", "1000", *parts)
        self.assertNotIn("skipped", done.stdout)
        planned = [line for part in parts for line in self.lines(part) if line["tool"] == "ours" and "--seq" in line["words"]]
        self.assertGreater(len(planned), 60)

    def test_a_word_that_the_program_does_not_take_is_seen(self):
        path = self.root / "bench/run.sh"
        text = path.read_text()
        self.assertIn("--form expanded --heads 16", text)
        path.write_text(text.replace("--form expanded --heads 16", "--form expended --heads 16"))
        done = self.bench(1, "latent-ring")
        self.assertIn("expended", done.stdout + done.stderr)


if __name__ == "__main__":
    if not os.access(PROGRAM, os.X_OK) or PROGRAM.is_dir():
        print("usage: words_test.py PROGRAM", file=sys.stderr)
        sys.exit(2)
    unittest.main()
