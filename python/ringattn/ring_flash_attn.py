# SPDX-License-Identifier: Apache-2.0
"""ring_flash_attn's functions over ringattn, with the same names, arguments and results:

    from ringattn.ring_flash_attn import zigzag_ring_flash_attn_func      # instead of: from ring_flash_attn import …

q, k, v: this rank's rows, [batch, tokens, heads, head_dim], or [tokens, heads, head_dim] for packed sequences. The
`ring` functions take contiguous shards of each sequence, `zigzag` the chunks r and 2 · world − 1 − r of 2 · world,
`llama3` contiguous shards of the packed stream. They return out, or with return_attn_probs (out, lse, None); lse is
[batch, heads, tokens], or [heads, tokens] for packed sequences.

Differences: results have the same bits on any number of ranks. Windows cross rank boundaries. ringattn's own functions
also accept sequences whose length the number of ranks does not divide. Dropout and ALiBi are refused. `deterministic` has no
effect, because every call and its gradients are deterministic. `max_seqlen` is ignored, because cu_seqlens has the lengths; a
value that is too small has no effect, while flash_attn would omit rows. `group` is a torch.distributed ProcessGroup, one
dimension of a DeviceMesh (mesh["cp"]), None for the default group, or a ringattn.World."""

from . import _attention
from ._arguments import as_ints, check_axes, lengths_of
from ._errors import unsupported
from ._flash_attn_tools import check, check_rows, mask_of, result, shim, size_of, unpacked
from ._hf_adapter import substitute_hf_flash_attn, update_ring_flash_attn_params  # noqa: F401, of the same names
from ._llama3 import (  # noqa: F401, as above
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from .layouts import contiguous, zigzag
from .torch_worlds import world_of

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens", "llama3_flash_attn_varlen_func", "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func", "ring_flash_attn_func", "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func", "ring_flash_attn_varlen_func", "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func", "substitute_hf_flash_attn", "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func", "zigzag_ring_flash_attn_kvpacked_func", "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func", "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]  # fmt: skip

_DEALS = {"contiguous": contiguous, "zigzag": zigzag}


def _batched(layout, q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group):
    check(dropout_p, alibi_slopes)
    check_rows(q=q, k=k, v=v)
    world = world_of(group, q)
    check_axes("q", q, (4,), "[batch, tokens, heads, head_dim]")
    batch, tokens = q.shape[0], q.shape[1] * size_of(world)
    dealt = _DEALS[layout]([tokens] * batch, world.size) if size_of(world) > 1 else None
    out, lse = _attention.attention(
        q, k, v, mask=mask_of(causal, window_size), softmax_scale=softmax_scale, layout=dealt, world=world
    )
    return result(out, lse, return_attn_probs)


def _varlen(
    layout, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
):
    """cu_seqlens: cumulative lengths of this rank's rows, as in ring_flash_attn, where each sequence is split equally."""
    check(dropout_p, alibi_slopes)
    check_rows(q=q, k=k, v=v)
    world = world_of(group, q)
    # With one rank they are passed on unread, because a graph can hold a tensor of lengths, but not its values.
    whole, dealt = cu_seqlens, None
    if size_of(world) > 1:
        whole = [at * world.size for at in as_ints(cu_seqlens)]
        dealt = _DEALS[layout](lengths_of(whole), world.size)
    out, lse = _attention.varlen(
        q, k, v, whole, mask=mask_of(causal, window_size), softmax_scale=softmax_scale, layout=dealt, world=world
    )
    return result(out, lse, return_attn_probs)


@shim
def ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                         deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return _batched(
        "contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    )


@shim
def ring_flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                                  alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return ring_flash_attn_func(q, *unpacked("kv", kv, 5), dropout_p, softmax_scale, causal, window_size,
                                alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip


@shim
def ring_flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                                   alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return ring_flash_attn_func(*unpacked("qkv", qkv, 5), dropout_p, softmax_scale, causal,
                                window_size, alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip


@shim
def ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                                group=None):  # fmt: skip
    return _varlen("contiguous", q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                   return_attn_probs, group)  # fmt: skip


@shim
def ring_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None,
                                         causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False,
                                         return_attn_probs=False, group=None):  # fmt: skip
    return ring_flash_attn_varlen_func(q, *unpacked("kv", kv, 4), cu_seqlens, max_seqlen, dropout_p, softmax_scale,
                                       causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip


@shim
def ring_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None,
                                          causal=False, window_size=(-1, -1), alibi_slopes=None,
                                          deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return ring_flash_attn_varlen_func(*unpacked("qkv", qkv, 4), cu_seqlens, max_seqlen, dropout_p,
                                       softmax_scale, causal, window_size, alibi_slopes, deterministic,
                                       return_attn_probs, group)  # fmt: skip


@shim
def zigzag_ring_flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return _batched(
        "zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs, group
    )


@shim
def zigzag_ring_flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False,
                                         window_size=(-1, -1), alibi_slopes=None, deterministic=False,
                                         return_attn_probs=False, group=None):  # fmt: skip
    return zigzag_ring_flash_attn_func(q, *unpacked("kv", kv, 5), dropout_p, softmax_scale, causal, window_size,
                                       alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip


@shim
def zigzag_ring_flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False,
                                          window_size=(-1, -1), alibi_slopes=None, deterministic=False,
                                          return_attn_probs=False, group=None):  # fmt: skip
    return zigzag_ring_flash_attn_func(*unpacked("qkv", qkv, 5), dropout_p, softmax_scale, causal,
                                       window_size, alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip


@shim
def zigzag_ring_flash_attn_varlen_func(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                       window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                                       group=None):  # fmt: skip
    return _varlen("zigzag", q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs,
                   group)  # fmt: skip


@shim
def zigzag_ring_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None,
                                                causal=False, window_size=(-1, -1), alibi_slopes=None,
                                                deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return zigzag_ring_flash_attn_varlen_func(q, *unpacked("kv", kv, 4), cu_seqlens, max_seqlen, dropout_p,
                                              softmax_scale, causal, window_size, alibi_slopes, deterministic,
                                              return_attn_probs, group)  # fmt: skip


@shim
def zigzag_ring_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None,
                                                 causal=False, window_size=(-1, -1), alibi_slopes=None,
                                                 deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return zigzag_ring_flash_attn_varlen_func(*unpacked("qkv", qkv, 4), cu_seqlens, max_seqlen, dropout_p,
                                              softmax_scale, causal, window_size, alibi_slopes, deterministic,
                                              return_attn_probs, group)  # fmt: skip


def _stripe(*_, **__):
    unsupported("ringattn has no stripe_flash_attn functions", "each rank would have every n-th token, so no tiles of keys",
                "Use the zigzag functions, which share causal work evenly, too.")  # fmt: skip


stripe_flash_attn_func = stripe_flash_attn_kvpacked_func = stripe_flash_attn_qkvpacked_func = _stripe
