# SPDX-License-Identifier: Apache-2.0
"""The order of calls on several streams of a GPU, and what CUDA graphs keep."""

from ._abi import CUDA
from ._errors import unsupported
from ._loaded_torch import loaded_torch

# (object, its world) for each prepared object that is part of a CUDA graph. Nothing says when the last graph ends, so they stay
# until the process does, unless their world is closed.
_in_graphs: list = []


def is_capturing(index: int) -> bool:
    """Whether a CUDA graph is being captured on the current stream of GPU `index`."""
    cuda = loaded_torch().cuda
    if cuda.current_device() == index:
        return cuda.is_current_stream_capturing()
    with cuda.device(index):
        return cuda.is_current_stream_capturing()


def refuse_in_graph(world, problem: str = "this call is not prepared", why: str = "preparing allocates memory",
                    suggestion: str = "Make a call of the same shapes and settings before the capture.") -> None:  # fmt: skip
    """Refuses what can't be done while a graph is being captured: by default to prepare a call."""
    kind, index = world.device
    if kind == CUDA and loaded_torch() is not None and is_capturing(index):
        unsupported(problem, f"a CUDA graph is being captured, and {why}", suggestion)


class StreamOrder:
    """Calls of a prepared object share its memory, so a call on another stream waits on the device for the calls before it.

    last: handle of the stream of the last call; 0: the default stream; None: there was none."""

    __slots__ = ("_passed", "last")

    def __init__(self):
        self.last: int | None = None
        self._passed = None  # event after the last call, unless that was on the default stream, which is never destroyed

    def call(self, prepared, device, stream: int, work) -> None:
        """Calls work(stream), which enqueues work of `prepared` on the device's current stream."""
        if is_capturing(device.index):
            if not prepared.in_graph:
                prepared.in_graph = True
                _in_graphs.append((prepared, prepared.world()))
            work(stream)
            return
        cuda = loaded_torch().cuda
        if self.last is not None and stream != self.last:
            passed = self._passed if self.last else cuda.default_stream(device).record_event()
            cuda.current_stream(device).wait_event(passed)
        work(stream)
        self.last = stream
        if stream:
            if self._passed is None:
                self._passed = cuda.Event()
            self._passed.record(cuda.current_stream(device))
