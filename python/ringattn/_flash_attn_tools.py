# SPDX-License-Identifier: Apache-2.0
"""What flash_attn's arguments, which ring_flash_attn's functions have, mean here."""

from ._errors import unsupported


def mask_of(causal: bool, window_size: tuple[int, int]):
    """As flash_attn has it: a causal window has no right side."""
    if tuple(window_size) == (-1, -1):
        return "causal" if causal else "full"
    left, right = window_size
    return (left, 0 if causal else right)


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
