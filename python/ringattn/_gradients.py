# SPDX-License-Identifier: Apache-2.0
"""Which calls have gradients. Those that have none are refused where a tensor requires one."""

import sys

from ._errors import unsupported

# The tensors of each op that have gradients.
INPUTS = {
    "attention": ("q", "k", "v", "sinks"),
    "varlen": ("q", "k", "v", "sinks"),
    "causal_conv1d": ("x", "weight", "bias", "initial_states"),
    "mla": ("q", "latent", "k_rope", "w_uk", "w_uv", "sinks"),
}
WITHOUT = "only attention(), varlen(), mla() and causal_conv1d() have gradients"
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
    if out is not None:
        unsupported(problem, "results that autograd records are new tensors",
                    "Leave out= out, or call it under torch.no_grad().")  # fmt: skip


def check_mla(name: str, expanded: bool, fp8: bool, memory_budget: int, out) -> None:
    """The same of mla(). expanded: the form isn't the absorbed one."""
    problem = f"{name} requires a gradient"
    if fp8:
        unsupported(problem, "MLA over FP8 latents has no gradient",
                    "Pass latent and k_rope unquantized, or call it under torch.no_grad().")  # fmt: skip
    if not expanded:
        unsupported(problem, "the absorbed form of MLA has no gradient",
                    'Pass w_uk, w_uv and form="expanded", or call it under torch.no_grad().')  # fmt: skip
    if memory_budget:
        unsupported(problem, "MLA within a memory budget has no gradient",
                    "Leave memory_budget out, or call it under torch.no_grad().")  # fmt: skip
    if out is not None:
        check(name, False, None, out)
