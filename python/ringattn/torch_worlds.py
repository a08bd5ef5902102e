# SPDX-License-Identifier: Apache-2.0
"""Worlds of the ranks of torch.distributed."""

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable

from . import _abi
from ._errors import Error, PeerError, refuse
from .worlds import World, callbacks_world, self_world

# Worlds by group and device. They keep references to the groups, so that no other group gets the same id().
_worlds: dict[tuple[int, tuple[int, int]], tuple[object, World]] = {}


@atexit.register
def _close() -> None:
    for _, world in _worlds.values():
        with contextlib.suppress(Error):  # a thread that is still using the world keeps it
            world.close()
    _worlds.clear()


def within(seconds: float, work: Callable, what: str):
    """Returns the result of work(), raises its exception, or raises an error after `seconds`."""
    results: queue.SimpleQueue = queue.SimpleQueue()

    def do():
        try:
            results.put((work(), None))
        except BaseException as error:  # noqa: BLE001, raised again below
            results.put((None, error))

    threading.Thread(target=do, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise PeerError(f"{what} is late", f"it has taken {seconds:g} seconds", "See what the other ranks do.") from None
    if error is not None:
        raise error
    return result


def _ask(question: Callable, group):
    """Queries torch.distributed about a group; failures become ringattn's errors."""
    try:
        return question(group)
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        refuse(f"group is {str(group)[:60]}", f"torch.distributed says: {str(error)[:120]}",
               "Pass a ProcessGroup that is there, one dimension of a DeviceMesh, None for the default group, or a "
               "ringattn.World.")  # fmt: skip


def group_of(group):
    """The ProcessGroup of a DeviceMesh of one dimension. Anything else is returned as it is."""
    from torch.distributed import device_mesh  # noqa: PLC0415, see torch_world()

    if not isinstance(group, getattr(device_mesh, "DeviceMesh", ())):  # a build of PyTorch may be without torch.distributed
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names
        of_names = "" if names is None else f", {', '.join(names)}"
        refuse(f"group is a DeviceMesh of {group.ndim} dimensions{of_names}", "a ring has the ranks of one",
               f"Pass one dimension of it, such as mesh[{(names or ('cp',))[-1]!r}].")  # fmt: skip
    return _ask(lambda mesh: mesh.get_group(), group)


def torch_world(group=None, device=None, timeout: float = 60.0) -> World:
    """The world of a ProcessGroup of torch.distributed. The ranks exchange addresses through the group and then connect to each
    other. Collective on the first call for a group and device; the world is then kept.

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension, such as mesh["cp"]. None: the default group.
        device: a torch.device. None: this process's current GPU if the group has an accelerator backend or the mesh is one of
            GPUs, else the CPU.
        timeout: seconds.

    Returns:
        A World.

    Raises:
        UsageError: torch.distributed isn't initialized, this rank is not in the group, or the mesh has several dimensions.
        PeerError: a rank did not connect within `timeout` seconds.

    Example:
        >>> torch.distributed.init_process_group("gloo")        # doctest: +SKIP
        >>> world = ringattn.torch_world()                      # doctest: +SKIP
    """
    import torch
    import torch.distributed as distributed

    if group is None and not (distributed.is_available() and distributed.is_initialized()):
        refuse("there is no default process group", "torch.distributed isn't initialized",
               "Call torch.distributed.init_process_group() first, or pass a group or a ringattn.World.")  # fmt: skip
    of_mesh = getattr(group, "device_type", None)  # of a DeviceMesh
    group = distributed.group.WORLD if group is None else group_of(group)
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        refuse("this rank is not in the group", "only its members can make a world of it", "Call it on the group's own ranks.")
    if device is None:
        on_gpu = of_mesh == "cuda" if of_mesh else "nccl" in str(_ask(distributed.get_backend, group))
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    device = torch.device(device)
    place = (_abi.CPU, 0)
    if device.type == "cuda":
        place = (_abi.CUDA, torch.cuda.current_device() if device.index is None else device.index)
    kept = _worlds.get((id(group), place))
    if kept is not None:
        return kept[1]
    rank, ranks = _ask(distributed.get_rank, group), _ask(distributed.get_world_size, group)

    def gather(data: bytes, seconds: float) -> list[bytes]:
        """Runs all_gather_object() on a thread, because it has only its group's timeout, which may be half an hour. A call that
        does not return is left on that thread, which ends with the group."""
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # per thread

        def work():
            if current is not None:
                torch.cuda.set_device(current)
            parts = [None] * ranks
            distributed.all_gather_object(parts, data, group=group)
            return parts

        return within(seconds, work, f"torch.distributed's all-gather of rank {rank} of {ranks}")

    world = self_world(place) if ranks == 1 else callbacks_world(rank, ranks, gather, place, timeout)
    _worlds[id(group), place] = (group, world)
    return world


def world_of(group, array) -> World | None:
    """The world of a group, for arrays like this one. A World is returned as it is. None, the default of attention(), means
    only this rank. No world can be created while torch.compile traces."""
    if isinstance(group, World):
        return group
    import torch.distributed as distributed

    if group is None and not (distributed.is_available() and distributed.is_initialized()):
        return None
    return torch_world(group, array.device)
