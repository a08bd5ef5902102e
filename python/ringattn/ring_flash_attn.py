# SPDX-License-Identifier: Apache-2.0
"""ring_flash_attn's functions, by their names, arguments and results, over ringattn:

    from ringattn.ring_flash_attn import zigzag_ring_flash_attn_func      # instead of: from ring_flash_attn import …

q, k, v: this rank's rows, [batch, tokens, heads, head_dim], or [tokens, heads, head_dim] of packed sequences. The `ring`
functions take contiguous shards of each sequence, `zigzag` the chunks r and 2 · world − 1 − r of 2 · world, `llama3` contiguous
shards of the packed stream. They return out, or with return_attn_probs (out, lse, None), where lse is [batch, heads, tokens],
or [heads, tokens] of packed sequences.

Differences: results have the same bits on any number of ranks; windows reach over ranks' borders; sequences need not divide
evenly where a world is given rows by ringattn's own functions. Dropout and ALiBi are refused, as are gradients. `deterministic`
changes nothing: every call is. `group` is a torch.distributed ProcessGroup, None for the default one, or a ringattn.World."""

from . import _attention
from ._arguments import as_ints, lengths_of
from ._errors import refuse, unsupported
from .layouts import contiguous, packed, zigzag
from .torch_worlds import world_of

_DEALS = {"contiguous": contiguous, "zigzag": zigzag}


def _mask(causal: bool, window_size: tuple[int, int]):
    """As flash_attn has it: a causal window has no right side."""
    if tuple(window_size) == (-1, -1):
        return "causal" if causal else "full"
    left, right = window_size
    return (left, 0 if causal else right)


def _check(dropout_p: float, alibi_slopes) -> None:
    if dropout_p:
        unsupported(f"dropout_p is {dropout_p}", "ringattn has no dropout", "Pass 0, as in evaluation.")
    if alibi_slopes is not None:
        unsupported("alibi_slopes are given", "ringattn has no ALiBi", "Pass None.")


def _result(out, lse, return_attn_probs: bool):
    """lse's tokens go last."""
    return (out, lse.transpose(-1, -2).contiguous(), None) if return_attn_probs else out


def _size(world) -> int:
    return 1 if world is None else world.size


def _batched(layout, q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group):
    _check(dropout_p, alibi_slopes)
    world = world_of(group, q)
    batch, tokens = q.shape[0], q.shape[1] * _size(world)
    dealt = _DEALS[layout]([tokens] * batch, world.size) if _size(world) > 1 else None
    out, lse = _attention.attention(
        q, k, v, mask=_mask(causal, window_size), softmax_scale=softmax_scale, layout=dealt, world=world
    )
    return _result(out, lse, return_attn_probs)


def _varlen(
    layout, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
):
    """cu_seqlens: of this rank's rows, as ring_flash_attn has it: each sequence is split equally."""
    _check(dropout_p, alibi_slopes)
    world = world_of(group, q)
    # Of one rank they go on as they are: a graph can hold a tensor of lengths, but not its numbers.
    whole, dealt = cu_seqlens, None
    if _size(world) > 1:
        whole = [at * world.size for at in as_ints(cu_seqlens)]
        dealt = _DEALS[layout](lengths_of(whole), world.size)
    out, lse = _attention.varlen(
        q, k, v, whole, mask=_mask(causal, window_size), softmax_scale=softmax_scale, layout=dealt, world=world
    )
    return _result(out, lse, return_attn_probs)


def ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                         deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return _batched(
        "contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    )


def ring_flash_attn_kvpacked_func(q, kv, *arguments, **named):
    """kv: [batch, tokens, 2, heads, head_dim]."""
    return ring_flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *arguments, **named)


def ring_flash_attn_qkvpacked_func(qkv, *arguments, **named):
    """qkv: [batch, tokens, 3, heads, head_dim]."""
    return ring_flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *arguments, **named)


def ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                                group=None):  # fmt: skip
    return _varlen("contiguous", q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                   return_attn_probs, group)  # fmt: skip


def ring_flash_attn_varlen_kvpacked_func(q, kv, *arguments, **named):
    return ring_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *arguments, **named)


def ring_flash_attn_varlen_qkvpacked_func(qkv, *arguments, **named):
    return ring_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *arguments, **named)


def zigzag_ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return _batched(
        "zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    )


def zigzag_ring_flash_attn_kvpacked_func(q, kv, *arguments, **named):
    return zigzag_ring_flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *arguments, **named)


def zigzag_ring_flash_attn_qkvpacked_func(qkv, *arguments, **named):
    return zigzag_ring_flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *arguments, **named)


def zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                       window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                                       group=None):  # fmt: skip
    return _varlen("zigzag", q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs,
                   group)  # fmt: skip


def zigzag_ring_flash_attn_varlen_kvpacked_func(q, kv, *arguments, **named):
    return zigzag_ring_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *arguments, **named)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(qkv, *arguments, **named):
    return zigzag_ring_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *arguments, **named)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal: bool, rank: int, world_size: int):
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice) of a rank's contiguous shard of the packed stream:
    where the sequences of its rows begin, and those of the keys that they may see. The whole cu_seqlens goes along with
    cu_seqlens_k, and llama3_flash_attn_varlen_func() takes it from there."""
    import torch

    at = as_ints(cu_seqlens)
    lengths_of(at)
    if at[-1] % world_size:
        refuse(
            f"{at[-1]} tokens don't divide among {world_size} ranks",
            "llama3's shards are equally long",
            "Pad the stream.",
        )
    begin, end = at[-1] // world_size * rank, at[-1] // world_size * (rank + 1)
    touched = [(b, e) for b, e in zip(at, at[1:]) if e > begin and b < end]
    k_begin = touched[0][0]
    k_end = end if causal else touched[-1][1]
    local_q = [begin - begin] + [min(e, end) - begin for _, e in touched]
    local_k = [0] + [min(e, k_end) - k_begin for _, e in touched]
    made = [
        torch.tensor(cu, dtype=torch.int32, device=getattr(cu_seqlens, "device", None)) for cu in (local_q, local_k)
    ]
    made[1].ringattn_cu_seqlens = tuple(at)
    longest = [max((b - a for a, b in zip(cu, cu[1:])), default=0) for cu in (local_q, local_k)]
    return *made, *longest, slice(k_begin, k_end)


def llama3_flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                                  dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                  deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    """heads_k_stride, local_k_slice and the longest lengths change nothing: keys travel block by block."""
    _check(dropout_p, alibi_slopes)
    whole = getattr(cu_seqlens_k, "ringattn_cu_seqlens", None)
    if whole is None:
        refuse("cu_seqlens_k doesn't say which sequences there are",
               "ringattn's llama3_flash_attn_prepare_cu_seqlens() puts that on the tensor that it returns",
               "Pass that tensor itself, not a copy.")  # fmt: skip
    world = world_of(group, q)
    dealt = packed(lengths_of(whole), world.size) if _size(world) > 1 else None
    out, lse = _attention.varlen(
        q, k, v, whole, mask=_mask(causal, window_size), softmax_scale=softmax_scale, layout=dealt, world=world
    )
    return _result(out, lse, return_attn_probs)


def llama3_flash_attn_varlen_kvpacked_func(q, kv, *arguments, **named):
    return llama3_flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *arguments, **named)


def llama3_flash_attn_varlen_qkvpacked_func(qkv, *arguments, **named):
    return llama3_flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *arguments, **named)
