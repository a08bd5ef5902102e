# SPDX-License-Identifier: Apache-2.0
"""Values that threads state for themselves, as threads of autograd see them."""

import importlib.util
import sys
import threading
import unittest
from unittest import mock

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
from ringattn import _per_thread


def on_another_thread(call):
    """The result of call() on a thread of its own, or what it raised."""
    results = []

    def work():
        try:
            results.append(call())
        except ringattn.Error as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def inside_backward_pass():
    return mock.patch.object(_per_thread, "_in_backward_pass", return_value=True)


class PerThreadTest(unittest.TestCase):
    def setUp(self):
        self.values = _per_thread.PerThread("batch()")

    def test_other_threads_have_none(self):
        self.values.set("mine")
        self.assertEqual(self.values.get(), "mine")
        self.assertIsNone(on_another_thread(self.values.get))

    def test_a_backward_pass_has_that_of_the_only_thread(self):
        self.values.set("mine")
        with inside_backward_pass():
            self.assertEqual(on_another_thread(self.values.get), "mine")
        self.values.set(None)
        with inside_backward_pass():
            self.assertIsNone(on_another_thread(self.values.get))

    def test_values_of_ended_threads_do_not_count(self):
        on_another_thread(lambda: self.values.set("ended"))
        self.values.set("mine")
        with inside_backward_pass():
            self.assertEqual(on_another_thread(self.values.get), "mine")

    def test_two_threads_are_refused(self):
        self.values.set("mine")
        stated, ended = threading.Event(), threading.Event()

        def state():
            self.values.set("theirs")
            stated.set()
            ended.wait()

        other = threading.Thread(target=state)
        other.start()
        stated.wait()
        try:
            with inside_backward_pass():
                self.assertIn("2 threads have stated a batch()", str(on_another_thread(self.values.get)))
        finally:
            ended.set()
            other.join()


if __name__ == "__main__":
    unittest.main()
