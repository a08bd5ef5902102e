# SPDX-License-Identifier: Apache-2.0
"""ringattn as an attention implementation of Hugging Face's transformers (AttentionInterface):

    import ringattn.transformers

    ringattn.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="ringattn")

Several ranks: each computes its rows of the packed stream, and says which they are while the model runs:

    layout = ringattn.packed(lengths, world.size)
    with ringattn.transformers.batch(layout, world):
        model(input_ids=ringattn.shard(ids, layout, world.rank)[None],
              position_ids=torch.from_numpy(ringattn.positions(layout, world.rank))[None], use_cache=False)

What ringattn doesn't compute is refused: dropout, padding masks, masks of a model's own, caches of a fixed size, gradients."""

import contextlib
import threading

from . import _attention
from ._arguments import as_ints
from ._errors import refuse, unsupported
from .layouts import Layout
from .worlds import World

_current = threading.local()


@contextlib.contextmanager
def batch(layout: Layout, world: World | None = None):
    """While it lasts, models on this thread compute this rank's rows of packed sequences, which `layout` deals: q, k and v are
    [1, heads, rows, head_dim]."""
    before = getattr(_current, "batch", None)
    _current.batch = (layout, world)
    try:
        yield
    finally:
        _current.batch = before


def _mask_of(module, causal, sliding_window):
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if sliding_window is None:
        return "causal" if causal else "full"
    return (sliding_window - 1, 0 if causal else sliding_window - 1)


# Arguments that say nothing about what is computed here.
_IGNORED = {
    "position_ids", "cache_position", "output_attentions", "use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "num_items_in_batch", "output_hidden_states", "return_dict", "labels", "logits_to_keep",
}  # fmt: skip


def attention_forward(module, query, key, value, attention_mask=None, *, scaling=None, dropout=0.0, sliding_window=None,
                      softcap=None, is_causal=None, s_aux=None, **given):  # fmt: skip
    """query: [batch, heads, tokens, head_dim]; returns ([batch, tokens, heads, head_dim], None)."""
    if dropout:
        unsupported(
            f"dropout is {dropout}", "ringattn has no dropout", "Call model.eval(), or set attention_dropout to 0."
        )
    if attention_mask is not None:
        unsupported(
            "an attention_mask is given", "ringattn masks by position alone", "Pass packed sequences without padding."
        )
    if given.get("output_attentions"):
        unsupported("output_attentions is set", "ringattn keeps no attention weights", "Leave it out.")
    for name, value_given in given.items():
        if name not in _IGNORED and value_given is not None:
            unsupported(
                f"the model passes {name}",
                "ringattn doesn't know what it does to attention",
                "Use another implementation.",
            )
    mask = _mask_of(module, is_causal, sliding_window)
    q, k, v = (array.transpose(1, 2) for array in (query, key, value))
    named = {
        "mask": mask,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    current = getattr(_current, "batch", None)
    if current is None:
        if given.get("cu_seq_lens_q") is not None:
            cu_q, cu_k = (as_ints(given[f"cu_seq_lens_{side}"]) for side in "qk")
            return _attention.varlen(q[0], k[0], v[0], cu_q, cu_k, **named)[0][None], None
        return _attention.attention(q, k, v, **named)[0], None
    layout, world = current
    if q.shape[0] != 1 or q.shape[1] != k.shape[1]:
        refuse(f"q is {list(q.shape)} and k {list(k.shape)} inside of batch()", "rows are packed, and no cache goes with them",
               "Pass a batch of 1, and use_cache=False.")  # fmt: skip
    cu = [0]
    for length in layout.lengths:
        cu.append(cu[-1] + length)
    dealt = layout if layout.world > 1 else None
    return _attention.varlen(q[0], k[0], v[0], cu, layout=dealt, world=world, **named)[0][None], None


def attention_mask(*, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, allow_is_causal_skip=True,
                   use_vmap=False, **_):  # fmt: skip
    """The model's mask, which must be one of position alone; gives None."""
    if use_vmap:
        unsupported(
            "the model has a mask function of its own",
            "ringattn masks by position alone",
            "Use another implementation.",
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        unsupported("the batch is padded", "ringattn has no padding mask, and would take padding for tokens",
                    "Pass sequences of one length, or packed ones with cu_seq_lens_q and cu_seq_lens_k.")  # fmt: skip
    if getattr(_current, "batch", None) is None:
        if int(kv_offset) + int(kv_length) > int(q_offset) + int(q_length):
            unsupported("the cache is longer than its tokens", "ringattn would see keys that are not there yet",
                        "Use a dynamic cache.")  # fmt: skip
        if not allow_is_causal_skip:
            unsupported("sequences are packed by position_ids alone", "ringattn would take them for one",
                        "Pass cu_seq_lens_q and cu_seq_lens_k, or use ringattn.transformers.batch().")  # fmt: skip
    return None


def register(name: str = "ringattn") -> None:
    """Makes attn_implementation=name known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
