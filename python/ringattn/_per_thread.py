# SPDX-License-Identifier: Apache-2.0
"""Values that each thread states for itself, and that autograd's threads share with it."""

import sys
import threading

from ._errors import unsupported


class PerThread:
    """A value of each thread; None where it has stated none. Autograd runs backward passes of GPU tensors on threads of
    its own, and there computes the layers of checkpoints again. They see the value of the only thread that has one."""

    def __init__(self, what: str):
        self._what = what  # for messages: "batch()"
        self._values: dict[int, object] = {}  # by thread

    def set(self, value) -> None:
        """States this thread's value; None takes it back."""
        if value is None:
            self._values.pop(threading.get_ident(), None)
        else:
            self._values[threading.get_ident()] = value

    def get(self):
        own = self._values.get(threading.get_ident())
        if own is not None or not _in_backward_pass():
            return own
        alive = {thread.ident for thread in threading.enumerate()}
        others = [value for thread, value in list(self._values.items()) if thread in alive]
        if len(others) > 1:
            unsupported(f"{len(others)} threads have stated a {self._what}",
                        "autograd computes a checkpoint again on a thread of its own, which may belong to any of them",
                        "Run each rank in a process of its own, or without checkpoints.")  # fmt: skip
        return others[0] if others else None


def _in_backward_pass() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1
