# SPDX-License-Identifier: Apache-2.0
"""The adapter of ring_flash_attn for Hugging Face's transformers. Models compute this rank's contiguous shard of a packed
stream, whose sequence lengths are set before each batch."""

from typing import NamedTuple

from ._arguments import lengths_of
from ._errors import refuse
from ._flash_attn_tools import check_stride
from ._per_thread import PerThread
from .layouts import packed
from .torch_worlds import group_of, torch_world
from .worlds import World

class _Stated(NamedTuple):
    """group, stride: of the last substitute_hf_flash_attn(); batch: (layout, world) of the last
    update_ring_flash_attn_params()."""

    group: object
    stride: int = 1
    batch: tuple | None = None


_here = PerThread("call of substitute_hf_flash_attn()")
_NOTHING = _Stated(object())  # no group, where None is the default one


def _dealt():
    """(layout, world), or None inside ringattn.transformers.batch(), which has them. Refuses if neither was set, because
    a rank that took its shard for the whole stream would compute wrong values."""
    from . import transformers  # noqa: PLC0415, needs torch

    dealt = (_here.get() or _NOTHING).batch
    if dealt is None and not transformers.is_inside_batch():
        refuse("no sequences are known", "models compute a rank's shard since substitute_hf_flash_attn()",
               "Call update_ring_flash_attn_params() on this thread before the model.")  # fmt: skip
    return None if transformers.is_inside_batch() else dealt


def _forward(module, query, key, *arguments, **named):
    from . import transformers  # noqa: PLC0415, as above

    check_stride((_here.get() or _NOTHING).stride, key.shape[1])
    return transformers.attention_forward(module, query, key, *arguments, **named, dealt=_dealt())


def _mask(*arguments, **named):
    from . import transformers  # noqa: PLC0415, as above

    return transformers.attention_mask(*arguments, **named, dealt=_dealt())


def substitute_hf_flash_attn(process_group, heads_k_stride: int) -> None:
    """ring_flash_attn's function. On this thread, models with the implementation "flash_attention_2" then use ringattn. So do
    models with "ringattn", because transformers refuses the former if flash_attn is not installed.

    Args:
        process_group: a torch.distributed ProcessGroup, one dimension of a DeviceMesh, or a ringattn.World. None: the default
            group.
        heads_k_stride: has no effect, because keys are exchanged in blocks. As in ring_flash_attn it must divide the K/V heads
            of each layer.

    Returns:
        None.

    Raises:
        UsageError: heads_k_stride is below 1.
        UnsupportedError: transformers is too old.

    Example:
        >>> ringattn.ring_flash_attn.substitute_hf_flash_attn(ringattn.self_world(), heads_k_stride=1)
    """
    check_stride(heads_k_stride, 0)
    from . import transformers  # noqa: PLC0415, as above

    for name in ("flash_attention_2", "ringattn"):
        transformers.register(name, _forward, _mask)
    _here.set(_Stated(group_of(process_group), heads_k_stride))


def update_ring_flash_attn_params(cu_seqlens, process_group) -> None:
    """ring_flash_attn's function. Sets the sequence lengths of the packed stream, of which this rank has a contiguous shard, for
    all models that this thread calls until the next update. Collective on the first call for a group.

    Args:
        cu_seqlens: [sequences + 1] cumulative lengths of the whole stream.
        process_group: the same as in substitute_hf_flash_attn(), which must be called first, on the same thread.

    Returns:
        None.

    Raises:
        UsageError: process_group is another one, or the number of ranks does not divide the tokens.

    Example:
        >>> world = ringattn.self_world()
        >>> ringattn.ring_flash_attn.substitute_hf_flash_attn(world, heads_k_stride=1)
        >>> ringattn.ring_flash_attn.update_ring_flash_attn_params(torch.tensor([0, 24, 64]), world)
    """
    lengths = lengths_of(cu_seqlens)
    stated, process_group = _here.get() or _NOTHING, group_of(process_group)
    if stated.group is not process_group:
        refuse("process_group is another one", "keys are exchanged among the ranks of substitute_hf_flash_attn()",
               "Pass the same to both, and call that one first, on the same thread.")  # fmt: skip
    world = process_group if isinstance(process_group, World) else torch_world(process_group)
    if sum(lengths) % world.size:
        refuse(f"{sum(lengths)} tokens don't divide among {world.size} ranks", "llama3's shards are equally long",
               "Pad the stream.")  # fmt: skip
    _here.set(stated._replace(batch=(packed(lengths, world.size), world)))
