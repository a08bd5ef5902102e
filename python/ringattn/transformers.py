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

Supported masks are causal, bidirectional and sliding-window masks, with padding masks. Dropout, other masks and additive biases
are refused. Models can be trained if their dropout is 0.

    with ringattn.transformers.continuous_batching(model):
        model.generate_batch(prompts)

    ringattn.transformers.make_batch_invariant(model)  # the model's other layers, too"""

import contextlib
import inspect
import itertools

import torch

from . import _attention, _transformers_paged
from ._batch_invariant import make_batch_invariant
from ._decode import decode
from ._errors import UnsupportedError, refuse, unsupported
from ._growing_decode import decode_growing
from ._streams import is_captured
from ._per_thread import PerThread
from ._tensors import flat_rows
from ._transformers_masks import OWN_MASK, Mask, read_mask, refuse_padding, sequences_of
from ._transformers_padding import Padding, to_front
from ._transformers_paged import continuous_batching
from .layouts import Layout
from .worlds import World

__all__ = ["attention_forward", "attention_mask", "batch", "continuous_batching", "make_batch_invariant", "register"]

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
        UsageError: a model that runs inside it has a batch of several rows, or a cache. The call of the model raises it.

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
# Arguments that are refused, with the reason.
_OTHER = "Use another implementation."
_ADDED = "it is added to the logits, and ringattn adds nothing to them"
_PAGES = "it is of continuous batching, for which the model has another implementation"
_REASONS = {"position_bias": _ADDED} | dict.fromkeys(("cache", "read_index", "write_index", "block_table"), _PAGES)


def _check_arguments(dropout, attention_mask, given, ignored=_IGNORED) -> None:
    if dropout:
        unsupported(
            f"dropout is {dropout}", "ringattn has no dropout", "Call model.eval(), or set attention_dropout to 0."
        )
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        unsupported(
            "an attention_mask of other than two axes is given", "ringattn's masks depend only on positions",
            "Pass one of two axes, which drops tokens, or packed sequences."
        )
    if given.get("output_attentions"):
        unsupported("output_attentions is set", "ringattn keeps no attention weights", "Leave it out.")
    for name, value_given in given.items():
        if name not in ignored and value_given is not None:
            why = _REASONS.get(name, "ringattn doesn't know what it does to attention")
            advice = "Call it inside of ringattn.transformers.continuous_batching(model)." if why == _PAGES else _OTHER
            unsupported(f"the model passes {name}", why, advice)


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
    """Attention for transformers' AttentionInterface. query: [batch, heads, tokens, head_dim]; key, value: [batch, kv_heads,
    keys, head_dim]. Returns ([batch, tokens, heads, head_dim], None). dealt: the arguments of batch(), or None to read them."""
    if _is_plain_step(query, key, value, s_aux, attention_mask, dropout, sliding_window, dealt, given):
        named = {"mask": attention_mask.kernel_mask(), "softmax_scale": scaling, "softcap": softcap or 0.0,
                 "sinks": None if s_aux is None else s_aux.float()}  # fmt: skip
        out = _step(query, key, value, attention_mask.step_keys, named)
        if out is not None:
            return out, None
    _check_arguments(dropout, attention_mask, given)
    q, k, v = _transformers_paged.autocast(*(array.transpose(1, 2) for array in (query, key, value)))
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
    if attention_mask is not None and attention_mask.dropped is not None:
        if cu_q is not None:
            refuse_padding("packed sequences have none")
        return _of_padded(attention_mask.dropped, q, k, v, attention_mask, named), None
    if attention_mask is not None and cu_q is None and _is_step(q, k, v, named["sinks"], attention_mask):
        lengths = attention_mask.step_keys
        if lengths is None or torch.compiler.is_compiling():
            lengths = attention_mask.lengths_for(q)
        if attention_mask.padding is not None:
            lengths = torch.ops.ringattn.unpadded_lengths(lengths, attention_mask.padding)
        out = _step(*(rows.transpose(1, 2) for rows in (q, k, v)), lengths, named)
        if out is not None:
            return out, None
    begins = sequences_of(q, attention_mask, cu_q, cu_k, None)
    if begins is None:
        k, v = _filled(k, v, attention_mask)
        return _attention.attention(q, k, v, **named)[0], None
    if cu_k is None:
        k, v = _filled(k, v, attention_mask)
        cu_k = [k.shape[1] * row for row in range(k.shape[0] + 1)]
    rows = (flat_rows(array) for array in (q, k, v))
    return _attention.varlen(*rows, begins, cu_k, **named)[0].unflatten(0, q.shape[:2]), None


_MAX_ROWS = 16  # query tokens of a sequence in a decode step


def _is_step(q, k, v, sinks, mask: Mask) -> bool:
    """Whether decode() computes these rows: few queries at the end of a cache whose length differs in each call."""
    if not mask.causal or q.shape[1] > _MAX_ROWS or mask.filled is None and k.shape[1] == q.shape[1]:
        return False
    if _records(q, k, v, sinks):
        return False
    return mask.filled is not None or not torch.compiler.is_compiling()


def _records(q, k, v, sinks) -> bool:
    """Whether autograd records the call, because decode() has no gradients. Possibly only the sinks are trained."""
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or sinks is not None and sinks.requires_grad
    )


# Arguments of the layers of a plain step.
_OF_STEPS = _IGNORED - {"cu_seq_lens_q", "cu_seq_lens_k"}


def _is_plain_step(query, key, value, sinks, mask, dropout, sliding_window, dealt, given) -> bool:
    """Whether the call is a decode step of generate() without padding. The other checks of attention_forward() are not needed for
    it, and would take as long as the rest of the call."""
    if type(mask) is not Mask or mask.step_keys is None or torch.compiler.is_compiling():
        return False
    rows = query.shape[2]
    return (
        not dropout and dealt is None and rows <= _MAX_ROWS and mask.made_for == (rows, key.shape[2])
        and sliding_window == mask.window and _OF_STEPS.issuperset(given) and not given.get("output_attentions")
        and not torch.is_autocast_enabled(query.device.type)
        and not _records(query, key, value, sinks)
        and _current.get() is None
    )  # fmt: skip


_not_decoded: set[tuple] = set()  # (device, dtype, head_dim, head_dim_v) for which decode() has no kernel


def _step(query, key, value, lengths, named: dict):
    """out of decode(), or None if decode() has no kernel for these rows, as for fp32 on a GPU. attention() may have one. The
    arguments are those of decode_growing()."""
    if torch.compiler.is_compiling():
        return decode(*(rows.transpose(1, 2) for rows in (query, key, value)), lengths=lengths, **named)[0]
    if _not_decoded and _kind(query, value) in _not_decoded:
        return None
    try:
        return decode_growing(query, key, value, lengths, **named)
    except UnsupportedError:
        if is_captured(query):  # refused because of the capture: there may still be a kernel
            raise
        _not_decoded.add(_kind(query, value))
        return None


def _kind(query, value) -> tuple:
    return (query.device, query.dtype, query.shape[-1], value.shape[-1])


def _filled(k, v, mask: Mask | None):
    """The filled keys and values."""
    filled = None if mask is None else mask.filled
    if filled is None:
        return k, v
    if isinstance(filled, torch.Tensor) and torch.compiler.is_compiling():
        unsupported("a graph has more than 16 queries over a cache of a fixed size", "the number of keys is not known while "
                    "torch.compile traces", "Compile the decode step alone, as generate() does.")  # fmt: skip
    return k[:, : int(filled)], v[:, : int(filled)]


def _of_padded(dropped: Padding, q, k, v, mask: Mask, named: dict):
    """Computes the kept tokens of a padded batch, as packed sequences; decode steps by their lengths."""
    step = dropped.step if _is_step(q, k, v, named["sinks"], mask) else None
    if step is None:
        return dropped.attend(q, k, v, named)
    lengths, order = step
    at_front = (k, v) if order is None else (to_front(k, order), to_front(v, order))
    out = _step(*(rows.transpose(1, 2) for rows in (q, *at_front)), lengths, named)
    return dropped.attend(q, k, v, named) if out is None else out


def paged_forward(module, query, key, value, attention_mask=None, *, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
                  s_aux=None, **given):  # fmt: skip
    """attention_forward() in continuous batching, where the arguments tell which cache slots the new tokens have."""
    if given.get("write_index") is None:
        named = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return attention_forward(module, query, key, value, attention_mask, **named, **given)
    _check_arguments(dropout, attention_mask, {name: x for name, x in given.items() if name != "cache"},
                     _IGNORED | _transformers_paged.PASSED)  # fmt: skip
    if given.get("is_causal") is False:
        unsupported("a layer of a continuous batch isn't causal", "transformers makes a mask for it", _OTHER)
    named = {"mask": "causal" if sliding_window is None else (sliding_window - 1, 0), "softmax_scale": scaling,
             "softcap": softcap or 0.0, "sinks": None if s_aux is None else s_aux.float()}  # fmt: skip
    return _transformers_paged.paged_attention(module, query, key, value, named, sliding_window, given), None


def _of_batch(layout, world, q, k, v, mask, cu_q, cu_k, named):
    """Computes this rank's rows, inside batch()."""
    if q.shape[1] != k.shape[1]:
        refuse(f"q is {list(q.shape)} and k {list(k.shape)} inside of batch()", "no cache goes with packed rows",
               "Pass use_cache=False.")  # fmt: skip
    if mask is not None and mask.dropped is not None:
        refuse_padding("packed sequences have none")
    begins = sequences_of(q, mask, cu_q, cu_k, [0, *itertools.accumulate(layout.lengths)])
    dealt = layout if layout.world > 1 else None
    return _attention.varlen(q[0], k[0], v[0], begins, layout=dealt, world=world, **named)[0][None]


def attention_mask(*, mask_function, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, local_size=None,
                   use_vmap=False, dealt=None, **_):  # fmt: skip
    """The mask object that layers get. Refuses unsupported masks. dealt: as in attention_forward()."""
    if isinstance(attention_mask, Mask):  # generate() made it before the model ran
        return attention_mask
    if use_vmap:
        unsupported(OWN_MASK, "a model's function decides what is seen", "Use another implementation.")
    current, tracing = dealt or _current.get(), torch.compiler.is_compiling()
    queries_end, keys_end = q_offset + q_length, kv_offset + kv_length
    if isinstance(q_offset, torch.Tensor) and not tracing and (attention_mask is not None or q_length > _MAX_ROWS):
        queries_end = int(queries_end)
    longest = keys_end if current is None else max(current[0].lengths)
    causal, window, packed = read_mask(mask_function, local_size, longest)
    filled = None
    if isinstance(queries_end, torch.Tensor) or keys_end != queries_end and (causal or window is not None):
        if not causal or not isinstance(queries_end, torch.Tensor) and keys_end < queries_end:
            unsupported(f"keys end at token {keys_end} and queries at {queries_end}", "ringattn lets them end together",
                        "Leave attention_mask out.")  # fmt: skip
        filled = queries_end - kv_offset
    last = keys_end if filled is None or isinstance(filled, torch.Tensor) else queries_end
    if attention_mask is not None and attention_mask.shape[-1] < last and not isinstance(filled, torch.Tensor):
        unsupported(f"attention_mask has {attention_mask.shape[-1]} tokens, and there are keys of {last}",
                    "those after it would be padding", "Leave attention_mask out.")  # fmt: skip
    dropped = None
    if attention_mask is not None and not tracing:
        seen_by = q_length if causal or window is not None else None
        dropped = Padding.of(attention_mask[:, kv_offset:last], seen_by, window is not None)
    return Mask(causal, window, (q_length, kv_length), packed, attention_mask if tracing else None, dropped, filled)


def register(name: str = "ringattn", forward=attention_forward, mask=attention_mask) -> None:
    """Registers ringattn as an attention implementation of transformers, also for continuous_batching().

    Args:
        name: name of the implementation, for attn_implementation=name.
        forward, mask: the functions to register.

    Returns:
        None.

    Raises:
        UnsupportedError: transformers is too old.

    Example:
        >>> import ringattn.transformers
        >>> ringattn.transformers.register()
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils

    needed = ("sliding_window_bidirectional_mask_function", "packed_sequence_mask_function")
    known = all(hasattr(masking_utils, name) for name in needed)
    if not known or "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        unsupported(f"transformers is {__version__}", "ringattn reads the masks of 5.4 and newer ones", "Upgrade transformers.")
    for implementation, function in ((name, forward), (_transformers_paged.paged_name(name), paged_forward)):
        AttentionInterface.register(implementation, function)
        AttentionMaskInterface.register(implementation, mask)
