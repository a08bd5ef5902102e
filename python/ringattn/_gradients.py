# SPDX-License-Identifier: Apache-2.0
"""Which calls have gradients. Calls without gradients are refused if a tensor requires one."""

from ._errors import unsupported
from ._loaded_torch import loaded_torch

# The tensors of each op that have gradients.
INPUTS = {
    "attention": ("q", "k", "v", "sinks"),
    "varlen": ("q", "k", "v", "sinks"),
    "mla": ("q", "latent", "k_rope", "w_uk", "w_uv", "sinks"),
    "linear": ("x", "weight", "bias"),
    "ssd": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"),
    "causal_conv1d": ("x", "weight", "bias", "initial_states"),
    "rope": ("q", "k"),
    "reshard": ("x",),
}
WITHOUT = "only attention(), varlen(), mla(), linear(), ssd(), causal_conv1d(), rope() and reshard() have gradients"
SUGGESTION = "Call it under torch.no_grad(), or pass detached tensors."


def requiring(arrays: dict) -> str | None:
    """The name of the first tensor whose gradient autograd would record; None if there is none."""
    torch = loaded_torch()
    if torch is None or not torch.is_grad_enabled():
        return None
    for name, array in arrays.items():
        if isinstance(array, torch.Tensor) and array.requires_grad:
            return name
    return None


def dtype_of(parameter):
    """The dtype of a tensor's gradient: its own, or float32 if its grad_dtype says so (PyTorch since 2.10)."""
    wide = loaded_torch().float32
    said = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return wide if said is wide else parameter.dtype


def refuse_double_backward(name: str, op: str) -> None:
    """name: a tensor of the backward pass `op` whose gradient autograd would record."""
    unsupported(f"{name} of {op} requires a gradient", "gradients have no gradients, which create_graph=True asks for",
                "Leave create_graph out, or compute this layer with PyTorch.")  # fmt: skip


def refuse_transforms(arrays) -> None:
    """Refuses tensors inside torch.func's transforms, and tensors with a tangent, because the calls would lose either."""
    torch = loaded_torch()
    if torch is None:
        return
    transform = torch._C._functorch.peek_interpreter_stack()
    forward_ad = torch.autograd.forward_ad
    if transform is None and forward_ad._current_level < 0:
        return
    for array in arrays:
        if not isinstance(array, torch.Tensor):
            continue
        if transform is not None:
            unsupported("ringattn is called inside a transform of torch.func",
                        "its ops have no rules for grad, vjp, jvp and vmap",
                        "Use torch.autograd.grad() or backward(), and a batch axis instead of vmap.")  # fmt: skip
        if forward_ad.unpack_dual(array).tangent is not None:
            unsupported("an array has a tangent", "ringattn's ops have no forward-mode derivatives",
                        "Use backward(), or pass unpack_dual(x).primal.")  # fmt: skip


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


def check_linear(name: str, quantized: bool, out) -> None:
    """The same of linear()."""
    if quantized:
        unsupported(f"{name} requires a gradient", "a linear layer with quantized weights has none",
                    "Call it under torch.no_grad(), or train the layer before it is quantized.")  # fmt: skip
    check_out(name, out)


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


def refuse_selective(name: str) -> None:
    unsupported(f"{name} requires a gradient", "selective_scan() (Mamba-1) has no gradients, ssd() (Mamba-2) has", SUGGESTION)
