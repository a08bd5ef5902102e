# SPDX-License-Identifier: Apache-2.0
"""The runner of resumable parts (tests/support/parts.sh), and the two scripts that are made of it, with programs that only
write down their words."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True

import checkout  # noqa: E402  (it lies beside this)
from checkout import ROOT  # noqa: E402


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True)


class Parts(unittest.TestCase):
    """A script of four parts: one that leaves a mark, one that can't run here, one that fails, one that takes long."""

    SCRIPT = """
set -euo pipefail
source "{root}/tests/support/parts.sh"
part first-one 1 "leaves a mark"
part gpu-one 1 "can't run here"
part bad 1 "fails"
part long 100 "takes long"
part_is_done() {{ [[ -e $1.mark ]]; }}
part_first_one() {{ echo ran >>runs; touch first-one.mark; }}
part_gpu_one() {{ need false -- "a GPU"; echo never; }}
part_bad() {{ false; echo "errexit is off"; }}
part_long() {{ touch long.mark; }}
run_parts "$@"
"""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.script = pathlib.Path(self.folder.name, "script.sh")
        self.script.write_text(self.SCRIPT.format(root=ROOT))

    def tearDown(self):
        self.folder.cleanup()

    def run_script(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(["bash", str(self.script), *words], cwd=self.folder.name, capture_output=True, text=True)

    def runs(self) -> int:
        return len(pathlib.Path(self.folder.name, "runs").read_text().splitlines())

    def test_done_parts_are_skipped_unless_again(self):
        self.assertEqual(self.run_script("first-one").returncode, 0)
        again = self.run_script("first-one")
        self.assertIn("first-one: done before", again.stdout)
        self.assertEqual(self.runs(), 1)
        self.run_script("--again", "first-one")
        self.assertEqual(self.runs(), 2)
        self.assertRegex(self.run_script("--list").stdout, r"first-one +done +about +1 min")

    def test_failures_and_skips_are_told_apart(self):
        failed = self.run_script("bad", "first-one")
        self.assertEqual(failed.returncode, 1)
        self.assertNotIn("errexit is off", failed.stdout)
        self.assertIn("failed: bad", failed.stdout)
        self.assertEqual(self.runs(), 1, "the parts behind a failure run")
        skipped = self.run_script("gpu-one")
        self.assertEqual(skipped.returncode, 77)
        self.assertIn("skipped: needs a GPU", skipped.stdout)
        self.assertEqual(self.run_script("first-one", "gpu-one").returncode, 0)
        self.assertNotIn("never", skipped.stdout)

    def test_parts_of_the_gpu_suite_fail_with_their_first_command(self):
        """tests/run_gpu.sh with a launcher and a program that are not the real ones: whatever fails is seen."""
        root = pathlib.Path(self.folder.name, "checkout")
        for name in ("tests/run_gpu.sh", "tests/support/parts.sh"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())

        def executable(path: pathlib.Path, text: str) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n" + text)
            path.chmod(0o755)

        executable(root / "launch/ringattn-mpirun", 'shift 2; [ "$1" != -x ] || shift 2; exec "$RINGATTN_PROGRAM" "$@"\n')
        executable(root / "bin/nvidia-smi", 'printf "GPU 0: a\\nGPU 1: b\\n"\n')
        program = """case "$*" in *info*) echo '"build_id": "abc",'; exit 0;; {case}) echo FAIL; exit {code};; esac
echo PASS 12ab
"""
        environment = {**os.environ, "GPU_PRESET": "fake", "PATH": f"{root}/bin:{os.environ['PATH']}"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        for part, case, code in (
            ("worlds", "*nothing*", 0),
            ("worlds", "*causal*p2p*", 1),
            ("worlds", "*record*", 1),
            ("worlds", "*golden*nccl*", 1),
            ("one-connection", "*nothing*", 0),
            ("one-connection", "*4k*", 6),
            ("one-connection", "*16k*", 6),
        ):
            with self.subTest(part=part, case=case):
                executable(root / "build/fake/bin/ringattn", program.format(case=case, code=code))
                words = ["bash", str(root / "tests/run_gpu.sh"), "--again", part]
                done = subprocess.run(words, capture_output=True, text=True, env=environment)
                self.assertEqual(done.returncode, 1 if code else 0, done.stdout + done.stderr)
                (root / f"build/gpu/{part}.passed").unlink(missing_ok=True)

    def test_what_takes_too_long_is_put_off(self):
        first = self.run_script("first-one", "long")
        self.assertEqual(first.returncode, 75)
        self.assertIn("put off, call", first.stdout)
        self.assertEqual(self.run_script("first-one", "long").returncode, 0, "the first part that isn't done always runs")

    def test_unknown_words(self):
        for words in (["none"], ["--minutes", "x"], ["--minutes"]):
            self.assertEqual(self.run_script(*words).returncode, 2, words)

    def test_rounds_that_are_no_number(self):
        for word in ("0", "x", "1+1", "07", "a[$(touch x)]"):
            done = subprocess.run(["bash", str(ROOT / "bench/run.sh"), "--list"], capture_output=True, text=True,
                                  env=os.environ | {"BENCH_ROUNDS": word})  # fmt: skip
            self.assertEqual(done.returncode, 2, word)
            self.assertIn(f'BENCH_ROUNDS is "{word}"', done.stderr)

    def test_the_scripts_name_a_function_for_each_part(self):
        for script in ("bench/run.sh", "tests/run_gpu.sh"):
            listed = run(str(ROOT / script), "--list")
            self.assertEqual(listed.returncode, 0, listed.stderr)
            names = [line.split()[0] for line in listed.stdout.splitlines()]
            self.assertGreater(len(names), 5)
            text = (ROOT / script).read_text()
            for name in names:
                self.assertIn(f"part_{name.replace('-', '_')}() {{", text)


class Benchmarks(checkout.Checkout):
    """bench/run.sh, whose programs write a line with their words to the file that they are told."""

    def setUp(self):
        super().setUp()
        self.environment |= {"BENCH_ROUNDS": "2"}

    def words(self, part: str) -> list[str]:
        return [line["words"].split(" --jsonl")[0] for line in self.measure(part, 0)]

    def test_ours_and_the_peers_take_turns_at_the_same_shapes(self):
        """Part, the peer, how often ringattn is measured before the peer, rounds, and shapes in a round."""
        for program in ("decode_gpu_bench", "gemm_gpu_bench", "ssm_gpu_bench"):
            self.words_bench(program)
        for part, peer, turn, rounds, shapes in (
            ("one-gpu", "sdpa", 1, 1, 7),
            ("one-gpu-shapes", "sdpa", 1, 1, 6),
            ("decode-peers", "decode", 1, 2, 4),
            ("products", "gemm", 1, 2, 2),
            ("scans-peers", "ssm", 1, 1, 3),
            ("latents-peers", "mla", 2, 2, 3),
        ):
            with self.subTest(part=part):
                lines = self.measure(part, 0)
                alone = 2 if part == "one-gpu-shapes" else 0  # a window and blocks, which peers don't have
                turns = lines[: len(lines) - alone]
                self.assertEqual([line["tool"] for line in turns], (["ours"] * turn + ["peer"]) * (rounds * shapes))
                self.assertEqual([line["tool"] for line in lines[len(turns) :]], ["ours"] * alone)
                words = [line["words"].split(" --jsonl")[0] for line in turns]
                theirs = [text.removeprefix(f"bench/peers/{peer}.py ") for text in words[turn :: turn + 1]]
                for first in range(turn):
                    ours = [text.removeprefix("bench ") for text in words[first :: turn + 1]]
                    if part == "latents-peers":  # ringattn's words name the kernel, too
                        kernel = ("sm90_mla", "sm90_mla_split1k")[first]
                        self.assertEqual({text.split()[1] for text in ours}, {kernel})
                        ours = [text.split(" --page-size 64 ")[1] for text in ours]
                    if part == "scans-peers":
                        ours = ["--shapes " + text.replace(" ", ",") for text in ours]
                    self.assertEqual(ours, theirs)
                self.assertEqual(theirs, theirs[:shapes] * rounds)
                self.assertEqual(len(set(theirs)), shapes, "no shape twice")
                if part.startswith("one-gpu"):
                    self.assertTrue(all("--total-tokens 16k" in text for text in theirs), theirs)

    def test_lines_of_programs_have_their_command_and_revision(self):
        self.decode_bench()
        for line in self.measure("decode-peers", 0)[::2]:
            self.assertEqual((line["command"], line["git"]), (f"decode_gpu_bench {line['words']}", "abc"))

    def test_a_part_is_measured_whole_or_not_at_all(self):
        for part, program in (("precision-and-state", "attention_gpu_bench"), ("decode-peers", "decode_gpu_bench"),
                              ("products", "gemm_gpu_bench"), ("scans-peers", "ssm_gpu_bench")):  # fmt: skip
            self.assertEqual(self.measure(part, 1), [], f"{program} isn't there")
            self.executable(f"bin/{program}", "exit 0\n")
            self.assertEqual(self.measure(part, 1), [], "it measured nothing")
        self.words_bench("attention_gpu_bench")
        lines = self.measure("precision-and-state", 0)
        turns = [(line["tool"], line["dtype"]) for line in lines[:8]]
        self.assertEqual(turns, [(tool, dtype) for dtype in ("bf16", "fp16") for tool in ("ours", "peer")] * 2)
        kinds = [line["command"] for line in lines[8:]]
        expected = [f"attention_gpu_bench {kind} sm90_attention" for kind in ("touched", "host", "state", "speed")]
        self.assertEqual(kinds, [*expected[:3], f"{expected[3]} 0 8192"])
        self.assertEqual(self.words("choice"), ["choice sm90_attention"])

    def test_what_needs_no_peer_needs_no_torch(self):
        self.decode_bench()
        self.environment |= {"PYTHON": str(self.root / "no-python")}
        words = self.words("decode")
        self.assertEqual(sum("--page-size 0,16,64,128" in text for text in words), 2, "in each round")
        self.assertEqual(sum("--slices 2,4" in text for text in words), 1)
        self.assertIn("skipped: needs PyTorch", self.bench(77, "decode-peers").stdout)

    def test_gradients_are_measured_with_the_library_beside_the_program(self):
        self.assertEqual(self.measure("backward-peers", 1), [], "libringattn_c.so isn't there")
        self.executable("lib/libringattn_c.so", "")
        words = [text.removeprefix("bench/peers/attention_backward.py ") for text in self.words("backward-peers")]
        self.assertEqual(words, ["turn", "repeat", "bias --dtype bf16", "bias --dtype fp16"])

    def test_masks_are_measured_in_turn_with_the_peer_over_the_same_blocks(self):
        lines = self.measure("sparse-peers", 0)
        self.assertEqual([line["tool"] for line in lines], ["ours", "ours", "ours", "peer"] * 4, "two lengths, two rounds")
        self.assertEqual(lines[:8], lines[8:])
        for at, seq in ((0, "32k"), (4, "128k")):
            dense, *listed, peer = (line["words"] for line in lines[at : at + 4])
            self.assertIn(f"bench --seq {seq} --heads 32 --kv-heads 8 ", dense)
            self.assertNotIn("--block-mask", dense)
            masks = [text.split("--block-mask ")[1].split()[0].split("/")[-2:] for text in listed]
            self.assertEqual(masks, [[seq, "random-10.safetensors"], [seq, "window-10.safetensors"]])
            self.assertIn(f"bench/peers/sparse.py --seq {seq} --heads 32", peer)
            self.assertIn("--patterns dense,random-10,window-10", peer)

    def test_quantized_caches_are_measured_in_turn_with_plain_ones(self):
        self.decode_bench()
        self.words_bench("compress_gpu_bench")
        words = self.words("compressed")
        self.assertEqual(len(words), 11)
        self.assertIn("--kernel sm80_attention", words[-1])
        self.assertEqual(words[0], "--steps 1x1k,1x4k,1x16k,1x64k,1x128k,32x4k --cache plain,fp8,int8,int4")
        formats = [text.split("--cache-format ")[1].split()[0] for text in words if "--cache-format" in text]
        self.assertEqual(formats, ["bf16", "fp8", "int4"] * 2)
        self.environment |= {"BENCH_ROUNDS": "1"}
        stored = [text for text in self.words("latents") if "--cache-format" in text]
        plain, quantized = ([text for text in stored if f"--cache-format {name} " in text] for name in ("bf16", "fp8"))
        self.assertEqual([text.replace("bf16", "fp8") for text in plain], quantized)
        self.assertEqual((len(plain), stored), (3, plain + quantized))
        self.assertTrue(all("--op mla --q-len 1 --page-size 64" in text for text in stored), stored)
        self.gpus(0)
        words = self.words("compressed-ring")
        self.assertEqual([text.split("--cache-format ")[1].split()[0] for text in words], ["bf16", "fp8", "int8", "int4"])
        self.assertTrue(all(text.startswith("-np 2 run --backend cpu ") for text in words), words)

    def test_mla_ssm_and_decode_steps_go_over_powers_of_two_and_all_gpus(self):
        self.gpus(2)
        for part, wanted in (("latent-ring", "111111222222"), ("scan-ranks", "122"), ("decode-ranks", "122")):
            words = self.words(part)
            self.assertEqual("".join("2" if text.startswith("-np 2 ") else "1" for text in words), wanted)
            self.assertEqual("--transport nccl" in words[-1], part != "latent-ring")
        jobs = ["latents" if "--op mla" in line["words"] else "plain" for line in self.lines("latent-ring")]
        self.assertEqual(jobs, ["latents", "latents", "latents", "plain", "latents", "plain"] * 2, "two runs, for their digests")
        longest = self.words("latent-two-million")
        self.assertEqual(sum(" run " in f" {text}" for text in longest), 2)
        self.assertIn("--against compute", longest[-1])
        for part in ("latent-oracle", "scan-oracle"):
            (text,) = self.words(part)
            self.assertRegex(text, "^-np 2 verify .*--seq 2m .*--against oracle --rows 64")
        self.gpus(1)
        self.bench(77, "--again", "latent-oracle")

    def test_scaling_goes_over_powers_of_two_and_all_gpus(self):
        for count, worlds in ((1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])):
            with self.subTest(gpus=count):
                self.gpus(count)
                self.bench(0, "--again", "two-million")
                words = [line["words"] for line in self.lines("two-million")]
                expected = [f"-np {ranks} run" if ranks > 1 else "run" for ranks in worlds]
                self.assertEqual([text.split(" --synthetic")[0] for text in words], expected)
                self.assertTrue(all("--seq 2m --heads 32 --kv-heads 8 --head-dim 128" in text for text in words), words)
        self.bench(0, "scaling")
        words = [line["words"] for line in self.lines("scaling")]
        alone, several = [text for text in words if text.startswith("bench")], [text for text in words if text.startswith("-np")]
        self.assertEqual(len(alone), 2)
        self.assertFalse(any("--against" in text for text in alone), alone)
        self.assertEqual([text.split()[1] for text in several], ["2", "2", "4", "4", "6", "6", "6", "6"])
        self.assertEqual([text.split("--transport ")[1].split()[0] for text in several], ["p2p"] * 6 + ["nccl"] * 2)
        self.assertEqual(sum("zigzag_ring" in text for text in words), 2)
        self.gpus(1)
        self.assertIn("skipped: needs 2 GPUs, there are 1", self.bench(77, "--again", "scaling").stdout)

    def test_gradients_and_row_parallel_layers_go_over_all_gpus(self):
        self.gpus(4)
        words = self.words("backward-ranks")
        self.assertEqual(["--backward" in text for text in words], [False, True] * 3, "the forward beside it")
        self.assertEqual(["--against compute" in text for text in words], [False] * 2 + [True] * 4)
        ours = [text for text in self.words("linear-ranks") if "--parallel row" in text]
        self.assertEqual(["--transport nccl" in text for text in ours], [False, False, True, False, True])
        self.assertEqual(len(self.words("linear-ranks")) - len(ours), 3, "the peer on 1, 2 and 4")
        self.assertNotIn("decode-peers", self.bench(0, "--ranks", "--list").stdout)

    def test_the_pages_are_written_behind_whole_measurements(self):
        self.decode_bench()
        self.bench(0, "one-gpu")
        self.assertEqual(self.pages(), [], "only when asked")
        done = self.bench(0, "--readme")
        self.assertIn("skipped: scaling", done.stdout)
        self.assertEqual((len(self.lines("two-million")), self.pages()), (1, ["--select a"]))
        self.bench(0, "--readme", "--list")
        self.bench(0, "--readme", "--help")
        self.bench(2, "--readme", "nothing")
        self.executable("bin/ringattn", "exit 3\n")
        self.bench(1, "--readme", "--again", "one-gpu")
        self.assertEqual(len(self.pages()), 1)

    def test_several_gpus_have_a_folder_of_their_own(self):
        del self.environment["BENCH_MODEL"]
        for count, folder in ((1, "nvidia-h200"), (4, "nvidia-h200-x4")):
            self.gpus(count)
            self.bench(0, "--readme", "two-million")
            self.assertTrue((self.root / f"bench/results/{folder}/day-two-million.jsonl").exists())
        self.assertEqual(self.pages(), ["--select nvidia-h200"] * 2)

    def test_the_part_that_measures_shapes_again_sorts_last(self):
        """In the C locale, and where only letters and digits count."""
        listed = run(str(ROOT / "bench/run.sh"), "--list").stdout
        names = [line.split()[0] for line in listed.splitlines()]
        again = "precision-and-state"
        self.assertLess({again, "one-gpu", "one-gpu-shapes"}, set(names))
        for key in (str, lambda name: "".join(filter(str.isalnum, name))):
            files = sorted((f"2026-11-21-{name}.jsonl" for name in names if name.startswith("one-gpu") or name == again), key=key)
            self.assertEqual(files[-1], f"2026-11-21-{again}.jsonl")


class CpuHosts(unittest.TestCase):
    def test_words_that_would_measure_nothing(self):
        for words, message in ((("ranks", "--threads", "4,1"), "give even numbers"),
                               (("estimates", "--only", "nothing"), 'no job with these threads has "nothing"'),
                               (("estimates", "--threads", "64", "--ringattn", "/none"), "error: a run failed")):
            done = run(sys.executable, "-B", str(ROOT / "bench/cpu_hosts.py"), *words)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(message, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


if __name__ == "__main__":
    unittest.main()
