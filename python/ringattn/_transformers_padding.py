# SPDX-License-Identifier: Apache-2.0
"""Padded batches of transformers' models, as packed sequences of the tokens that a 2D attention_mask keeps.

Tokens that the mask drops are neither keys nor queries, so a sequence has the same bits as alone, wherever its padding is.
Results of dropped queries are zeros."""

import functools

import torch
from torch import Tensor

from . import _attention
from ._errors import unsupported


class Padding:
    """A padding mask that drops tokens.

    keys: bool [batch, keys], the kept keys. queries: bool [batch, queries], or None if all are computed, as in
    cross-attention and in layers that are not causal.
    whole: no query is dropped. in_front: no kept key is after a dropped one."""

    def __init__(self, keys: Tensor, queries: Tensor | None, whole: bool, in_front: bool):
        self.keys, self.queries, self.whole, self.in_front = keys, queries, whole, in_front

    @classmethod
    def of(cls, kept: Tensor, queries: int | None, has_window: bool) -> "Padding | None":
        """The padding of a mask [batch, keys] whose last `queries` tokens are queries (None: none are); None if the mask drops
        nothing. Refuses dropped tokens between kept ones if there is a window, because transformers counts them in windows."""
        kept = kept.bool()
        at_queries = kept if queries is None else kept[:, -queries:]
        begins = (kept[:, 1:] > kept[:, :-1]).sum(1)
        facts = torch.stack([kept.all(), at_queries.all(), (begins == 0).all(), (begins + kept[:, 0] <= 1).all()])
        nothing, whole, in_front, in_one_run = facts.tolist()  # one wait for the device
        if nothing:
            return None
        if has_window and not in_one_run:
            unsupported("attention_mask drops tokens between others, and the layer has a window",
                        "ringattn's windows count only tokens that are there", "Pad on the left.")  # fmt: skip
        return cls(kept, None if queries is None else at_queries, whole, in_front)

    @functools.cached_property
    def step(self) -> tuple[Tensor, Tensor | None] | None:
        """(lengths, order) if all queries are kept: int32 [batch], and int64 [batch, keys], which moves the kept keys to the
        front in their order, or None if they are already there. Returns None if queries are dropped."""
        if self.queries is None or not self.whole:
            return None
        lengths = self.keys.sum(1, dtype=torch.int32)
        if self.in_front:
            return lengths, None
        return lengths, self.keys.to(torch.int8).sort(dim=1, descending=True, stable=True).indices

    @functools.cached_property
    def packed(self) -> tuple[Tensor | None, list[int], Tensor, list[int]]:
        """Indices of the kept rows among [batch * tokens], and cumulative lengths, for queries (None: all) and for keys."""
        keys, cu_k = _packed(self.keys)
        if self.queries is None:
            return None, [], keys, cu_k
        return *_packed(self.queries), keys, cu_k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, named: dict) -> Tensor:
        """[batch, queries, heads, head_dim_v] of q [batch, queries, heads, head_dim]; k and v begin with the mask's keys."""
        at_q, cu_q, at_k, cu_k = self.packed
        batch, queries, keys = q.shape[0], q.shape[1], self.keys.shape[1]
        k, v = (rows[:, :keys].flatten(0, 1)[at_k] for rows in (k, v))
        flat = q.flatten(0, 1)
        if at_q is None:
            cu_q = [queries * row for row in range(batch + 1)]
            return _attention.varlen(flat, k, v, cu_q, cu_k, **named)[0].unflatten(0, (batch, queries))
        out = _attention.varlen(flat[at_q], k, v, cu_q, cu_k, **named)[0]
        rows = out.new_zeros(batch * queries, *out.shape[1:])
        return rows.index_copy(0, at_q, out).unflatten(0, (batch, queries))


def _packed(kept: Tensor) -> tuple[Tensor, list[int]]:
    at = kept.flatten().nonzero().flatten()
    return at, [0, *kept.sum(1).cumsum(0).tolist()]


def to_front(rows: Tensor, order: Tensor) -> Tensor:
    """[batch, keys, heads, dim] with the keys of each sequence in the order [batch, keys]."""
    return rows[torch.arange(rows.shape[0], device=rows.device)[:, None], order]
