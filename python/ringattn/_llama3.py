# SPDX-License-Identifier: Apache-2.0
"""The llama3 functions of ring_flash_attn, for contiguous shards of the packed stream. A rank prepares the sequence
boundaries of its rows and of the keys that they see. ringattn needs the boundaries of the whole stream, so these are
attached to the prepared tensors."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import _attention, _torch_tools
from ._arguments import as_int, as_ints, check_axes, lengths_of
from ._errors import refuse
from ._flash_attn_tools import causal_of, check, check_rows, check_stride, mask_of, result, shim, size_of, unpacked
from .layouts import packed
from .torch_worlds import world_of

# (version, values) of GPU tensors, because reading them waits for the device.
_read = WeakIdKeyDictionary()


def _numbers(cu) -> tuple[int, ...]:
    on_gpu = isinstance(cu, Tensor) and cu.device.type != "cpu" and not cu.is_inference()
    version = cu._version if on_gpu else None  # which counts changes in place
    known = _read.get(cu) if on_gpu else None
    if known is not None and known[0] == version:
        return known[1]
    numbers = tuple(as_ints(cu, "cu_seqlens"))
    if on_gpu:
        _read[cu] = version, numbers
    return numbers


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal: bool, rank: int, world_size: int):
    """ring_flash_attn's function: the sequence boundaries of a rank's contiguous shard of the packed stream, and of the keys that
    its rows may see. The arguments are attached to cu_seqlens_k, where llama3_flash_attn_varlen_func() finds them.

    Args:
        cu_seqlens: [sequences + 1] cumulative lengths of the whole stream.
        causal: as in the calls that follow.
        rank, world_size: rank in the group, and number of its ranks.

    Returns:
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice): int32 tensors [sequences of the rank + 1], their
        longest sequences in tokens, and the slice of the stream's keys.

    Raises:
        UsageError: the number of ranks does not divide the tokens, or there is no such rank.

    Formula:
        docs/porting.md says what differs from ring_flash_attn.

    Example:
        >>> prepare = ringattn.ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
        >>> cu_q, cu_k, longest_q, longest_k, keys = prepare(torch.tensor([0, 24, 64]), causal=True, rank=1, world_size=2)
        >>> cu_q.tolist(), cu_k.tolist(), keys
        ([0, 32], [0, 40], slice(24, 64, None))
    """
    at = as_ints(cu_seqlens, "cu_seqlens")
    lengths_of(at)
    causal = causal_of(causal)
    rank, world_size = as_int(rank, "rank"), as_int(world_size, "world_size")
    if not 0 <= rank < world_size:
        refuse(f"there is no rank {rank} of {world_size}", "ranks count from 0", "Check rank and world_size.")
    if at[-1] % world_size:
        refuse(
            f"{at[-1]} tokens don't divide among {world_size} ranks",
            "llama3's shards are equally long",
            "Pad the stream.",
        )
    begin, end = at[-1] // world_size * rank, at[-1] // world_size * (rank + 1)
    touched = [(b, e) for b, e in zip(at, at[1:]) if e > begin and b < end]
    k_begin = touched[0][0] if touched else begin
    k_end = end if causal or not touched else touched[-1][1]
    local_q = [0] + [min(e, end) - begin for _, e in touched]
    local_k = [0] + [min(e, k_end) - k_begin for _, e in touched]
    made = [
        torch.tensor(cu, dtype=torch.int32, device=getattr(cu_seqlens, "device", None)) for cu in (local_q, local_k)
    ]
    made[1].ringattn_llama3 = (
        tuple(at), tuple(local_q), tuple(local_k), causal, rank, world_size, k_begin, k_end
    )  # fmt: skip
    longest = [max((b - a for a, b in zip(cu, cu[1:])), default=0) for cu in (local_q, local_k)]
    return *made, *longest, slice(k_begin, k_end)


def _begins(cu_seqlens_q, cu_seqlens_k, local_q, local_k, whole):
    """Sequence boundaries of the whole stream. Refuses tensors whose values differ from the prepared ones."""
    for name, given, prepared in (("cu_seqlens_q", cu_seqlens_q, local_q), ("cu_seqlens_k", cu_seqlens_k, local_k)):
        found = _numbers(given)
        if found != tuple(prepared):
            refuse(f"{name} is {list(found[:8])}",
                   f"llama3_flash_attn_prepare_cu_seqlens() made {list(prepared[:8])} together with cu_seqlens_k",
                   "Pass all that one call of it returns, and call it again for another batch.")  # fmt: skip
    return whole


@_torch_tools.operator("llama3_begins")
def _begins_op(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, local_q: list[int], local_k: list[int], whole: list[int]
) -> Tensor:  # fmt: skip
    return torch.tensor(_begins(cu_seqlens_q, cu_seqlens_k, local_q, local_k, whole), dtype=torch.int64)


@_torch_tools.fake("llama3_begins")
def _(cu_seqlens_q, cu_seqlens_k, local_q, local_k, whole):
    return torch.empty(len(whole), dtype=torch.int64, device="cpu")


def _check_prepared(causal, rank, world_size, k_begin, k_end, given_causal, given_slice, world) -> None:
    """Checks the prepared arguments that are not tensors."""
    if causal_of(given_causal) != causal:
        refuse(f"causal is {given_causal}", f"cu_seqlens_k was prepared with causal={causal}", "Pass the same to both.")
    mine = (0, 1) if world is None else (world.rank, world.size)
    if mine != (rank, world_size):
        refuse(f"this is rank {mine[0]} of {mine[1]}", f"cu_seqlens_k was prepared for rank {rank} of {world_size}",
               "Prepare it with the group's rank and size.")  # fmt: skip
    if not isinstance(given_slice, slice) or (given_slice.start, given_slice.stop, given_slice.step) != (k_begin, k_end, None):
        refuse(f"local_k_slice is {given_slice}", f"cu_seqlens_k was prepared with slice({k_begin}, {k_end})",
               "Pass all that one call of llama3_flash_attn_prepare_cu_seqlens() returns.")  # fmt: skip


@shim
def llama3_flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                                  dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                  deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    check(dropout_p, alibi_slopes)
    check_rows(q=q, k=k, v=v)
    check_axes("k", k, (3,), "[tokens, heads, head_dim]")
    check_stride(heads_k_stride, k.shape[1])
    prepared = getattr(cu_seqlens_k, "ringattn_llama3", None)
    if prepared is None:
        refuse("cu_seqlens_k doesn't say which sequences there are",
               "ringattn's llama3_flash_attn_prepare_cu_seqlens() puts that on the tensor that it returns",
               "Pass that tensor itself, not a copy.")  # fmt: skip
    world = world_of(group, q)
    whole, local_q, local_k, *facts = prepared
    _check_prepared(*facts, causal, local_k_slice, world)
    if torch.compiler.is_compiling():
        begins = torch.ops.ringattn.llama3_begins(cu_seqlens_q, cu_seqlens_k, list(local_q), list(local_k), list(whole))
    else:
        begins = _begins(cu_seqlens_q, cu_seqlens_k, local_q, local_k, whole)
    dealt = packed(lengths_of(whole), world.size) if size_of(world) > 1 else None
    out, lse = _attention.varlen(
        q, k, v, begins, mask=mask_of(causal, window_size), softmax_scale=softmax_scale, layout=dealt, world=world
    )
    return result(out, lse, return_attn_probs)


@shim
def llama3_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                           heads_k_stride, local_k_slice, dropout_p=0.0, softmax_scale=None,
                                           causal=False, window_size=(-1, -1), alibi_slopes=None,
                                           deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return llama3_flash_attn_varlen_func(q, *unpacked("kv", kv, 4), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                         max_seqlen_k, heads_k_stride, local_k_slice, dropout_p, softmax_scale,
                                         causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip


@shim
def llama3_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                            heads_k_stride, local_k_slice, dropout_p=0.0, softmax_scale=None,
                                            causal=False, window_size=(-1, -1), alibi_slopes=None,
                                            deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    return llama3_flash_attn_varlen_func(*unpacked("qkv", qkv, 4), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                         max_seqlen_k, heads_k_stride, local_k_slice, dropout_p, softmax_scale,
                                         causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)  # fmt: skip
