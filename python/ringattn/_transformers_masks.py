# SPDX-License-Identifier: Apache-2.0
"""Reads transformers' masks, and where the sequences of a batch begin, from what its models pass to their layers.

A model makes its masks before its layers run, and passes one of them to each layer. Instead of a tensor a layer gets a Mask,
which describes the contents of that tensor, so attention_forward() knows what eager attention would compute."""

from typing import NoReturn

import torch
from torch import Tensor

from . import _torch_tools
from ._arguments import as_ints
from ._errors import UnsupportedError, refuse, unsupported
from ._transformers_padding import Padding

OWN_MASK = "the model has a mask of its own"
_INSTEAD = "ringattn hands it a description in place of a tensor", "Use another implementation."


class _NoTensor(UnsupportedError, AttributeError):
    """A model uses its mask as a tensor."""


class Mask:
    """causal, window: which keys a query sees. A window of w is the last w keys of a causal mask, otherwise w keys on both sides.
    made_for: numbers of queries and keys.
    packed: [batch, tokens], the index of each token's sequence in its row, if the model's positions separate sequences.
    While torch.compile traces, it is set for each batch without a cache.
    padding: a padding mask whose values are unknown, because torch.compile traces.
    dropped: the tokens that a padding mask drops; None: none.
    filled: the number of leading keys that are filled, as in a static cache, an int or a tensor without axes; None: all.
    step_keys: the number of filled keys if the mask of a decode step says nothing else; otherwise None."""

    ndim = 4  # transformers hands a mask of four axes on as it is

    def __init__(self, causal: bool, window: int | None, made_for, packed=None, padding=None, dropped: Padding | None = None,
                 filled=None):  # fmt: skip
        self.causal, self.window, self.made_for, self.packed, self.padding = causal, window, made_for, packed, padding
        self.dropped, self.filled = dropped, filled
        self.step_keys = None
        if causal and packed is None and padding is None and dropped is None and not isinstance(filled, Tensor):
            queries, keys = made_for
            self.step_keys = filled if filled is not None or queries == keys else keys
        self.begins, self.begins_for = None, (None, None)  # the result of sequences_of(), for all layers
        self.lengths = None  # the result of lengths_for(), for all layers

    def contiguous(self) -> "Mask":
        """generate() of transformers 5.23 and earlier calls this."""
        return self

    def lengths_for(self, q: Tensor) -> Tensor:
        """int32 [batch] on q's device: the number of leading keys that are filled."""
        if self.lengths is None or self.lengths.device != q.device or self.lengths.shape[0] != q.shape[0]:
            filled = self.made_for[1] if self.filled is None else self.filled
            if isinstance(filled, Tensor):
                self.lengths = filled.to(q.device, torch.int32).expand(q.shape[0]).contiguous()
            else:
                self.lengths = torch.full((q.shape[0],), filled, dtype=torch.int32, device=q.device)
        return self.lengths

    def kernel_mask(self):
        """The mask argument of ringattn's functions."""
        if self.window is None:
            return "causal" if self.causal else "full"
        return (self.window - 1, 0) if self.causal else (self.window, self.window)

    def __getattr__(self, name):
        raise _NoTensor(f"the model reads {name} of its mask", *_INSTEAD)

    def __getitem__(self, index):
        raise _NoTensor("the model takes a part of its mask", *_INSTEAD)

    @classmethod
    def __torch_function__(cls, function, *_):
        raise _NoTensor(f"the model computes with its mask, by {function.__name__}", *_INSTEAD)


def _is_made_like(given, pattern) -> bool:
    """Whether the same function of transformers returned both: they have the same code, and close over the same numbers and
    functions. None in a pattern matches anything."""
    if pattern is None:
        return True
    if isinstance(pattern, tuple):
        return isinstance(given, tuple) and len(given) == len(pattern) and all(map(_is_made_like, given, pattern))
    if not callable(pattern):
        return given == pattern
    if getattr(given, "__code__", None) is not pattern.__code__:
        return False
    return all(map(_is_made_like, _held(given), _held(pattern)))


def _held(function) -> tuple:
    """The values of a function's closure."""
    return tuple([cell.cell_contents for cell in function.__closure__ or ()])


def read_mask(function, size: int | None, tokens: int):
    """(causal, window, packed) of a mask function of transformers, as in Mask. size: size of its windows or chunks. tokens:
    the maximum length of a sequence, including tokens that a cache has dropped. Refuses functions that are not known to be a
    mask that ringattn supports."""
    from transformers import masking_utils as made  # noqa: PLC0415

    known = [(made.causal_mask_function, True, None), (made.bidirectional_mask_function, False, None)]
    if size is not None:
        known.append((made.sliding_window_causal_mask_function(size), True, size))
        known.append((made.sliding_window_bidirectional_mask_function(size), False, size))
        chunked = made.chunked_causal_mask_function(size, None)
        if tokens <= size:
            known.append((chunked, True, None))
        elif _is_made_like(function, chunked) or _sequence_numbers(function, chunked) is not None:
            unsupported(
                f"the model attends in chunks of {size} tokens, and there are {tokens}",
                "ringattn has windows, but no chunks",
                f"Pass at most {size} tokens, or use another implementation.",
            )
    for pattern, causal, window in known:
        if _is_made_like(function, pattern):
            return causal, window, None
        packed = _sequence_numbers(function, pattern)
        if packed is not None:
            return causal, window, packed
    unsupported(
        OWN_MASK, "ringattn knows causal masks, bidirectional ones and sliding windows", "Use another implementation."
    )


def _sequence_numbers(function, pattern) -> Tensor | None:
    """The sequence index of each token, [batch, tokens], if `function` is `pattern` within packed sequences. transformers then
    combines two functions, of which one closes over the indices and the other over the pattern with the tokens' own positions.
    The order depends on the version."""
    from transformers import masking_utils as made  # noqa: PLC0415

    same = made.packed_sequence_mask_function(None)
    forms = [(pattern, same, 1)]
    if hasattr(made, "remap_positions_for_packed_sequence"):
        within = made.remap_positions_for_packed_sequence(pattern, None)
        forms = [(same, within, 0), (within, same, 1)]
    for first, second, of_same in forms:
        if _is_made_like(function, made.and_masks(first, second)):
            return _held(_held(function)[0][of_same])[0]
    return None


def refuse_padding(why: str) -> NoReturn:
    unsupported("the batch is padded", why, "Pass sequences of one length, or packed ones with cu_seq_lens_q and cu_seq_lens_k.")


def check_padding(padding: Tensor | None) -> None:
    if padding is not None and not bool(padding.all()):
        refuse_padding("lengths are not known while torch.compile traces")


def _begins(dealt, rows, given_q, given_k, packed, padding) -> list[int]:
    """Where the sequences of these queries begin, [sequences + 1]. dealt: the arguments of batch(). rows: batch and tokens.
    given_q, given_k: cu_seq_lens_q and cu_seq_lens_k. If several of these give the boundaries, they must agree."""
    check_padding(padding)
    cu_q, cu_k = (None if cu is None else as_ints(cu, "cu_seq_lens") for cu in (given_q, given_k))
    if dealt is not None:
        if cu_q is not None and (cu_q != list(dealt) or cu_k != list(dealt)):
            refuse(f"cu_seq_lens_q is {cu_q[:8]} and cu_seq_lens_k {cu_k[:8]} inside of batch()",
                   f"its sequences begin at {list(dealt)[:8]}", "Leave them out.")  # fmt: skip
        return list(dealt)
    batch, tokens = rows
    apart = packed is not None and bool(packed[:, -1].any())
    if cu_q is None:
        if apart:
            unsupported("sequences are separated only by position_ids", "ringattn would treat them as one",
                        "Pass cu_seq_lens_q and cu_seq_lens_k, or use ringattn.transformers.batch().")  # fmt: skip
        return [tokens * row for row in range(batch + 1)]
    if apart:
        found = [0, *(packed[0].diff().nonzero().flatten() + 1).tolist(), tokens]
        if found != sorted(set(cu_q)):
            refuse(f"cu_seq_lens_q is {cu_q[:8]}", f"sequences begin at {found[:8]} by position_ids",
                   "Pass those that are meant.")  # fmt: skip
    return cu_q


@_torch_tools.operator("packed_begins")
def _begins_op(
    like: Tensor, dealt: list[int] | None, rows: list[int], given_q: Tensor | None, given_k: Tensor | None,
    packed: Tensor | None, padding: Tensor | None,
) -> Tensor:  # fmt: skip
    """Operator of _begins(). like: a tensor on the model's device."""
    return torch.tensor(_begins(dealt, rows, given_q, given_k, packed, padding), dtype=torch.int64)


@_torch_tools.fake("packed_begins")
def _(like, dealt, rows, given_q, given_k, packed, padding):
    numbers = len(dealt) if dealt is not None else rows[0] + 1 if given_q is None else given_q.shape[0]
    return torch.empty(numbers, dtype=torch.int64, device="cpu")


def sequences_of(q: Tensor, mask: Mask | None, given_q: Tensor | None, given_k: Tensor | None, dealt: list[int] | None):
    """_begins() of a layer's q [batch, tokens, heads, head_dim]; None if each row is a sequence. While torch.compile traces,
    this is an operator, which finds or refuses what depends on values when the graph runs. No graph can drop it, because
    attention takes its result."""
    packed, padding = (None, None) if mask is None else (mask.packed, mask.padding)
    if given_q is None and padding is None and (packed is None or dealt is not None):
        return dealt
    if mask is not None and mask.begins is not None and mask.begins_for[0] is given_q and mask.begins_for[1] is given_k:
        return mask.begins
    known = dealt, [q.shape[0], q.shape[1]], given_q, given_k, packed, padding
    begins = torch.ops.ringattn.packed_begins(q.detach(), *known) if torch.compiler.is_compiling() else _begins(*known)
    if mask is not None:
        mask.begins, mask.begins_for = begins, (given_q, given_k)
    return begins


@_torch_tools.operator("unpadded_lengths")
def unpadded_lengths(lengths: Tensor, padding: Tensor) -> Tensor:
    """Checks that `padding`, a mask in a graph, drops nothing, and returns a copy of a decode step's lengths. The step takes this
    copy, so that no graph can drop the check."""
    check_padding(padding)
    return lengths.clone()


@_torch_tools.fake("unpadded_lengths")
def _(lengths, padding):
    return torch.empty_like(lengths)
