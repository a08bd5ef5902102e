# SPDX-License-Identifier: Apache-2.0
"""Threads that share a world, ends of worlds beside calls, copies, and signals that end a call."""

import contextlib
import copy
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest

import numpy as np
import ringattn
from ringattn import _abi
from ringattn.testing import assert_same_bits

# 2 seconds and more of one processor, unless something ends it.
LONG = """
    import numpy as np, ringattn
    k = np.zeros((60_000, 1, 64), "float32")
    def work(world):
        return ringattn.attention(k, k, k, world=world, mask="full", layout="contiguous", threads=1)
"""


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32")


class Turns(unittest.TestCase):
    def test_threads_that_share_a_world_get_their_own_results_or_a_refusal(self):
        world = ringattn.self_world()
        caches = normal(2, 2, 64, 2, 32)
        jobs = []
        for seed in range(2):
            rows, q = (normal(64, 4, 32, seed=seed), *normal(2, 64, 2, 32, seed=9 + seed)), normal(2, 4, 32, seed=seed)
            lengths = np.full(2, 40 + seed, "int32")
            calls = (lambda rows=rows: ringattn.attention(*rows, world=world),
                     lambda q=q, lengths=lengths: ringattn.decode(q, *caches, lengths, world=world))  # fmt: skip
            jobs.append([(call, call()[0].tobytes()) for call in calls])
        seen = {"right": 0, "refused": 0, "wrong": 0}
        barrier = threading.Barrier(2)

        def work(job):
            barrier.wait()
            for _ in range(300):
                for call, wanted in job:
                    try:
                        seen["right" if call()[0].tobytes() == wanted else "wrong"] += 1
                    except ringattn.UsageError as error:
                        self.assertIn("at work in another thread", str(error))
                        seen["refused"] += 1

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        finally:
            sys.setswitchinterval(before)
        self.assertEqual((seen["wrong"], sum(seen.values())), (0, 1200))
        self.assertGreater(seen["right"], 0)

    def test_nothing_ends_beside_a_call(self):
        """Whoever has the turn is at work, wherever in the call that is."""
        world = ringattn.threads_worlds(1)[0]
        q = normal(8, 2, 8)
        wanted = ringattn.attention(q, q, q, world=world)[0]
        decoder = next(iter(world._objects.values()))
        refusals = []

        def refused():
            for call in (world.close, world.wait, decoder.close, decoder.wait, lambda: ringattn.attention(q, q, q, world=world)):
                with self.assertRaises(ringattn.UsageError) as caught:
                    call()
                refusals.append(str(caught.exception))

        for run, words in (
            (lambda: threading.Thread(target=refused), "in another thread (calls on a world and its objects take turns)"),
            (lambda: None, "in this thread (a signal handler or a finalizer calls it during another call)"),
        ):
            refusals.clear()
            held = world.turn.take()
            try:
                thread = run()
                if thread is None:
                    refused()
                else:
                    thread.start()
                    thread.join()
            finally:
                world.turn.release(held.pop())
            self.assertEqual(len(refusals), 5)
            self.assertEqual(len(set(refusals)), 1)
            self.assertIn(f"this world is at work {words}", refusals[0])
        assert_same_bits(ringattn.attention(q, q, q, world=world)[0], wanted)
        world.close()
        world.close()
        with self.assertRaises(ringattn.UsageError):
            decoder.wait()

    def test_a_handler_that_raises_anywhere_in_a_call_leaves_the_world_usable(self):
        class Raised(Exception):
            pass

        def handler(*_):
            raise Raised

        q = normal(1, 1, 8)
        wanted = ringattn.attention(q, q, q)[0]
        draw = random.Random(1)
        before = signal.signal(signal.SIGALRM, handler)
        try:
            for _ in range(3000):
                with contextlib.suppress(Raised):
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(4e-6, 4e-5))
                    try:
                        ringattn.attention(q, q, q)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert_same_bits(ringattn.attention(q, q, q)[0], wanted)

    def test_a_lost_turn_is_made_again(self):
        """As where an exception is raised between the taking of a turn and the `try` that gives it back."""
        world = ringattn.threads_worlds(1)[0]
        q = normal(8, 2, 8)
        wanted = ringattn.attention(q, q, q, world=world)[0]
        for _ in range(3):
            world.turn.take()
            assert_same_bits(ringattn.attention(q, q, q, world=world)[0], wanted)
        world.turn.take()
        closing = threading.Thread(target=world.close)
        closing.start()
        closing.join()
        self.assertIsNone(world._handle)

    def test_abort_beside_close(self):
        """In a process of its own, which an abort() of a destroyed world would end."""
        program = """
            import threading, time, ringattn
            stop, box = time.monotonic() + 1.5, [ringattn.threads_worlds(1)[0]]
            def abort():
                while time.monotonic() < stop:
                    try:
                        box[0].abort(ValueError("none"))
                    except ringattn.UsageError:
                        pass
            thread = threading.Thread(target=abort)
            thread.start()
            while time.monotonic() < stop:
                box[0].close()
                box[0] = ringattn.threads_worlds(1)[0]
            thread.join()
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_worlds_and_what_is_prepared_on_them_are_not_copied(self):
        world = ringattn.threads_worlds(1)[0]
        q = normal(8, 2, 8)
        ringattn.attention(q, q, q, world=world)
        for owner in (world, next(iter(world._objects.values()))):
            for take in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaises(TypeError) as caught:
                    take(owner)
                self.assertIn("can't be copied or pickled", str(caught.exception))
        ringattn.attention(q, q, q, world=world)

    def test_self_world_is_another_one_once_it_was_closed(self):
        q = normal(8, 1, 8)
        with ringattn.self_world() as world:
            wanted = ringattn.attention(q, q, q, world=world)[0]
        assert_same_bits(ringattn.attention(q, q, q)[0], wanted)
        self.assertIsNot(ringattn.self_world(), world)
        ringattn.self_world().handle  # noqa: B018, refuses where the world is closed


class Interrupts(unittest.TestCase):
    def run_python(self, text):
        program = textwrap.dedent(LONG) + textwrap.dedent(text)
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=os.environ)  # fmt: skip

    def test_control_c_ends_a_long_call_soon(self):
        running = self.run_python("""
            import threading, time
            print("ready", flush=True)
            try:
                work(None)
            except KeyboardInterrupt as error:
                print("interrupted", flush=True)
            print(ringattn.attention(k[:9], k[:9], k[:9])[0].shape)  # which goes on
        """)
        self.assertEqual(running.stdout.readline(), "ready\n")
        time.sleep(0.5)  # into the call
        began = time.monotonic()
        running.send_signal(signal.SIGINT)
        self.assertEqual(running.stdout.readline(), "interrupted\n")
        self.assertLess(time.monotonic() - began, 1.5)
        said, errors = running.communicate(timeout=60)
        self.assertEqual((said, errors, running.returncode), ("(9, 1, 64)\n", "", 0))

    def test_other_ranks_learn_of_it(self):
        running = self.run_python("""
            import threading
            k = k[:30_000]
            worlds = ringattn.threads_worlds(2)
            said = []  # not printed at once: print() writes a line and its end apart
            def other():
                try:
                    work(worlds[1])
                except ringattn.PeerError as error:
                    said.append(f"the other rank: {error.problem}")
            thread = threading.Thread(target=other)
            thread.start()
            print("ready", flush=True)
            try:
                work(worlds[0])
            except KeyboardInterrupt:
                said.append("interrupted")
            thread.join()
            print(*said, sep="\\n")
        """)
        self.assertEqual(running.stdout.readline(), "ready\n")
        time.sleep(0.5)
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=60)
        self.assertEqual(sorted(line.split(":")[0] for line in said.splitlines()), ["interrupted", "the other rank"], errors)

    def test_a_handler_that_raises_nothing_ends_nothing(self):
        running = self.run_python("""
            import signal
            k = k[:12_000]
            signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
            print("ready", flush=True)
            print(work(None)[0].shape)
        """)
        self.assertEqual(running.stdout.readline(), "ready\n")
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=60)
        self.assertEqual((said, errors), ("handled\n(12000, 1, 64)\n", ""))

    def test_what_handlers_do_during_a_call(self):
        """Whatever a handler raises, also one that runs during a handler's call, reaches its caller, and so does the next one."""
        running = self.run_python("""
            import signal
            def alarm(handler):
                signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            def raising(error):
                def handler(*_):
                    raise error
                return handler
            def nested(*_):
                alarm(raising(ValueError("nested")))
                work(ringattn.threads_worlds(1)[0])
            def caught(*_):
                try:
                    nested()
                except ValueError as error:
                    raise OSError("outer") from error
            def same_world(*_):
                work(None)
            handlers = [raising(error) for error in (GeneratorExit(), StopIteration(), ValueError("one"))]
            for handler in (*handlers, nested, caught, same_world):
                alarm(handler)
                try:
                    work(None)
                except BaseException as error:
                    print(type(error).__name__, str(error)[:36])
            k = k[:9]
            work(None)
        """)
        said, errors = running.communicate(timeout=100)
        self.assertEqual(errors, "")
        self.assertEqual(said.splitlines(), ["GeneratorExit ", "StopIteration ", "ValueError one", "ValueError nested",
                                             "OSError outer", "UsageError this world is at work in this thread"])  # fmt: skip

    def test_short_calls_are_not_asked(self):
        asked = []
        polls = _abi.Poll(lambda _: asked.append(1) or 0)
        _abi.lib.set_interrupt(polls, None)
        try:
            q = normal(8, 2, 8)
            for _ in range(50):
                ringattn.attention(q, q, q)
        finally:
            _abi.lib.set_interrupt(_abi.interrupts._poll, None)
        self.assertEqual(asked, [])


if __name__ == "__main__":
    unittest.main()
