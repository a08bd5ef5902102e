# SPDX-License-Identifier: Apache-2.0
"""Values that each thread sets for itself, and that autograd's threads can read."""

import threading
import weakref

import torch

from ._errors import unsupported


class PerThread:
    """A value for each thread, None if the thread has not set one. Autograd runs backward passes of GPU tensors, and recomputes
    checkpointed layers, on threads of its own. They see the value of the only thread that has set one."""

    def __init__(self, what: str):
        self._what = what  # for messages: "batch()"
        self._own = threading.local()
        self._values = weakref.WeakKeyDictionary()  # of all threads

    def set(self, value) -> None:
        """Sets this thread's value; None removes it."""
        self._own.value = value
        if value is None:
            self._values.pop(threading.current_thread(), None)
        else:
            self._values[threading.current_thread()] = value

    def get(self):
        own = getattr(self._own, "value", None)
        if own is not None or torch.compiler.is_compiling() or not _in_backward_pass():
            return own
        others = [value for thread, value in list(self._values.items()) if thread.is_alive()]
        if len(others) > 1:
            unsupported(f"{len(others)} threads have stated a {self._what}",
                        "autograd computes a checkpoint again on a thread of its own, which may belong to any of them",
                        "Run each rank in a process of its own, or without checkpoints.")  # fmt: skip
        return others[0] if others else None


def _in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1
