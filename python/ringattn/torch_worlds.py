# SPDX-License-Identifier: Apache-2.0
"""Worlds of torch.distributed's ranks."""

from ._errors import unsupported
from ._tensors import device_of
from .worlds import World, self_world


def world_of(group, array) -> World:
    """The world of a ProcessGroup (None: the default one, or this rank alone where torch.distributed was not initialised) for
    arrays like this one; a World is one already."""
    if isinstance(group, World):
        return group
    import torch.distributed as distributed

    if group is None and not (distributed.is_available() and distributed.is_initialized()):
        return self_world(device_of(array))
    if distributed.get_world_size(group) == 1:
        return self_world(device_of(array))
    unsupported(f"a ProcessGroup of {distributed.get_world_size(group)} ranks can't be a world", "", "")
