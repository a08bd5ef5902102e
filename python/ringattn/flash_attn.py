# SPDX-License-Identifier: Apache-2.0
"""flash_attn 2's functions over ringattn, with the same names, arguments, defaults and results:

    from ringattn.flash_attn import flash_attn_func, flash_attn_with_kvcache      # instead of: from flash_attn import …

As in flash_attn, causal is False by default, and the functions return only out. With return_attn_probs they return
(out, lse, None), and with return_softmax_lse (out, lse). lse is [batch, heads, tokens], or [heads, tokens] for packed
sequences; in ringattn's own functions tokens come first. A row that sees no key has zeros in out and -inf in lse.

Differences: dropout, ALiBi, cos and sin of rotary embedding, cache_batch_idx and cache_leftpad are refused, and
flash_attn_with_kvcache refuses tensors that require a gradient. `deterministic` and `num_splits` have no effect: every
call is deterministic, and KV splits are fixed. For several ranks use ringattn.ring_flash_attn."""

import torch

from . import _attention, _decode
from ._arguments import as_int, as_ints, check_axes, is_true, lengths_of
from ._errors import called_by, refuse, unsupported
from ._flash_attn_tools import check, check_rows, mask_of, result, shim, unpacked

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]  # fmt: skip


_ROTATE = "Rotate them by ringattn.rope() before the call, or call ringattn.decode() with rope=ringattn.RopeSettings(head_dim)."
# Names of the arguments of decode().
_NAMES = {"lengths": "cache_seqlens", "lengths_before": "cache_seqlens", "k_new": "k", "v_new": "v"}


@shim
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    check(dropout_p, alibi_slopes)
    check_rows(q=q, k=k, v=v)
    check_axes("q", q, (4,), "[batch, tokens, heads, head_dim]")
    out, lse = _attention.attention(q, k, v, mask=mask_of(causal, window_size), softmax_scale=softmax_scale, softcap=softcap)
    return result(out, lse, return_attn_probs)


@shim
def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return flash_attn_func(q, *unpacked("kv", kv, 5), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)  # fmt: skip


@shim
def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):  # fmt: skip
    return flash_attn_func(*unpacked("qkv", qkv, 5), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)  # fmt: skip


@shim
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):  # fmt: skip
    check(dropout_p, alibi_slopes)
    if block_table is not None:
        unsupported("block_table of flash_attn_varlen_func is given", "packed keys have no pages",
                    "Pass them without pages, or decode up to 16 rows a sequence by flash_attn_with_kvcache().")  # fmt: skip
    check_rows(q=q, k=k, v=v)
    if not torch.compiler.is_compiling():  # a graph can hold a tensor of lengths, but not its values
        cu_seqlens_q = _checked_begins("q", cu_seqlens_q, max_seqlen_q)
        cu_seqlens_k = _checked_begins("k", cu_seqlens_k, max_seqlen_k)
    out, lse = _attention.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, mask=mask_of(causal, window_size),
                                 softmax_scale=softmax_scale, softcap=softcap)  # fmt: skip
    return result(out, lse, return_attn_probs)


def _checked_begins(side: str, cu_seqlens, longest) -> list[int]:
    begins = as_ints(cu_seqlens, f"cu_seqlens_{side}")
    found = max(lengths_of(begins, f"cu_seqlens_{side}"), default=0)
    if as_int(longest, f"max_seqlen_{side}") < found:
        refuse(f"max_seqlen_{side} is {longest}", f"a sequence of cu_seqlens_{side} has {found} tokens", "Pass at least that.")
    return begins


@shim
def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):  # fmt: skip
    return flash_attn_varlen_func(q, *unpacked("kv", kv, 4), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


@shim
def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):  # fmt: skip
    return flash_attn_varlen_func(*unpacked("qkv", qkv, 4), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)  # fmt: skip


@shim
def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False):  # fmt: skip
    """flash_attn's function: one decode step over a KV cache. One rank.

    Args:
        q: [batch, rows, heads, head_dim], up to 16 rows.
        k_cache, v_cache: [batch, keys, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim] with block_table.
        k, v: [batch, rows, kv_heads, head_dim], the same rows as q: appended to the cache after cache_seqlens, which are not
            changed. None: cache_seqlens include all keys.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes: must be None.
        cache_seqlens: an int or int32 [batch]. None: the whole cache.
        block_table: int32 [batch, table_pages], page indices. None: a dense cache.
        softmax_scale: factor of the scores. None: 1 / sqrt(head_dim).
        causal: a causal mask, aligned to the last key.
        window_size: (left, right), tokens that a query sees; -1: no limit.
        softcap: score = softcap * tanh(score / softcap). 0: off.
        rotary_interleaved: no effect without rotary_cos.
        num_splits: no effect: KV splits are fixed.
        return_softmax_lse: returns (out, lse) instead of out.

    Returns:
        out, [batch, rows, heads, head_dim] of q's dtype; with return_softmax_lse (out, lse), lse float32 [batch, heads, rows].

    Raises:
        CallError: a keyword is unknown. The error gives its name in ringattn, if there is one.
        UsageError: shapes, lengths or pages contradict each other.
        UnsupportedError: rotary embedding, ALiBi, cache_batch_idx or cache_leftpad is given, or a tensor requires a gradient.

    Formula:
        As in ringattn.decode().

    Example:
        >>> cache, q = torch.ones(2, 64, 2, 32), torch.ones(2, 1, 4, 32)
        >>> ringattn.flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=40).shape
        torch.Size([2, 1, 4, 32])
    """
    check(0.0, alibi_slopes)
    for name, given, why, suggestion in (
        ("rotary_cos", rotary_cos, "it does not rotate q and k", _ROTATE),
        ("rotary_sin", rotary_sin, "it does not rotate q and k", _ROTATE),
        ("cache_batch_idx", cache_batch_idx, "sequence s of a dense cache is row s of q", "Pass pages and a block_table."),
        ("cache_leftpad", cache_leftpad, "sequences begin with their first key", "Pass a cache without padding."),
    ):  # fmt: skip
        if given is not None:
            unsupported(f"{name} of flash_attn_with_kvcache is given", why, suggestion)
    as_int(num_splits, "num_splits")
    check_rows(q=q, k_cache=k_cache, v_cache=v_cache)
    check_axes("q", q, (4,), "[batch, rows, heads, head_dim]")
    check_axes("k_cache", k_cache, (4,), "[batch, keys, kv_heads, head_dim], or [pages, page_size, kv_heads, head_dim]")
    batch, rows = q.shape[:2]
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        refuse(f"{missing} of flash_attn_with_kvcache is missing", "a token has a key and a value", "Pass both.")
    if k is not None:
        check_rows(k=k, v=v)
    if k is not None and k.shape[:2] != q.shape[:2]:
        unsupported(f"k is {list(k.shape)} and q {list(q.shape)}", "a step has a new key for each of its rows",
                    "Pass as many new keys as rows of q.")  # fmt: skip
    if cache_seqlens is None:
        if k is not None or block_table is not None:
            refuse("cache_seqlens is None", "it says where new keys are written, and how far pages are filled", "Pass it.")
        cache_seqlens = k_cache.shape[1]
    if not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = torch.full((batch,), as_int(cache_seqlens, "cache_seqlens"), dtype=torch.int32, device=q.device)
    lengths = {"lengths": cache_seqlens} if k is None else {"lengths_before": cache_seqlens, "k_new": k, "v_new": v}
    out, lse = called_by(_NAMES, _decode.decode, q, k_cache, v_cache, block_table=block_table, mask=mask_of(causal, window_size),
                              softmax_scale=softmax_scale, softcap=softcap, **lengths)  # fmt: skip
    if not is_true("return_softmax_lse", return_softmax_lse):
        return out
    return out, lse.transpose(-1, -2).contiguous()
