# SPDX-License-Identifier: Apache-2.0
"""Worlds of processes without MPI: by a store's address, by callbacks, by torch.distributed; the bits of one rank, and failures
that end all ranks."""

import contextlib
import copy
import importlib.util
import io
import multiprocessing
import os
import pathlib
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
from unittest import mock

import numpy as np
import ringattn
from ringattn.testing import assert_same_bits
from ringattn.torch_worlds import within

RANKS = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
# Ranks are forked from a process that has imported what they use: PyTorch takes three to six seconds of processor time.
SERVER = multiprocessing.get_context("forkserver")


def arrays():
    draw = np.random.default_rng(1).standard_normal
    return [draw((500, heads, 64), dtype="float32") for heads in (4, 2, 2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compute(world) -> np.ndarray:
    """This rank's rows of out."""
    layout = ringattn.zigzag([500], world.size)
    mine = [ringattn.shard(rows, layout, world.rank) for rows in arrays()]
    return ringattn.attention(*mine, world=world, layout=layout)[0]


# What each rank does, by name, in a process of its own.
def by_store(rank, folder, port):
    return compute(ringattn.store_world(f"127.0.0.1:{port}", rank, RANKS, job="test", timeout=30))


def by_environment(rank, folder, port):
    os.environ |= {"RINGATTN_STORE": f"127.0.0.1:{port}", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    return compute(ringattn.store_world(timeout=30))


def by_slurm(rank, folder, port):
    os.environ |= {"RINGATTN_STORE": f"127.0.0.1:{port}", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(RANKS),
                   "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "4"}  # fmt: skip
    return compute(ringattn.store_world(timeout=30))


def by_callbacks(rank, folder, port):
    calls = 0

    def all_gather(data, seconds):
        nonlocal calls
        calls += 1
        part = folder / f"{calls}.{rank}.part"
        part.write_bytes(data)
        part.rename(folder / f"{calls}.{rank}.whole")
        theirs = [folder / f"{calls}.{other}.whole" for other in range(RANKS)]
        end = time.monotonic() + seconds
        while not all(file.exists() for file in theirs):
            if time.monotonic() > end:
                raise TimeoutError("a rank has not come")
            time.sleep(0.002)  # the cores are the ranks'
        return [file.read_bytes() for file in theirs]

    return compute(ringattn.callbacks_world(rank, RANKS, all_gather, timeout=30))


def by_torch(rank, folder, port):
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    return of_group(rank)


def of_group(rank):
    """What a rank of the default ProcessGroup computes, which ends with it."""
    import torch.distributed as distributed

    import ringattn.ring_flash_attn as names

    world = ringattn.torch_world()
    assert ringattn.torch_world() is world
    rows = compute(world)
    import torch

    layout = ringattn.zigzag([500], RANKS)
    q, k, v = (torch.from_numpy(ringattn.shard(x, layout, rank))[None] for x in arrays())
    assert_same_bits(names.zigzag_ring_flash_attn_func(q, k, v, causal=True)[0].numpy(), rows)
    mine = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(names.zigzag_ring_flash_attn_func(*mine, causal=True).square().sum(), mine)
    alone = [torch.from_numpy(x).requires_grad_() for x in arrays()]
    expected = torch.autograd.grad(ringattn.attention(*alone)[0].square().sum(), alone)
    for got, wanted in zip(gradients, expected):
        assert_same_bits(got[0], ringattn.shard(wanted, layout, rank))
    check_reduced_gradients(world)
    distributed.barrier()
    distributed.destroy_process_group()
    return rows


def check_reduced_gradients(world):
    """A linear layer's gradients over all tokens, of which each rank has some, are those of one rank."""
    import torch

    weight, x = (torch.from_numpy(rows[:, 0].copy()) for rows in arrays()[:2])
    weight = weight[:8].requires_grad_()

    def leaf_gradients(ranks, rank):
        for leaf in ringattn.gradient_leaves(ranks, rank):
            begin, end = ringattn.linear_tokens(len(x), 8, leaf)
            yield torch.autograd.grad(ringattn.linear(x[begin:end], weight).square().sum(), [weight])

    (found,) = ringattn.reduce_gradients([weight], leaf_gradients(world.size, world.rank), world=world)
    (expected,) = ringattn.reduce_gradients([weight], leaf_gradients(1, 0))
    assert_same_bits(found, expected)


def by_torchrun(rank, folder, port):
    """torchrun has set the environment: of torch.distributed, and of a store at a port of its own."""
    import torch.distributed as distributed

    os.environ["RINGATTN_STORE"] = f"127.0.0.1:{port}"
    rows = compute(ringattn.store_world(timeout=30))
    distributed.init_process_group("gloo")
    assert_same_bits(of_group(rank), rows)
    return rows


def with_a_failure(rank, folder, port):
    world = ringattn.store_world(f"127.0.0.1:{port}", rank, RANKS, timeout=30)
    if rank == 1:
        world.abort(ringattn.OutOfMemory("no room", "a test", "None."))
        raise SystemExit(0)
    try:
        compute(world)
    except ringattn.Error as error:
        assert "no room" in str(error), error
        raise SystemExit(0) from None
    raise SystemExit("a rank that failed was not noticed")


def with_a_late_rank(rank, folder, port):
    """Rank 1 joins the group, and comes to torch_world() when rank 0 has given up."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    given_up = folder / "given_up"
    if rank == 0:
        try:
            ringattn.torch_world(timeout=0.2)
        except ringattn.PeerError as error:
            assert "is late (it has taken" in str(error.__cause__), error.__cause__
            given_up.touch()
    else:
        end = time.monotonic() + 60
        while not given_up.exists() and time.monotonic() < end:
            time.sleep(0.01)
    os._exit(0 if given_up.exists() else 1)  # without a word to the group, whose collective never ends


def run_rank(name, rank, folder, port):
    rank = int(os.environ["RANK"]) if rank is None else rank  # of torchrun
    np.save(folder / f"{rank}.npy", globals()[name](rank, folder, port))


def run_script(script, arguments):
    sys.argv = [str(script), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def traced(function, *arguments):
    """Prints the traceback of a rank that fails, which torchrun's launcher does not."""
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        raise


def under_torchrun(function, *arguments):
    """What torchrun does, with ranks that are forked from this process."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=RANKS, run_id="worlds_test", rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork")  # fmt: skip
    elastic_launch(config, traced)(function, *arguments)


def with_output(file, function, *arguments):
    with open(file, "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    function(*arguments)


def start(file, function, *arguments):
    """A process that runs the function and writes what it prints to the file."""
    process = SERVER.Process(target=with_output, args=(file, function, *arguments))
    process.start()
    return process


def run_under_torchrun(function, *arguments):
    """The exit code, and what was printed."""
    with tempfile.NamedTemporaryFile("r") as said:
        process = start(said.name, under_torchrun, function, *arguments)
        process.join(200)
        process.kill()
        process.join()
        return process.exitcode, said.read()


class Waits(unittest.TestCase):
    """What a function of the caller's process does within a time, or not."""

    def test_a_late_gather_is_given_up(self):
        done = threading.Event()
        started = time.monotonic()
        with self.assertRaises(ringattn.PeerError) as caught:
            within(0.05, done.wait, "the gather")
        self.assertIn("the gather is late (it has taken 0.05 seconds)", str(caught.exception))
        self.assertLess(time.monotonic() - started, 20)
        done.set()

    def test_what_comes_in_time_is_handed_on(self):
        self.assertEqual(within(60, lambda: [b"0", b"1"], "the gather"), [b"0", b"1"])
        with self.assertRaises(KeyError):
            within(60, lambda: {}["none"], "the gather")


class Failures(unittest.TestCase):
    def test_peers_learn_of_any_exception(self):
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        q = arrays()[0][:8]
        long = ValueError("x" * 100_000)
        for error, words in ((ValueError("a\ud800b"), "a b"), (Mute(), "Mute"), (long, "x" * 1000 + "…"),
                             (ringattn.Error("a\x1b[31m\nb"), "a [31m b")):  # fmt: skip
            seen = []

            def work(world, error=error, seen=seen):
                if world.rank == 1:
                    raise error
                try:
                    ringattn.attention(q, q, q, world=world, layout="contiguous", timeout=30)
                except ringattn.Error as told:
                    seen.append(str(told))

            with self.assertRaises(type(error)) as caught:
                ringattn.run_ranks(2, work)
            self.assertIs(caught.exception, error)
            self.assertIn(words, seen[0])
            self.assertLess(len(seen[0]), 1500)

    def test_a_rank_that_closes_its_world_and_fails(self):
        def work(world):
            world.close()
            raise KeyError(world.rank)

        with self.assertRaises(KeyError):
            ringattn.run_ranks(2, work)

    def test_control_c_while_ranks_start_ends_those_that_have(self):
        q = arrays()[0][:8]
        starts, ended = [], []
        start = threading.Thread.start

        def interrupted(thread):
            starts.append(thread)
            if len(starts) == 2:
                raise KeyboardInterrupt
            start(thread)

        def work(world):
            try:
                ringattn.attention(q, q, q, world=world, layout="contiguous", timeout=60)
            except ringattn.Error as error:
                ended.append(error)
                raise

        began = time.monotonic()
        with mock.patch.object(threading.Thread, "start", interrupted), self.assertRaises(KeyboardInterrupt):
            ringattn.run_ranks(3, work)
        self.assertEqual(len(ended), 1)
        self.assertFalse(starts[0].is_alive())
        self.assertLess(time.monotonic() - began, 30)

    def test_errors_of_other_processes_keep_their_parts(self):
        for kind in (ringattn.Error, ringattn.UsageError, ringattn.FileError, ringattn.PeerError):
            error = kind("p", "w", "r")
            error.add_note("a note")
            for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
                self.assertIs(type(other), kind)
                self.assertEqual((other.problem, other.why, other.suggestion, str(other), other.__notes__),
                                 ("p", "w", "r", "p (w). r", ["a note"]))  # fmt: skip
        self.assertEqual(str(ringattn.Error("a")), "a")


class Pending(unittest.TestCase):
    def test_a_world_waits_for_all_that_is_on_it(self):
        q = arrays()[0].astype("float16")
        world = ringattn.threads_worlds(1)[0]
        ringattn.attention(q, q, q, world=world)
        ringattn.decode(q[:1], q[None], q[None], np.array([500], "int32"), world=world)
        world.wait()
        waited = []
        late = ringattn.PeerError("a rank is late", "a test", "None.")
        with (
            mock.patch("ringattn.Attention.settle", side_effect=late),
            mock.patch("ringattn.Decode.settle", side_effect=lambda: waited.append("decode")),
            self.assertRaises(ringattn.PeerError) as caught,
        ):
            world.wait()
        self.assertIs(caught.exception, late)
        self.assertEqual(waited, ["decode"])
        ringattn.compress(q, q, "int8")  # which is kept by this rank's own world
        ringattn.self_world().wait()


class Processes(unittest.TestCase):
    def run_ranks(self, name):
        """Out of all ranks together, or None where they leave none."""
        with tempfile.TemporaryDirectory() as folder:
            place, port = pathlib.Path(folder), free_port()
            if name == "by_torchrun":
                code, said = run_under_torchrun(run_rank, name, None, place, port)
                self.assertEqual(code, 0, said)
                return self.together(folder)
            files = [place / f"{rank}.said" for rank in range(RANKS)]
            ranks = [start(file, run_rank, name, rank, place, port) for rank, file in enumerate(files)]
            try:
                for rank in ranks:
                    rank.join(100)
            finally:
                for rank in ranks:
                    rank.kill()
            for rank, file in zip(ranks, files):
                rank.join()
                self.assertEqual(rank.exitcode, 0, file.read_text())
            return self.together(folder)

    def together(self, folder):
        rows = [pathlib.Path(folder) / f"{rank}.npy" for rank in range(RANKS)]
        if not rows[0].exists():
            return None
        return ringattn.unshard([np.load(file) for file in rows], ringattn.zigzag([500], RANKS))

    def test_ranks_have_the_bits_of_one(self):
        out, _ = ringattn.attention(*arrays())
        names = ["by_store", "by_environment", "by_slurm", "by_callbacks"]
        if importlib.util.find_spec("torch") is not None:
            names += ["by_torch", "by_torchrun"]
        for name in names:
            with self.subTest(name):
                assert_same_bits(self.run_ranks(name), out)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_the_example_of_torchrun(self):
        example = pathlib.Path(__file__).resolve().parents[2] / "docs/examples/torchrun.py"
        done = subprocess.run([*TORCHRUN, example], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, f"the same bits on {RANKS} (GPUs|CPU ranks) and on one")

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_the_example_of_a_hybrid_stack(self):
        example = pathlib.Path(__file__).resolve().parents[2] / "docs/examples/hybrid_stack.py"
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(example), run_name="__main__")
        digest = said.getvalue().removeprefix("ranks 1, ")
        self.assertRegex(digest, "^digest [0-9a-f]{32}\n$")
        code, said = run_under_torchrun(run_script, example, [])
        self.assertEqual(code, 0, said)
        self.assertIn(f"ranks {RANKS}, {digest}", said)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_the_example_of_training(self):
        import torch

        example = pathlib.Path(__file__).resolve().parents[2] / "docs/examples/train_llama.py"
        with tempfile.TemporaryDirectory() as folder:
            training = ["--device", "cpu", "--steps", "3", "--tokens", "301", "--record", folder]
            code, said = run_under_torchrun(run_script, example, training)
            self.assertEqual(code, 0, said)
            self.assertRegex(said, rf"step   2  loss [\d.]+\n3 steps took .* on {RANKS} cpu ranks")

            said = io.StringIO()
            with (
                mock.patch.dict(os.environ),
                mock.patch("sys.argv", [str(example), "--check", folder]),
                contextlib.redirect_stdout(said),
            ):
                runpy.run_path(str(example), run_name="__main__")
                self.assertEqual(said.getvalue(), "out, lse, dq, dk and dv of 6 calls have the bits of one rank\n")
                file = pathlib.Path(folder, f"step1-rank1of{RANKS}.pt")
                recorded = torch.load(file)
                recorded["layers"][1]["dk"].view(torch.int32)[4, 0, 0] ^= 1
                torch.save(recorded, file)
                with self.assertRaises(SystemExit) as caught:
                    runpy.run_path(str(example), run_name="__main__")
            self.assertEqual(caught.exception.code, "error: 1 of 30 arrays differ from those of one rank.")
            self.assertIn("step1, layer 1: dk of 2 ranks and of one differ at [", said.getvalue())

    def test_a_rank_that_gives_up_ends_the_others(self):
        self.assertIsNone(self.run_ranks("with_a_failure"))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_a_rank_that_comes_late_to_torch_world_is_not_waited_for(self):
        self.assertIsNone(self.run_ranks("with_a_late_rank"))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_a_device_without_a_number_is_the_current_one(self):
        import torch

        for device, number in (("cuda", 3), ("cuda:1", 1), ("cuda:0", 0)):
            with (
                mock.patch("torch.cuda.current_device", return_value=3),
                mock.patch("torch.distributed.get_rank", return_value=0),
                mock.patch("torch.distributed.get_world_size", return_value=1),
                mock.patch("ringattn.torch_worlds._worlds", {}),
                mock.patch("ringattn.torch_worlds.self_world") as made,
            ):
                ringattn.torch_world(object(), torch.device(device))
            made.assert_called_once_with((2, number))

    def test_what_can_t_be_a_world_is_refused(self):
        with self.assertRaises(ringattn.UsageError):
            ringattn.callbacks_world(2, 2, lambda data, seconds: [data, data])
        with self.assertRaises(ringattn.UsageError):
            ringattn.store_world("nowhere")
        with self.assertRaises(ringattn.UsageError):
            ringattn.callbacks_world(0, 2, lambda data, seconds: [data], timeout=5)

        def broken(data, seconds):
            raise KeyError("of its own")

        with self.assertRaises(ringattn.Error) as caught:
            ringattn.callbacks_world(0, 2, broken, timeout=5)
        self.assertIsInstance(caught.exception.__cause__, KeyError)

    def test_what_ends_a_process_is_handed_on(self):
        for kind in (KeyboardInterrupt, SystemExit):

            def interrupted(data, seconds, kind=kind):
                raise kind

            with self.assertRaises(kind) as caught:
                ringattn.callbacks_world(0, 2, interrupted, timeout=5)
            self.assertIsInstance(caught.exception.__cause__, ringattn.Error)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; for the ranks, as this process has read it
    SERVER.set_forkserver_preload(["numpy", "torch", "torch._dynamo", "torch.distributed.run"])
    unittest.main()
