# SPDX-License-Identifier: Apache-2.0
"""ringattn.nn.parallelize_(): splits the linear layers of a Hugging Face model over the ranks of a world."""

import fnmatch

import torch

from . import _linear
from ._errors import refuse, unsupported
from .worlds import World

# Hugging Face's style: (parallel, output) of the layer.
_STYLES = {"colwise": ("column", "shard"), "rowwise": ("row", "replicated")}


def _plan_of(model: torch.nn.Module) -> dict[str, str]:
    """The base model's plan, by patterns of names in the model."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not plan:
        refuse(f"{type(model).__name__} has no tensor-parallel plan", "its config.base_model_tp_plan is missing",
               "Replace its layers by ringattn.nn.Linear.from_linear(layer, parallel=…, world=world).")  # fmt: skip
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    return {prefix + pattern: style for pattern, style in plan.items()}


def _check_heads(model: torch.nn.Module, name: str, layer: torch.nn.Linear, world: World) -> None:
    """Refuses to divide a head between ranks, for layers of a module that has heads."""
    dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    for rank in range(world.size) if isinstance(dim, int) else ():
        begin, end = _linear.linear_columns(layer.out_features, world.size, rank)
        if begin % dim or end % dim or begin == end:
            unsupported(f"{name} over {world.size} ranks",
                        f"rank {rank} would have its columns {begin} to {end}, and heads have {dim}",
                        "Use a number of ranks that divides the K/V heads.")  # fmt: skip


def parallelize_(model: torch.nn.Module, world: World, *, threads: int = 0, timeout: float = 60.0) -> dict[str, str]:
    """Replaces the torch.nn.Linear layers that a Hugging Face model's plan names (config.base_model_tp_plan) by column- and
    row-parallel ringattn.nn.Linear ones, in place. Each rank passes the same whole model and keeps its shards; other layers,
    such as the output head, stay whole. Logits have the same bits as on one rank, if the bits of the attention do not depend on
    the number of heads, which attn_implementation="ringattn" ensures.

    Args:
        model: a Hugging Face model.
        world: the ranks, 1 to 8. Calls of the model are then collective.
        threads, timeout: as in ringattn.linear(), for each layer.

    Returns:
        A dict from the name of each replaced layer to "column" or "row".

    Raises:
        UsageError: the model has no plan, or it names no torch.nn.Linear.
        UnsupportedError: the plan has a style other than colwise and rowwise, or a head would be divided between ranks.

    Example:
        >>> from types import SimpleNamespace
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        >>> model.config = SimpleNamespace(base_model_tp_plan={"0": "colwise", "1": "rowwise"})
        >>> ringattn.nn.parallelize_(model, ringattn.self_world())
        {'0': 'column', '1': 'row'}
    """
    from .nn import Linear  # noqa: PLC0415, which imports this

    if not isinstance(model, torch.nn.Module):
        refuse(f"model is {type(model).__name__}", "it should be a torch.nn.Module", "Pass the model, then the world.")
    plan, found = _plan_of(model), {}
    if not isinstance(world, World):
        refuse(f"world is {type(world).__name__}", "it should be a ringattn.World, a group of ranks",
               "Pass ringattn.torch_world(), or another one.")  # fmt: skip
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if style is None:
            continue
        if style not in _STYLES or type(module) is not torch.nn.Linear:
            unsupported(f"{name} is {style} in the model's plan",
                        f"it is a {type(module).__name__}, and torch.nn.Linear layers are shared that are colwise or rowwise",
                        "Share this model's layers one by one.")  # fmt: skip
        if style == "colwise":
            _check_heads(model, name, module, world)
        found[name] = (module, *_STYLES[style])
    if not found:
        refuse("the model's plan names no layer of it", f"its patterns are {', '.join(plan)[:120]}", "Check the model.")
    for name, (module, parallel, output) in found.items():
        holder, _, attribute = name.rpartition(".")
        made = Linear.from_linear(module, parallel=parallel, output=output, world=world, threads=threads, timeout=timeout)
        setattr(model.get_submodule(holder), attribute, made)
    return {name: parallel for name, (_, parallel, _) in found.items()}
