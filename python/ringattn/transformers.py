# SPDX-License-Identifier: Apache-2.0
"""ringattn as an attention implementation for Hugging Face's transformers (AttentionInterface):

    import ringattn.transformers

    ringattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="ringattn")

With several ranks, each rank computes its rows of the packed stream. State the layout while the model runs:

    layout = ringattn.packed(lengths, world.size)
    with ringattn.transformers.batch(layout, world):
        model(input_ids=ringattn.shard(ids, layout, world.rank)[None],
              position_ids=torch.from_numpy(ringattn.positions(layout, world.rank))[None], use_cache=False)

Supported masks are causal, bidirectional and sliding window. Refused are dropout, padding masks, other masks, additive
biases,
and static caches. Models train if their dropout is 0."""

import contextlib
import itertools

import torch

from . import _attention
from ._errors import refuse, unsupported
from ._per_thread import PerThread
from ._tensors import flat_rows
from ._transformers_masks import OWN_MASK, Mask, check_padding, read_mask, sequences_of
from .layouts import Layout
from .worlds import World

_current = PerThread("ringattn.transformers.batch()")


@contextlib.contextmanager
def batch(layout: Layout, world: World | None = None):
    """Context manager: models on this thread compute this rank's rows of packed sequences. q, k and v of a layer are then [1,
    heads, rows, head_dim].

    Args:
        layout: a Layout of the sequences, which says which rows are this rank's.
        world: the ranks. None: only this rank.

    Returns:
        A context manager.

    Raises:
        UsageError: a model inside of it has a batch of several rows, or a cache; its call raises it.

    Example:
        >>> import ringattn.transformers
        >>> with ringattn.transformers.batch(ringattn.packed([24, 40], 1)):
        ...     pass  # model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    """
    before = _current.get()
    _current.set((layout, world))
    try:
        yield
    finally:
        _current.set(before)


def is_inside_batch() -> bool:
    return _current.get() is not None


# Arguments without effect on the attention.
_IGNORED = {
    "position_ids", "cache_position", "output_attentions", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "num_items_in_batch", "output_hidden_states", "return_dict", "labels",
    "logits_to_keep", "output_router_logits", "deterministic",
}  # fmt: skip
# Arguments that are handled.
_ADDED = "it is added to the logits, and ringattn adds nothing to them"
_PAGES = "ringattn has no part in continuous batching, whose pages it tells of"
_REASONS = {"position_bias": _ADDED} | dict.fromkeys(("cache", "read_index", "write_index", "block_table"), _PAGES)


def _check_arguments(dropout, attention_mask, given) -> None:
    if dropout:
        unsupported(
            f"dropout is {dropout}", "ringattn has no dropout", "Call model.eval(), or set attention_dropout to 0."
        )
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        unsupported(
            "an attention_mask is given", "ringattn's masks depend only on positions", "Pass packed sequences without padding."
        )
    if given.get("output_attentions"):
        unsupported("output_attentions is set", "ringattn keeps no attention weights", "Leave it out.")
    for name, value_given in given.items():
        if name not in _IGNORED and value_given is not None:
            why = _REASONS.get(name, "ringattn doesn't know what it does to attention")
            unsupported(f"the model passes {name}", why, "Use another implementation.")


def _mask_of(module, mask: Mask | None, is_causal, sliding_window, q, k):
    """The mask of the call, from the model's mask and the layer's arguments. Without a mask, queries see all keys, as
    in eager attention."""
    if mask is None:
        if q.shape[1] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            unsupported("a causal layer has no mask", "the model made none by transformers' functions",
                        "Use another implementation.")  # fmt: skip
        mask = Mask(False, None, (q.shape[1], k.shape[1]))
    if mask.made_for != (q.shape[1], k.shape[1]):
        queries, keys = mask.made_for
        unsupported(f"a layer has {q.shape[1]} queries and {k.shape[1]} keys", f"its mask is for {queries} and {keys}",
                    "Use another implementation.")  # fmt: skip
    computed = mask.kernel_mask()
    layers = None if sliding_window is None else (sliding_window - 1, 0 if mask.causal else sliding_window - 1)
    windows = None if mask.window is None else computed
    if layers != windows:
        unsupported(f"a layer's window (left, right) is {layers}", f"that of its mask is {windows}",
                    "Use another implementation.")  # fmt: skip
    return computed


def attention_forward(module, query, key, value, attention_mask=None, *, scaling=None, dropout=0.0, sliding_window=None,
                      softcap=None, is_causal=None, s_aux=None, dealt=None, **given):  # fmt: skip
    """query: [batch, heads, tokens, head_dim]; key, value: [batch, kv_heads, keys, head_dim]. Returns ([batch, tokens,
    heads, head_dim], None). dealt: the arguments of batch(); None: those of the active batch()."""
    _check_arguments(dropout, attention_mask, given)
    q, k, v = (array.transpose(1, 2) for array in (query, key, value))
    named = {
        "mask": _mask_of(module, attention_mask, is_causal, sliding_window, q, k),
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    cu_q, cu_k = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if (cu_q is None) != (cu_k is None):
        refuse(f"cu_seq_lens_{'k' if cu_k is None else 'q'} is missing", "queries and keys both have sequences",
               "Pass cu_seq_lens_q and cu_seq_lens_k.")  # fmt: skip
    current = dealt or _current.get()
    if q.shape[0] != 1 and (current is not None or cu_q is not None):
        refuse(f"a batch of {q.shape[0]} {'has cu_seq_lens_q' if current is None else 'is inside of batch()'}",
               "packed sequences are one row", "Pass a batch of 1.")  # fmt: skip
    if current is not None:
        return _of_batch(*current, q, k, v, attention_mask, cu_q, cu_k, named), None
    begins = sequences_of(q, attention_mask, cu_q, cu_k, None)
    if begins is None:
        return _attention.attention(q, k, v, **named)[0], None
    if cu_k is None:
        cu_k = [k.shape[1] * row for row in range(k.shape[0] + 1)]
    rows = (flat_rows(array) for array in (q, k, v))
    return _attention.varlen(*rows, begins, cu_k, **named)[0].unflatten(0, q.shape[:2]), None


def _of_batch(layout, world, q, k, v, mask, cu_q, cu_k, named):
    """Computes this rank's rows, inside batch()."""
    if q.shape[1] != k.shape[1]:
        refuse(f"q is {list(q.shape)} and k {list(k.shape)} inside of batch()", "no cache goes with packed rows",
               "Pass use_cache=False.")  # fmt: skip
    begins = sequences_of(q, mask, cu_q, cu_k, [0, *itertools.accumulate(layout.lengths)])
    dealt = layout if layout.world > 1 else None
    return _attention.varlen(q[0], k[0], v[0], begins, layout=dealt, world=world, **named)[0][None]


def attention_mask(*, mask_function, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None,
                   use_vmap=False, dealt=None, **_):  # fmt: skip
    """The mask object that layers get. Refuses unsupported masks. dealt: as in attention_forward()."""
    if use_vmap:
        unsupported(OWN_MASK, "a model's function decides what is seen", "Use another implementation.")
    if isinstance(q_offset, torch.Tensor):
        unsupported("the cache is of a fixed size", "ringattn would see keys that are not there yet",
                    "Use a dynamic cache.")  # fmt: skip
    current = dealt or _current.get()
    queries_end, keys_end = q_offset + q_length, kv_offset + kv_length
    longest = keys_end if current is None else max(current[0].lengths)
    causal, window, packed = read_mask(mask_function, local_size, longest)
    if keys_end != queries_end and (causal or window is not None):
        unsupported(f"keys end at token {keys_end} and queries at {queries_end}", "ringattn lets them end together",
                    "Use a dynamic cache, and leave attention_mask out.")  # fmt: skip
    if attention_mask is not None and attention_mask.shape[-1] < keys_end:
        unsupported(f"attention_mask has {attention_mask.shape[-1]} tokens, and there are keys of {keys_end}",
                    "those after it would be padding", "Leave attention_mask out.")  # fmt: skip
    tracing = torch.compiler.is_compiling()
    if not tracing:
        check_padding(attention_mask)
    return Mask(causal, window, (q_length, kv_length), packed, attention_mask if tracing else None)


def register(name: str = "ringattn", forward=attention_forward, mask=attention_mask) -> None:
    """Registers ringattn as an attention implementation with transformers.

    Args:
        name: of the implementation, for attn_implementation=name.
        forward, mask: its functions.

    Returns:
        None.

    Raises:
        UnsupportedError: transformers is too old.

    Example:
        >>> import ringattn.transformers
        >>> ringattn.transformers.register()
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils

    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        unsupported(f"transformers is {__version__}", "ringattn reads the masks of newer ones", "Upgrade transformers.")
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
