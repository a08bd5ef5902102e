# SPDX-License-Identifier: Apache-2.0
"""The order of calls on several streams of a GPU, and what CUDA graphs keep."""

from ._abi import CUDA
from ._errors import unsupported
from ._loaded_torch import loaded_torch

# (object, its world) for each prepared object that a CUDA graph uses. PyTorch does not report when a graph is destroyed, so
# they are kept until the process ends, unless their world is closed.
_in_graphs: list = []


def is_capturing(index: int) -> bool:
    """Whether a CUDA graph is being captured on the current stream of GPU `index`."""
    cuda = loaded_torch().cuda
    if cuda.current_device() == index:
        return cuda.is_current_stream_capturing()
    with cuda.device(index):
        return cuda.is_current_stream_capturing()


def is_captured(tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream of the tensor's GPU."""
    return tensor.is_cuda and is_capturing(tensor.device.index)


def refuse_in_graph(world, problem: str = "this call is not prepared", why: str = "preparing allocates memory",
                    suggestion: str = "Make the call once in this thread before the capture.") -> None:  # fmt: skip
    """Refuses an operation that is impossible while a graph is being captured, by default preparing a call."""
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
            work(stream)  # refuses before it enqueues: an object that no graph holds is not kept
            if not prepared.in_graph:
                prepared.in_graph = True
                _in_graphs.append((prepared, prepared.world()))
            return
        cuda = loaded_torch().cuda
        current = cuda.current_stream(device)
        # The id of a stream that PyTorch did not make is its handle. After it is destroyed, another stream may get the handle,
        # and the handle cudaStreamPerThread is another stream in each thread.
        external = current.stream_id == stream
        if self.last is not None and (external or stream != self.last):
            current.wait_event(self._passed if self.last else cuda.default_stream(device).record_event())
        if stream and self._passed is None:
            self._passed = cuda.Event()
        try:
            work(stream)
        finally:  # a call that fails may have enqueued some of its work
            if stream:
                self._passed.record(current)
            self.last = stream
