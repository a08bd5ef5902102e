# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers (generate_batch). Its batches are packed sequences, whose keys are read from its pages.

A batch mixes whole prompts, chunks of prompts and decode steps. Each is a sequence of varlen(), with its new tokens as queries
and all tokens so far as keys, so it has the same bits as in any other batch, and as in generate()."""

import contextlib
import copy
import functools
import inspect

import torch
from torch import Tensor

from . import _attention
from ._arguments import as_ints
from ._errors import refuse, unsupported
from ._per_thread import PerThread

_ENDING = "_flash"  # transformers accepts only implementations with "flash" in their names, and passes them no masks
# Arguments that transformers passes to the layers only in continuous batching.
PASSED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k", "read_index",
          "write_index", "logits_indices", "logits_processor_args", "is_causal"}  # fmt: skip
_OF_GRAPHS = "lengths are read on the host, and a graph would keep those of one batch"
_known = PerThread("lengths of a continuous batch")


def is_prefixed() -> bool:
    """Whether this version of transformers finds the implementation for continuous batching by a prefix."""
    from transformers import AttentionInterface  # noqa: PLC0415, see ringattn.transformers

    return "paged|sdpa" in AttentionInterface._global_mapping


def paged_name(name: str) -> str:
    """The name under which the implementation `name` is registered for continuous batching."""
    return f"paged|{name}" if is_prefixed() else name + _ENDING


def autocast(*rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in the dtype of torch.autocast, as in PyTorch's SDPA: under autocast, RoPE makes q and k float32, but not v."""
    device = rows[0].device.type
    if not torch.is_autocast_enabled(device):
        return rows
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in rows)


def ensure_registered(name: str) -> None:
    """Calls register() unless the name has an implementation, which may be the one of substitute_hf_flash_attn()."""
    from transformers import AttentionInterface  # noqa: PLC0415, see ringattn.transformers

    from . import transformers  # noqa: PLC0415, which imports this

    if not {name, paged_name(name)} <= AttentionInterface._global_mapping.keys():
        transformers.register(name)


def _implementations(config) -> dict:
    """The implementation names of a config and of the configs in it, in the form that its setter accepts."""
    inner = {key: getattr(config, key, None) for key in config.sub_configs}
    return {"": config._attn_implementation} | {key: _implementations(one) for key, one in inner.items() if one is not None}


@contextlib.contextmanager
def continuous_batching(model, name: str = "ringattn"):
    """Context manager in which a model uses ringattn in generate_batch() and the other calls of continuous batching.

    CUDA graphs are off inside it, even if transformers would use them, because lengths are read on the host.

    Args:
        model: a model of transformers that generates.
        name: as in register().

    Returns:
        A context manager that returns the model.

    Raises:
        UsageError: the model has no generate_batch().
        UnsupportedError: a ContinuousBatchingConfig has use_cuda_graph=True; generate_batch() raises it.

    Example:
        >>> import ringattn.transformers, transformers
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        ...     hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
        >>> with ringattn.transformers.continuous_batching(model) as batching:
        ...     batching is model  # model.generate_batch(prompts, max_new_tokens=100)
        True
    """
    if not hasattr(model, "generate_batch"):
        refuse(f"model is {type(model).__name__}", "it has no generate_batch()", "Pass a model of transformers that generates.")
    ensure_registered(name)
    config = model.config
    before = _implementations(config)
    config._attn_implementation = name if is_prefixed() else paged_name(name)
    try:
        with _without_graphs(model):
            yield model
    finally:
        config._attn_implementation = before


@contextlib.contextmanager
def _without_graphs(model):
    """Replaces the model's init_continuous_batching(), with which all calls of continuous batching begin, by one without CUDA
    graphs. Does nothing in versions of transformers in which it has no config."""
    init = getattr(model, "init_continuous_batching", None)
    if init is None or "continuous_batching_config" not in inspect.signature(init).parameters:
        yield
        return

    @functools.wraps(init)
    def call(*arguments, **named):
        from transformers import ContinuousBatchingConfig  # noqa: PLC0415, see ringattn.transformers

        given = inspect.signature(init).bind(*arguments, **named).arguments
        generation = given.get("generation_config") or getattr(model, "generation_config", None)
        config = given.get("continuous_batching_config") or getattr(generation, "continuous_batching_config", None)
        config = ContinuousBatchingConfig() if config is None else copy.copy(config)
        wanted = getattr(config, "use_cuda_graph", None)
        if any(wanted) if isinstance(wanted, tuple) else wanted:
            unsupported(f"use_cuda_graph is {wanted}", _OF_GRAPHS, "Pass use_cuda_graph=False, or leave it out.")
        config.use_cuda_graph = False
        return init(**given | {"continuous_batching_config": config})

    hidden = vars(model).get("init_continuous_batching")  # of a context around this one
    model.init_continuous_batching = call
    try:
        yield
    finally:
        del model.init_continuous_batching
        if hidden is not None:
            model.init_continuous_batching = hidden


def _lengths(cu) -> list[int]:
    """A tensor of cumulative lengths as ints. Layers get the same tensor, which is read once."""
    if cu.is_cuda and torch.cuda.is_current_stream_capturing():
        unsupported("transformers captures a CUDA graph", _OF_GRAPHS,
                    "Pass continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=False).")  # fmt: skip
    kept = _known.get() or ()
    for tensor, version, numbers in kept:
        if tensor is cu and version == cu._version:
            return numbers
    numbers = as_ints(cu, "cu_seq_lens")
    _known.set((*kept[-3:], (cu, cu._version, numbers)))
    return numbers


def _of_layer(name: str, given, sliding: bool):
    """An argument that some versions pass as a dict by type of layer."""
    return given["sliding_attention" if sliding else "full_attention"] if isinstance(given, dict) else given


def paged_attention(module, query, key, value, named: dict, sliding_window: int | None, given: dict):
    """[1, tokens, heads, head_dim] of query [1, heads, tokens, head_dim], for the sequences of cu_seq_lens_q. key, value:
    [1, kv_heads, keys, head_dim], those of all sequences one after the other; before transformers 5.24 the new ones."""
    # Before 5.24 the attention, and not the layer, writes and reads the pages.
    cache, of_cache = given.get("cache"), None
    if cache is not None and is_prefixed():
        of_cache = cache.update(key, value, module.layer_idx, read_index=given["read_index"], write_index=given["write_index"])
    elif cache is not None:
        key, value = cache.update(key, value, module.layer_idx, given)
    k, v = of_cache or (key[0].transpose(0, 1), value[0].transpose(0, 1))
    sliding = bool(sliding_window or getattr(module, "sliding_window", None))
    cu_q, cu_k = _lengths(given["cu_seq_lens_q"]), _lengths(_of_layer("cu_seq_lens_k", given["cu_seq_lens_k"], sliding))
    q, k, v = autocast(query[0].transpose(0, 1), k, v)
    # transformers pads batches that it captures or compiles to fixed sizes.
    rows, keys = cu_q[-1], cu_k[-1]
    out = _attention.varlen(q[:rows], k[:keys], v[:keys], cu_q, cu_k, **named)[0]
    if rows < q.shape[0]:
        out = torch.cat([out, out.new_zeros(q.shape[0] - rows, *out.shape[1:])])
    return out[None]
