# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of a world and its objects by one call at a time."""

import threading
import weakref
from collections.abc import Callable

from ._errors import refuse


class _Token:
    """The holder of this token is the running call."""

    __slots__ = ("__weakref__",)


class Turn:
    """Refuses a call of another thread before it touches anything that the running call uses, because ctypes releases the GIL
    while the library works. A call by a signal handler that runs during a call is refused, too.

        held = turn.take()
        try:
            ...
        finally:
            turn.thread = 0
            turn.release(held.pop())

    An exception of a signal handler, such as Ctrl-C, may be raised after any function call, also between taking the token and the
    beginning of the `try`. Then nothing refers to the token any more, and the next take() makes a new one, whereas a lock would
    stay locked. `held` is a list, which is empty afterwards, because a frame that a traceback keeps must not refer to the token.
    release() is list.append, because the __exit__ of a class would begin by running handlers.

    thread: identity of the thread that has the token, as soon as that thread has set it; otherwise 0."""

    __slots__ = ("_free", "_made", "_mending", "release", "thread")

    def __init__(self):
        token = _Token()
        self._free = [token]
        self._made = weakref.ref(token)
        self._mending = threading.RLock()
        self.release = self._free.append
        self.thread = 0

    def take(self) -> list[_Token]:
        thread = threading.get_ident()  # first: no function is called once this frame refers to the token
        try:
            token = self._free.pop()
        except IndexError:
            token = self._another()
        self.thread = thread
        return [token]

    def _another(self) -> _Token:
        """Makes a new token if the last holder's was lost."""
        with self._mending:
            if self._made() is None:
                made = _Token()
                self._made = weakref.ref(made)
                return made
        if self.thread == threading.get_ident():
            refuse("this world is at work in this thread", "a signal handler or a finalizer calls it during another call",
                   "Call it after that call has returned, or use another world.")  # fmt: skip
        refuse("this world is at work in another thread", "calls on a world and its objects take turns",
               "Give each thread a world of its own, or guard a shared one with a lock.")  # fmt: skip

    def run(self, work: Callable):
        """Calls work() with exclusive use, and returns its result."""
        held = self.take()
        try:
            return work()
        finally:
            self.thread = 0
            self.release(held.pop())
