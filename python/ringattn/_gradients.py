# SPDX-License-Identifier: Apache-2.0
"""Which calls have gradients. Those that have none are refused where a tensor requires one."""

import sys

from ._errors import unsupported

_ATTENTION = ("q", "k", "v", "sinks")
# The arguments of each op that have gradients.
INPUTS = {"attention": _ATTENTION, "varlen": _ATTENTION,
          "ssd": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")}  # fmt: skip
WITHOUT = "only attention(), varlen() and ssd() have gradients"
SUGGESTION = "Call it under torch.no_grad(), or pass detached tensors."


def requiring(arrays: dict) -> str | None:
    """The name of the first tensor whose gradient autograd would record; None if there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return None
    for name, array in arrays.items():
        if isinstance(array, torch.Tensor) and array.requires_grad:
            return name
    return None


def check(name: str, compressed: bool, k_positions, out) -> None:
    """Refuses arguments of a call without gradients. name: a tensor that requires one."""
    problem = f"{name} requires a gradient"
    if compressed:
        unsupported(problem, "attention to compressed keys or values has no gradient",
                    "Pass k and v uncompressed, or call it under torch.no_grad().")  # fmt: skip
    if k_positions is not None:
        unsupported(problem, "attention with k_positions has no gradient",
                    "Pass all keys, or call it under torch.no_grad().")  # fmt: skip
    check_out(name, out)


def check_out(name: str, out) -> None:
    if out is not None:
        unsupported(f"{name} requires a gradient", "results that autograd records are new tensors",
                    "Leave out= out, or call it under torch.no_grad().")  # fmt: skip


def refuse_selective(name: str) -> None:
    unsupported(f"{name} requires a gradient", "selective_scan() (Mamba-1) has no gradients, ssd() (Mamba-2) has", SUGGESTION)
