# SPDX-License-Identifier: Apache-2.0
"""A checkout with bench/run.sh in it, and programs that only write down their words: what tests of its parts share."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Checkout(unittest.TestCase):
    """Its programs write a line with their words to the file that they are told."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = root = pathlib.Path(folder.name, "checkout")
        for name in ("bench/run.sh", "tests/support/parts.sh"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())
        (root / "bench/tables.py").write_text(f"import sys; open('{root}/pages', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n")
        writes = """for word; do
  case $last in --dtype) dtype=$word;; --jsonl | --json | --machine) file=$word;; esac; last=$word
done
"""
        members = '"tool": "%s", "kernel": "sm90_attention", "dtype": "%s", "words": "%s"'
        line = f"""printf '{{{members}}}\\n' TOOL "$dtype" "$*" >MODE"$file"\n"""
        version = "[ \"$1\" != --version ] || { echo 'ringattn 1 (git abc, x)'; exit 0; }\n"
        ours = writes + line.replace("TOOL", "ours").replace("MODE", "")
        self.executable("bin/ringattn", version + ours)
        masks = '[ -n "$file" ] || exit 0\n'  # lists are written elsewhere
        peer = '[ "$1" != -c ] || exit 0\n' + writes + masks + line.replace("TOOL", "peer").replace("MODE", ">")
        self.executable("bin/torch", peer)
        self.executable("launch/ringattn-mpirun", ours)
        self.gpus(1)
        self.environment = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "PYTHON": f"{root}/bin/torch"}
        self.environment |= {"RINGATTN_PROGRAM": f"{root}/bin/ringattn", "BENCH_MODEL": "a", "BENCH_DATE": "day"}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def executable(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)

    def gpus(self, count: int) -> None:
        listing = "".join(f"GPU {gpu}: a\\n" for gpu in range(count))
        self.executable("bin/nvidia-smi", f"case $* in *query*) echo 'NVIDIA H200';; *) printf '{listing}';; esac\n")

    def bench(self, code: int, *words: str) -> subprocess.CompletedProcess:
        command = ["bash", str(self.root / "bench/run.sh"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertEqual(list((self.root / "bench/results").glob("*/.lines*")), [])
        return done

    def lines(self, part: str) -> list[dict]:
        path = self.root / f"bench/results/a/day-{part}.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []

    def measure(self, part: str, code: int) -> list[dict]:
        self.bench(code, part)
        return self.lines(part)

    def pages(self) -> list[str]:
        path = self.root / "pages"
        return path.read_text().splitlines() if path.exists() else []

    def decode_bench(self) -> None:
        self.words_bench("decode_gpu_bench")

    def words_bench(self, program: str) -> None:
        self.executable(f"bin/{program}", """printf '{"tool": "ours", "words": "%s"}\n' "$*"
""")
