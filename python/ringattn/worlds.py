# SPDX-License-Identifier: Apache-2.0
"""Worlds: the ranks that compute together."""

import contextlib
import ctypes
import itertools
import secrets
import threading
import weakref
from collections.abc import Callable

from . import _abi, _structs
from ._abi import lib
from ._arguments import as_int32, as_text, check_settings, seconds_of, shown
from ._errors import Error, PeerError, refuse, told_to_peers
from ._streams import StreamOrder, refuse_in_graph
from ._turns import Turn

# Number of prepared objects that a world keeps: the most recently used ones.
_KEPT_OBJECTS = 32


# Worlds by key, for PyTorch operators, which can't take objects. Keys are unique across processes.
_process = secrets.token_hex(8)
_numbers = itertools.count(1)
_by_key: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def of_key(key: str) -> "World":
    world = _by_key.get(key)
    if world is None:
        refuse("a graph names a world that is not there", "it was another process's, or nothing has kept it",
               "Make graphs in the process that runs them, and keep their worlds.")  # fmt: skip
    return world


class Owner:
    """Owns an object of the library, which must be destroyed once."""

    _handle = None

    def _refuse_copy(self, *_):
        raise TypeError(f"a ringattn.{type(self).__name__} can't be copied or pickled (it has an object of the library, which "
                        "ends with it). Share it, or make another one.")  # fmt: skip

    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy


class World(Owner):
    """The ranks that compute together; this object is one of them. It is used by one thread at a time: a concurrent call is
    refused. self_world(), threads_worlds(), torch_world(), store_world(), mpi_world() and callbacks_world() make one.

    Attributes:
        rank: of this object, from 0 on.
        size: number of ranks.
        device: where its arrays lie, (type, index) as in DLPack: (1, 0) is the host, (2, i) GPU i.

    Example:
        >>> with ringattn.threads_worlds(1)[0] as world:
        ...     print(world)
        <ringattn.World rank 0 of 1>
    """

    def __init__(self, handle, device: tuple[int, int] = (_abi.CPU, 0), keeps=None):
        self._handle = handle
        self.turn = Turn()
        self._using = threading.RLock()  # held while abort() uses the handle, and while close() removes it
        _abi.interrupts.watch()
        self.device = device
        self.rank: int = lib.world_rank(handle)
        self.size: int = lib.world_size(handle)
        self._objects: dict = {}
        self._given_away: weakref.WeakSet = weakref.WeakSet()
        self.calls: dict = {}  # _job.Call by settings and shapes of arrays
        self.warned: set = set()  # jobs that a call has warned of
        self._uses = 0
        self.order = StreamOrder()  # with several ranks, the order of the runs of all objects
        self.key = f"{_process}-{next(_numbers)}"
        _by_key[self.key] = self
        self._keeps = keeps  # objects that callbacks of the library use

    @property
    def handle(self):
        """The library's object."""
        if self._handle is None:
            refuse("the world is closed", "World.close() was called", "Make another one.")
        return self._handle

    def prepared(self, key, make: Callable):
        """The prepared object of a job. It is created once, and kept while it is among the most recently used ones. Creation
        is collective, so what is kept depends only on the order of uses, which is the same on all ranks."""
        objects = self._objects
        try:
            hash(key)
        except TypeError:
            check_settings(key)
            raise

        def find():
            found = objects.get(key)
            if found is None:
                refuse_in_graph(self)
                closable = [kept for kept, made in objects.items() if not made.in_use and not made.in_graph]
                if len(objects) >= _KEPT_OBJECTS and closable:
                    oldest = min(closable, key=lambda kept: objects[kept].used)
                    objects.pop(oldest).end()
                found = objects[key] = make()
            self.use(found)
            return found

        return self.turn.run(find)

    def give_away(self, key):
        """A prepared object that the caller keeps from here on. The world still waits for its work, and closes it."""

        def give():
            given = self._objects.pop(key)
            self._given_away.add(given)
            return given

        return self.turn.run(give)

    def use(self, prepared) -> None:
        """Marks a prepared object as the most recently used one."""
        self._uses = prepared.used = self._uses + 1

    def wait(self) -> None:
        """Waits for all work that calls on this world have enqueued on GPU streams, and raises its first failure. For
        calls without a world use ringattn.self_world((2, i)).wait() of GPU i. Refused once the world is closed."""
        self.turn.run(self._drain)

    def _drain(self) -> None:
        failures = []
        self.handle  # noqa: B018, refuses where the world is closed
        for made in (*self._objects.values(), *self._given_away):
            if made._handle is None:  # its owner has closed it
                continue
            try:
                made.settle()
            except Error as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def abort(self, error: BaseException) -> None:
        """Reports to the other ranks that this rank has failed; their calls raise `error`. May be called while another
        thread's call runs."""
        status = error.status if isinstance(error, Error) else PeerError.status
        text = told_to_peers(error)
        with self._using:
            lib.world_abort(self.handle, status, text)

    def close(self) -> None:
        """Closes the world and all objects prepared on it. Refused while another thread's call runs."""
        self.turn.run(self._end)

    def _end(self) -> None:
        if self._handle is None:
            return
        for made in (*self._objects.values(), *self._given_away):
            made.end()
        self._objects.clear()
        self.calls.clear()
        self._destroy()

    def _destroy(self) -> None:
        with self._using:  # a signal handler may raise in between; a leak is better than destroying twice
            handle, self._handle = self._handle, None
        lib.world_destroy(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        # The world is unreachable, but a call on one of its objects may still be running, and then outlives it.
        if self._handle is not None:
            with contextlib.suppress(Error):
                self.close()
        if self._handle is not None:
            self._destroy()

    def __repr__(self):
        return f"<ringattn.World rank {self.rank} of {self.size}>"


class Prepared(Owner):
    """An object of the library on a world. It is destroyed with this one, or with its world."""

    used = 0  # time of the last use, in uses of the world
    in_use = 0  # calls in progress that release the world between their steps; the object is kept meanwhile
    in_graph = False  # whether a CUDA graph uses its memory; the object is kept then

    def __init__(self, world: World, destroy: Callable):
        self.world = weakref.ref(world)
        self.turn = world.turn
        self.order = world.order if world.size > 1 else StreamOrder()
        self._destroy = destroy

    @property
    def handle(self):
        """The library's object."""
        if self._handle is None:
            refuse(f"the {type(self).__name__} is closed", "its world, or itself, was closed", "Make another one.")
        return self._handle

    def close(self) -> None:
        """Closes the object. Refused while another thread's call on the same world runs."""
        self.turn.run(self.end)

    def end(self) -> None:
        """close() for a caller that has exclusive use of the world."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._destroy(handle)

    def __del__(self):
        self.end()  # unreachable from elsewhere, so no call runs on it


def _options(device: tuple[int, int] = (_abi.CPU, 0)):
    return _structs.world_options(abi=_abi.ABI, device_type=device[0], device_id=device[1])


_own = threading.local()


def self_world(device: tuple[int, int] = (_abi.CPU, 0)) -> World:
    """The world of one rank on a device. Each thread has its own.

    Args:
        device: (type, index) as in DLPack: (1, 0) is the host, (2, i) GPU i.

    Returns:
        A World, which is kept for later calls.

    Raises:
        UsageError: device is not such a pair.
        UnsupportedError: the device does not exist.

    Example:
        >>> ringattn.self_world().size
        1
    """
    worlds = _own.__dict__.setdefault("worlds", {})
    try:
        world = worlds.get(device)
        _, _ = device
    except (TypeError, ValueError):
        refuse(f"device is {shown(device)}", "it is (type, index) as DLPack counts them", "Pass (1, 0) for the host.")
    if world is None or world._handle is None:
        handle = _abi.Handle()
        lib.world_self(ctypes.byref(_options(device)), ctypes.byref(handle))
        world = worlds[device] = World(handle, device)
    return world


def own_calls() -> dict:
    """The kept calls of this thread's own worlds, like World.calls."""
    calls = getattr(_own, "calls", None)
    if calls is None:
        calls = _own.calls = {}
    return calls


def threads_worlds(ranks: int) -> list[World]:
    """The worlds of ranks in this process, in host memory. Use each from a thread of its own.

    Args:
        ranks: number of ranks.

    Returns:
        A list of Worlds, one for each rank.

    Raises:
        UsageError: ranks is below 1, or more than the library supports.

    Example:
        >>> [world.rank for world in ringattn.threads_worlds(3)]
        [0, 1, 2]
    """
    ranks = as_int32(ranks, "ranks")
    handles = (_abi.Handle * min(max(ranks, 1), 1024))()  # the library refuses more ranks
    lib.world_threads(ctypes.byref(_options()), ranks, handles)
    return [World(_abi.Handle(handle)) for handle in handles]


def run_ranks(ranks: int, work: Callable[[World], object]) -> list:
    """Calls work(world) on a thread for each rank of a world in this process.

    Args:
        ranks: number of ranks.
        work: a function of a World.

    Returns:
        A list of the results, in order of rank.

    Raises:
        Exception: the first failure of work(), after all ranks have ended.
        UsageError: ranks is below 1, or more than the library supports.

    Example:
        >>> def work(world):
        ...     rows = np.ones((50, 4, 32), "float32")
        ...     return ringattn.attention(rows, rows, rows, world=world, layout="contiguous")[0]
        >>> [out.shape for out in ringattn.run_ranks(2, work)]
        [(50, 4, 32), (50, 4, 32)]
    """
    worlds = threads_worlds(ranks)
    results: list = [None] * ranks
    failures: list = []

    def play(world):
        try:
            results[world.rank] = work(world)
        except BaseException as error:  # noqa: BLE001, raised again below
            failures.append(error)
            with contextlib.suppress(Error):  # if work() has closed it
                world.abort(error)

    threads = [threading.Thread(target=play, args=(world,)) for world in worlds]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # e.g. Ctrl-C in this thread: ends the ranks' calls, too
        for world in worlds:
            with contextlib.suppress(Error):
                world.abort(error)
        for thread in threads:
            if thread.ident is not None:  # started
                thread.join()
        raise
    for world in worlds:
        world.close()
    if failures:
        raise failures[0]
    return results


def callbacks_world(
    rank: int, ranks: int, all_gather: Callable[[bytes, float], list[bytes]], device: tuple[int, int] = (_abi.CPU, 0),
    timeout: float = 60.0,
) -> World:  # fmt: skip
    """The world of ranks in several processes that can all-gather bytes. The ranks connect over TCP. Collective.

    Args:
        rank, ranks: this process's rank, and the number of ranks.
        all_gather: all_gather(data, seconds) returns the bytes of every rank, in order of rank. It is only called during this
            call. An exception that it raises becomes the cause of the error; KeyboardInterrupt and SystemExit are raised as
            they are.
        device: (1, 0) is the host, (2, i) GPU i of this process. GPU data is then sent from GPU to GPU.
        timeout: seconds.

    Returns:
        A World.

    Raises:
        UsageError: there is no such rank.
        PeerError: all_gather() failed, or a rank did not connect within `timeout` seconds.

    Example:
        >>> ringattn.callbacks_world(0, 1, lambda data, seconds: [data]).size
        1
    """
    failures = []

    def gather(_, data, size, seconds, gathered):
        try:
            for part in all_gather(ctypes.string_at(data, size) if size else b"", seconds):
                lib.gathered_add(gathered, part, len(part))
            return 0
        except BaseException as error:  # noqa: BLE001, raised again below
            failures.append(error)
            return 1

    called = _structs.Gather(gather)
    handle = _abi.Handle()
    try:
        callbacks = _structs.callbacks(all_gather=called)
        rank, ranks = as_int32(rank, "rank"), as_int32(ranks, "ranks")
        lib.world_callbacks(_options(device), rank, ranks, callbacks, seconds_of(timeout), ctypes.byref(handle))
    except Error as error:
        cause = failures[0] if failures else None
        if cause is not None and not isinstance(cause, Exception):  # e.g. Ctrl-C: the caller's process is meant to end
            raise cause from error
        raise error from cause
    return World(handle, device)


def store_world(
    address: str | None = None, rank: int | None = None, ranks: int | None = None, job: str | None = None,
    device: tuple[int, int] = (_abi.CPU, 0), timeout: float = 60.0,
) -> World:  # fmt: skip
    """The world of ranks in several processes that connect to an address, which rank 0 serves until all have connected.
    Collective.

    Args:
        address: "host:port". None: it is read from RINGATTN_STORE, and rank and number of ranks from the environment of
            torchrun, Slurm or mpirun; rank, ranks and job must then be None.
        rank, ranks: this process's rank, and the number of ranks. None: 0 of 1.
        job: name that distinguishes jobs at the same address.
        device, timeout: as in callbacks_world().

    Returns:
        A World.

    Raises:
        UsageError: rank, ranks or job is given without an address, or the environment has none.
        PeerError: a rank did not connect within `timeout` seconds.

    Example:
        >>> ringattn.store_world("127.0.0.1:29555", rank=0, ranks=1).size
        1
    """
    for name, given in (("rank", rank), ("ranks", ranks), ("job", job)):
        if address is None and given is not None:
            refuse(f"{name} is given without an address", "without one the environment says where ranks meet, and which this is",
                   f"Pass the address, or leave {name} out.")  # fmt: skip
    handle = _abi.Handle()
    place, job = (text if text is None else as_text(text, name) for text, name in ((address, "address"), (job, "job")))
    rank, ranks = (fallback if number is None else as_int32(number, name)
                   for number, name, fallback in ((rank, "rank", 0), (ranks, "ranks", 1)))  # fmt: skip
    lib.world_store(_options(device), place, rank, ranks, job or None, seconds_of(timeout), ctypes.byref(handle))
    return World(handle, device)


def mpi_world(communicator) -> World:
    """The world of an mpi4py communicator, which is duplicated. Arrays are in host memory. Collective.

    Args:
        communicator: such as mpi4py.MPI.COMM_WORLD.

    Returns:
        A World.

    Raises:
        ImportError: mpi4py is missing.
        UnsupportedError: the library was built without MPI.

    Example:
        >>> from mpi4py import MPI                              # doctest: +SKIP
        >>> world = ringattn.mpi_world(MPI.COMM_WORLD)          # doctest: +SKIP
    """
    from mpi4py import MPI  # noqa: PLC0415, only needed here

    address = MPI._addressof(communicator)
    handle = _abi.Handle()
    lib.world_mpi(ctypes.byref(_options()), address, ctypes.byref(handle))
    return World(handle)
