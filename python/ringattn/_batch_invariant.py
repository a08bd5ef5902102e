# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant models of transformers: replacements for the layers other than attention."""

import torch
from torch import Tensor, nn

from ._errors import refuse, unsupported
from ._transformers_paged import ensure_registered
from .nn import Linear

# Families whose code in transformers 5.24 combines tokens only in attention, and has sums only in linear layers and norms. All
# other operations are elementwise IEEE additions, multiplications and conversions, and cos and sin.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ADVICE = f"Use a model of the types {', '.join(FAMILIES)}, without layers of other kinds."
_KNOWN = (nn.Linear, nn.Embedding, nn.ModuleList, nn.Identity)
_COMPOSED = ("ForCausalLM", "Model", "DecoderLayer", "Attention")
_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
                "PytorchGELUTanh": "gelu_tanh"}  # fmt: skip
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Types of RoPE whose frequencies do not depend on the longest sequence of a batch.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def sum_rows(x: Tensor) -> Tensor:
    """Sums the last axis, which is kept with length 1, by a fixed tree. Let n be the largest power of two that is not above the
    length. First, the elements from n on are added to the first ones. Then, while n > 1, elements i and i + n/2 are added and n
    is halved. Each step is one elementwise addition, so the order does not depend on the number of rows, unlike in torch.sum."""
    n = 1 << (x.shape[-1].bit_length() - 1)
    if n < x.shape[-1]:
        rest = x.shape[-1] - n
        x = torch.cat([x[..., :rest] + x[..., n:], x[..., rest:n]], -1)
    while n > 1:
        n //= 2
        x = x[..., :n] + x[..., n:]
    return x


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) in fp32 with sum_rows(), rounded to x's type, times weight."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = sum_rows(wide * wide) / x.shape[-1]
        # sqrt and division are correctly rounded. rsqrt is not, and differs between vector code and the scalar remainder.
        return self.weight * (wide / torch.sqrt(mean + self.variance_epsilon)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def _family(module: nn.Module) -> str | None:
    """The part of a class name after the family name, such as "MLP", if transformers defines the class for one of FAMILIES."""
    kind = type(module)
    for family in FAMILIES:
        prefix = family.capitalize()
        if kind.__module__ == f"transformers.models.{family}.modeling_{family}" and kind.__name__.startswith(prefix):
            return kind.__name__[len(prefix) :]
    return None


def _refuse(name: str, module: nn.Module, why: str) -> None:
    unsupported(f"{name} is a {type(module).__name__}", why, _ADVICE)


def _is_known(module: nn.Module) -> bool:
    """Whether the module is of a kind whose results don't depend on the batch, or are made so."""
    part = _family(module)
    known = part in (*_COMPOSED, "MLP", "RotaryEmbedding", "RMSNorm") or isinstance(module, (Linear, RMSNorm))
    return known or type(module) in (*_KNOWN, nn.Dropout) or type(module).__name__ in _ACTIVATIONS


def _check(name: str, module: nn.Module) -> None:
    """Refuses a module of a known kind whose results depend on the batch, or that can't be replaced."""
    part = _family(module)
    if name and part and part != "RMSNorm" and "forward" in vars(module):  # norms are tested below
        _refuse(name, module, "its forward was replaced")
    if type(module) is nn.Linear or part == "RMSNorm":
        if module.weight.is_meta:
            refuse(f"{name}.weight is on the meta device", "it has no elements", "Load the model first.")
        if module.weight.dtype not in _DTYPES:
            unsupported(f"{name}.weight is {str(module.weight.dtype).removeprefix('torch.')}",
                        "ringattn computes in float32, float16 and bfloat16", "Convert the model.")  # fmt: skip
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            unsupported(f"{name} has hooks", "a new layer would lose them", "Remove them, and add them afterwards.")
    if type(module) is nn.Linear and "forward" in vars(module):
        _refuse(name, module, "its forward was replaced")
    if part == "MLP":
        children = [child for child, _ in module.named_children()]
        if sorted(children) != ["act_fn", "down_proj", "gate_proj", "up_proj"]:
            _refuse(name, module, f"it has {', '.join(children)}, and a gated layer is known")
        if not isinstance(module.gate_proj, (nn.Linear, Linear)):
            _refuse(f"{name}.gate_proj", module.gate_proj, "a linear layer is known there")
        if type(module.act_fn).__name__ not in _ACTIVATIONS and not isinstance(module.act_fn, nn.Identity):
            _refuse(f"{name}.act_fn", module.act_fn, "ringattn.nn.Linear has SiLU and GELU")
    elif part == "RotaryEmbedding":
        if getattr(module, "rope_type", None) not in _ROPE_TYPES:
            _refuse(name, module, f"its frequencies of type {getattr(module, 'rope_type', None)} depend on the longest sequence")
    elif part == "RMSNorm":
        probe = torch.linspace(-2, 2, 2 * module.weight.numel()).reshape(2, -1).to(module.weight)
        with torch.no_grad():
            if not torch.allclose(RMSNorm(module.weight, module.variance_epsilon)(probe), module(probe), rtol=0.02, atol=0.02):
                _refuse(name, module, "it computes something else than x / sqrt(mean(x²) + eps) · weight")
    elif type(module) is nn.Dropout and module.training and module.p:
        unsupported(f"{name} drops elements at random", "the model is in training mode", "Call model.eval().")


def make_batch_invariant(model: nn.Module) -> nn.Module:
    """Makes a model of transformers batch-invariant: a sequence has the same bits alone, padded, packed and in continuous
    batching, in prefill and decode. Changes the model in place:

    - attention becomes "ringattn";
    - torch.nn.Linear becomes ringattn.nn.Linear with the same parameters; a gated MLP's activation is computed by its gate
      layer, in fp32 before rounding;
    - RMSNorm sums by a fixed tree;
    - embeddings, RoPE and residuals are unchanged, because none of their operations sums over an axis.

    Unknown modules are refused by name, before anything changes. Parameters keep their names.

    Args:
        model: a model of the llama, mistral, qwen2 or qwen3 families.

    Returns:
        The model.

    Raises:
        UsageError: not a model of transformers; a weight is on the meta device.
        UnsupportedError: a module that may depend on the batch, such as GPT-2's Conv1D and experts of MoE layers; RoPE whose
            frequencies depend on the longest sequence; float64 weights; a layer with hooks or a replaced forward; a
            dropout layer in training mode.

    Example:
        >>> import ringattn.transformers, transformers
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        ...     hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> model = ringattn.transformers.make_batch_invariant(model.eval())
        >>> type(model.lm_head).__name__, model.config._attn_implementation
        ('Linear', 'ringattn')
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "set_attn_implementation"):
        refuse(f"model is {type(model).__name__}", "it should be a model of transformers", "Pass one.")
    unknown = {}
    activations = {id(getattr(module, "act_fn", None)) for module in model.modules() if _family(module) == "MLP"}
    for name, module in model.named_modules():
        if not _is_known(module) and id(module) not in activations:  # _check() says which ones are known there
            unknown.setdefault(type(module).__name__, name)
    if unknown:
        listed = ", ".join(f"{kind} ({name})" if name else kind for kind, name in [*unknown.items()][:8])
        unsupported(f"the model has modules of kinds that are not known: {listed}", "their results may depend on the batch",
                    _ADVICE)  # fmt: skip
    for name, module in model.named_modules():
        _check(name, module)
    ensure_registered("ringattn")
    model.set_attn_implementation("ringattn")
    for name, module in list(model.named_modules()):
        for child, layer in list(module.named_children()):
            if type(layer) is nn.Linear:
                setattr(module, child, Linear.from_linear(layer))
            elif _family(layer) == "RMSNorm":
                setattr(module, child, RMSNorm(layer.weight, layer.variance_epsilon))
    for module in model.modules():
        if _family(module) == "MLP" and not isinstance(module.act_fn, nn.Identity):
            module.gate_proj.activation = _ACTIVATIONS[type(module.act_fn).__name__]
            module.act_fn = nn.Identity()
    return model
