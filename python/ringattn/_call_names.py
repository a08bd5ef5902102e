# SPDX-License-Identifier: Apache-2.0
"""Argument names of other libraries: their names in this package, or the alternative if a function has no such argument.
This table is consulted before the C library's table of tensor names, whose suggestions are about files."""

import numbers
from typing import NamedTuple

from ._loaded_torch import loaded_torch

_ATTENTION = ("attention", "varlen", "mla", "decode", "mla_decode", "decode_partition", "mla_decode_partition")
_STEPS = ("decode", "mla_decode")
_SSM = ("ssd", "selective_scan")
_UPDATES = ("ssd_update", "selective_update")

# Names with the same meaning, by op: they are translated.
ALIASES = {
    "selective_update": {"x": "u", "dt": "delta", "dt_bias": "delta_bias", "dt_softplus": "delta_softplus"},  # mamba_ssm's
}
# Names with the same or a similar meaning, by ops: the error names the right one.
_OWN = (
    (("decode",), {"key_cache": "k_cache", "k_pages": "k_cache", "value_cache": "v_cache", "v_pages": "v_cache", "k": "k_new",
                   "v": "v_new"}),
    (("attention", "varlen"), {"query": "q", "key": "k", "value": "v"}),
    (("mla_decode",), {"k_cache": "cache", "kv_cache": "cache", "k_pages": "cache"}),
    (("selective_scan",), {"x": "u", "dt": "delta", "dt_bias": "delta_bias", "dt_softplus": "delta_softplus",
                           "return_final_states": "return_last_state"}),
    (("ssd", "ssd_update"), {"u": "x", "delta": "dt", "delta_bias": "dt_bias", "delta_softplus": "dt_softplus",
                             "return_last_state": "return_final_states", "time_step_limit": "dt_limit"}),
    (("gated_delta", "gated_delta_update", "linear_attention", "linear_attention_update"), {"g": "log_decay", "gk": "log_decay"}),
    (("linear_attention", "linear_attention_update"), {"g_gamma": "log_decay"}),
    (("gated_delta", "linear_attention"), {"output_final_state": "return_final_states"}),
    (("gated_delta", "gated_delta_update"), {"use_qk_l2norm_in_kernel": "qk_l2norm"}),
    (("gated_delta",), {"initial_state": "initial_states"}),
    (("linear_attention",), {"initial_states": "initial_state"}),
    (("gated_delta_update", "linear_attention_update"), {"initial_state": "state", "initial_states": "state",
                                                         "cache_indices": "state_batch_indices"}),
    (_SSM, {"ssm_state": "initial_states", "ssm_states": "initial_states", "state": "initial_states"}),
    (_UPDATES, {"ssm_state": "state", "ssm_states": "state", "initial_states": "state", "cache_indices": "state_batch_indices",
                "conv_state_indices": "state_batch_indices"}),
    (("linear",), {"input": "x", "a": "x", "qweight": "weight", "weight_packed": "weight", "weight_scale": "scales",
                   "scale_b": "scales", "weight_zero_point": "zeros", "qzeros": "zeros"}),
    (("rope",), {"seqlen_offset": "offset", "seqlen_offsets": "positions", "position_ids": "positions"}),
    (("causal_conv1d",), {"conv_state": "initial_states"}),
    (("causal_conv1d_update",), {"conv_states": "conv_state", "initial_states": "conv_state",
                                 "cache_indices": "conv_state_indices", "state_batch_indices": "conv_state_indices"}),
)  # fmt: skip
_CACHES = "k_cache v_cache key_cache value_cache kv_cache paged_kv_cache k_pages v_pages block_table block_tables page_table " \
          "cache_seqlens context_lens kv_indices kv_page_indptr kv_page_indices kv_last_page_len paged_kv_indptr " \
          "paged_kv_indices paged_kv_last_page_len k_new v_new"  # fmt: skip
_MASKS = "attn_mask attention_mask causal_mask custom_mask packed_custom_mask key_padding_mask padding_mask"
_POSITIONS = "position_ids cache_position"
_COS_SIN = "cos sin rotary_cos rotary_sin cos_sin_cache"
_PADDED = "seqused_q seqused_k seq_lens lengths_k kv_len_arr"
_POSITIONS_MASK = "masks are causal, full or sliding windows, and depend only on positions"
_SEQ_IDX = ("Pass packed rows, as x[0], with cu_seqlens=torch.nn.functional.pad(seq_idx[0].bincount().cumsum(0), (1, 0)), and "
            "z, B and C alike.")  # fmt: skip
# (ops, names, why, suggestion) of features that work differently here.
_OTHERWISE = (
    (("attention", "varlen"), _CACHES, "keys are rows, not pages of a cache",
     "Call ringattn.decode() with k_cache, v_cache and lengths; where the cache has pages, with block_table, too."),
    (("mla",), _CACHES, "latents are rows, not pages of a cache",
     "Call ringattn.mla_decode() with cache and lengths; where it has pages, with block_table, too."),
    (("attention",), _PADDED, "its sequences are equally long", "Call ringattn.varlen() with cu_seqlens_q and cu_seqlens_k."),
    (("varlen", "mla"), _PADDED, "packed sequences follow each other without padding",
     "Pass cu_seqlens_k, which says where each sequence's keys begin and where the last ones end."),
    (("attention",), _MASKS, _POSITIONS_MASK,
     "Pass mask; for sequences with padding call ringattn.varlen() with cu_seqlens_q, without the padding."),
    (("varlen", "mla"), _MASKS, _POSITIONS_MASK, "Pass mask; leave padding out of the rows, and pass cu_seqlens_q."),
    (_STEPS, _MASKS, _POSITIONS_MASK, "Pass mask; lengths say how many keys of a cache are seen."),
    (("attention",), _POSITIONS, "queries end where keys end, or begin at q_offset",
     "Pass q_offset, the key position of the first query."),
    (("varlen", "mla"), _POSITIONS, "queries end where keys end, or begin at q_offsets",
     "Pass q_offsets, the key position of each sequence's first query."),
    (_STEPS, _POSITIONS, "rows stand at the end of their sequence", "Pass lengths, which count them, or lengths_before."),
    (("decode",), "kv_cache paged_kv_cache", "keys and values are two arrays",
     "Pass k_cache and v_cache, views of it: [pages, page_size, kv_heads, head_dim]."),
    (_STEPS, "kv_indptr kv_indices kv_page_indptr kv_page_indices kv_last_page_len paged_kv_indptr paged_kv_indices "
     "paged_kv_last_page_len", "pages are listed in a rectangular table",
     "Pass block_table [sequences, table_pages] and lengths (docs/porting.md makes them of flashinfer's arrays)."),
    (_STEPS, "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv cu_seqlens_k_new qo_indptr query_start_loc cu_seqlens_qkv",
     "each sequence of a step has as many rows", "Pass q as [sequences, rows, heads, head_dim], and lengths of the cache."),
    (("decode",), _COS_SIN, "it computes them from positions",
     "Pass rope=ringattn.RopeSettings(head_dim), with theta or rope_parameters of the model."),
    (("attention", "varlen"), _COS_SIN, "it does not rotate q and k", "Rotate them by ringattn.rope() before the call."),
    (("rope",), _COS_SIN, "it computes them from positions", "Pass theta, rope_parameters or inv_freq."),
    (_STEPS, "context_lens cache_seqlens", "it may count the rows of this step or not",
     "Pass lengths, which count them, or lengths_before."),
    (_STEPS, "cache_batch_idx", "sequence s of the step is row s of block_table",
     "Pass block_table in the order of q; each row of a dense cache is one page."),
    (_STEPS, "max_seqlen_q max_seqlen_k max_seq_len max_context_len", "lengths and the cache say it", "Leave it out."),
    (("attention",), "max_seqlen_q max_seqlen_k", "its sequences are as long as the arrays", "Leave it out."),
    (_ATTENTION, "alibi_slopes attention_bias position_bias rel_pos_bias", "no bias is added to scores",
     "Pass None where there is none, or use another library."),
    (_ATTENTION, "topk_indices topk_length indices", "attention to single chosen tokens is not computed",
     "Use another library."),
    (_ATTENTION, "q_descale k_descale v_descale q_scale k_scale v_scale kv_scale", "arrays have no scales beside them",
     "Multiply by it beforehand, or let ringattn.compress() quantize keys and values."),
    (("attention", "varlen", "decode"), "qv", "scores are only q times k", "Call ringattn.mla() or ringattn.mla_decode()."),
    ((*_SSM, "causal_conv1d"), "seq_idx", "sequences are packed, and told by where they begin", _SEQ_IDX),
    (("causal_conv1d",), "conv_states", "states of a batch are passed and returned, not updated in place",
     "Pass initial_states, and return_final_states=True."),
    ((*_SSM, "causal_conv1d"), "cache_indices conv_state_indices state_batch_indices",
     "states stand in the order of the sequences", "Gather them into initial_states, and scatter what is returned."),
    ((*_SSM, "causal_conv1d"), "has_initial_state has_initial_states", "all sequences have initial_states, or none has",
     "Pass zeros in the initial_states of those that have none."),
    (("causal_conv1d_update",), "cache_seqlens", "conv_state holds the last tokens, the oldest first",
     "Pass it in that order."),
    (("selective_scan", "selective_update"), "dt_limit time_step_limit", "delta is not limited",
     "Pass delta with its bias and softplus applied, and clamped, without delta_bias and delta_softplus."),
)  # fmt: skip
# Argument values without effect, which are accepted. None is always accepted.
_NOTHING = {
    "dropout_p": (0,), "dropout": (0,), "score_mod": (), "mask_mod": (), "bias": (), "attn_bias": (), "block_mask": (),
    "kernel_options": (), "sliding_window": (), "window_left": (-1,), "window_right": (-1,), "pos_encoding_mode": ("NONE",),
    "rope_scale": (), "rope_theta": (), "group": (), "process_group": (), "cp_group": (),
}  # fmt: skip
_GROUPS = ("group", "process_group", "cp_group")


class Advice(NamedTuple):
    own: str  # the right name; empty: there is none
    why: str
    suggestion: str


def advice_on(op: str, name: str) -> Advice | None:
    for ops, names in _OWN:
        if op in ops and name in names:
            return Advice(names[name], f"it is called {names[name]} there", f"Pass {names[name]}.")
    for ops, listed, why, suggestion in _OTHERWISE:
        if op in ops and name in listed.split():
            return Advice("", why, suggestion)
    return None


def asks_for_nothing(op: str, name: str, value) -> bool:
    if op not in _ATTENTION or name not in _NOTHING:
        return False
    if value is None:
        return name not in _GROUPS or _ranks_by_default() == 1
    return isinstance(value, (numbers.Number, str)) and value in _NOTHING[name]


def _ranks_by_default() -> int:
    """The number of ranks of PyTorch's default group, which None means."""
    torch = loaded_torch()
    ranks = torch.distributed if torch is not None and torch.distributed.is_available() else None
    return ranks.get_world_size() if ranks is not None and ranks.is_initialized() else 1
