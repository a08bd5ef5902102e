# SPDX-License-Identifier: Apache-2.0
"""What flash_attn's arguments, which ring_flash_attn's functions have, mean here."""

from ._arguments import as_int
from ._errors import refuse, unsupported
from ._spellings import causal_of, mask_of  # noqa: F401, for those who import from here


def check_rows(**arrays) -> None:
    """What has no axes is refused by name."""
    for name, array in arrays.items():
        if not hasattr(array, "ndim"):
            refuse(f"{name} is {type(array).__name__}", "it should be a PyTorch tensor", "Pass this rank's rows.")


def unpacked(name: str, packed, axes: int):
    """The tensors of kv or qkv, whose number is the name's, side by side in front of the axes of heads and dims."""
    check_rows(**{name: packed})
    if packed.ndim != axes or packed.shape[-3] != len(name):
        refuse(f"{name} is {list(packed.shape)}",
               f"it has {axes} axes, and {len(name)} tensors in the third from behind",
               "Stack them there.")  # fmt: skip
    return packed.unbind(-3)


def check_stride(stride, kv_heads: int) -> None:
    """heads_k_stride: that many K/V heads travel together in ring_flash_attn."""
    stride = as_int(stride, "heads_k_stride")
    if stride < 1 or kv_heads % stride:
        refuse(f"heads_k_stride is {stride}", f"it divides the {kv_heads} heads of keys and values",
               "Pass 1: no result depends on it.")  # fmt: skip


def check(dropout_p: float, alibi_slopes) -> None:
    if dropout_p:
        unsupported(f"dropout_p is {dropout_p}", "ringattn has no dropout", "Pass 0, as in evaluation.")
    if alibi_slopes is not None:
        unsupported("alibi_slopes are given", "ringattn has no ALiBi", "Pass None.")


def result(out, lse, return_attn_probs: bool):
    """lse's tokens go last."""
    return (out, lse.transpose(-1, -2).contiguous(), None) if return_attn_probs else out


def size_of(world) -> int:
    return 1 if world is None else world.size
