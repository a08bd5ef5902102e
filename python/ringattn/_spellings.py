# SPDX-License-Identifier: Apache-2.0
"""Calls as users of flash_attn, SDPA, flashinfer, vLLM and mamba_ssm write them. Keywords with the same meaning are translated,
and others are refused by name (docs/porting.md has the table). Calls that need no translation bypass this (_tensors.traced)."""

import difflib
import inspect
from collections.abc import Callable
from typing import NoReturn

from . import _call_names
from ._arguments import as_int, is_true, lengths_of
from ._errors import CallError, refuse, unsupported
from ._tensor_names import known_names

# Names in the table of tensor names that differ from those of functions.
_ROLES = {"lengths_k": "lengths", "conv1d_weight": "weight", "conv1d_bias": "bias", "conv_state": "initial_states"}
# The op whose tensors an op reads.
_JOBS = {"varlen": "attention", "decode_partition": "decode", "mla_decode_partition": "mla_decode", "ssd_update": "ssd",
         "selective_update": "selective_scan", "causal_conv1d_update": "causal_conv1d"}  # fmt: skip
# Names in other libraries with the meaning of a keyword here.
_SCALES = ("scale", "sm_scale", "scaling")
_CAPS = ("logits_soft_cap", "logit_softcapping")
# Keywords that only SDPA has. The tensors then most likely have SDPA's axis order, which shapes do not show.
_SDPA = ("is_causal", "enable_gqa", "attn_mask")
# The library whose call it is, by keywords that only functions with a full mask by default have.
_FULL_BY_DEFAULT = {
    name: library
    for library, names in (
        ("SDPA", "attn_mask enable_gqa scale"),
        ("flex_attention", "score_mod block_mask kernel_options"), ("xformers", "attn_bias"),
        ("flash_attn", "window_size max_seqlen_q max_seqlen_k dropout_p deterministic return_attn_probs return_softmax_lse "
                       "alibi_slopes cache_seqlens num_splits seqused_q seqused_k page_table pack_gqa"),
        ("flashinfer", "sm_scale logits_soft_cap kv_layout qo_indptr kv_indptr custom_mask packed_custom_mask "
                       "pos_encoding_mode window_left"),
    )
    for name in names.split()
}  # fmt: skip
# Names whose value must be converted, and how.
_HINTS = {
    "window": "mask=(left, right)", "sliding_window": "mask=(sliding_window - 1, 0)", "left_window": "mask=(left, right)",
    "window_left": "mask=(window_left, 0), without causal (window_left, -1)", "seqlens": "lengths",
}  # fmt: skip
_NOT_NEEDED = {"chunk_size": "chunks are 64 tokens, always"}
# Table entries about tensors of files that are not tensors in Python.
_SETTINGS = "settings are not read"
# The ops of known_names(), read once, where functions are defined: torch.compile can't trace the call.
_names: dict[str, dict] = {}


def _known(op: str) -> dict:
    found = _names.get(op)
    if found is None:
        found = _names[op] = known_names(_JOBS.get(op, op))
    return found


_MASKING = ("score_mod", "mask_mod", "bias", "attn_bias")


def refuse_keyword(op: str, name: str, value, keywords) -> NoReturn:
    """Refuses an argument that the function doesn't have. The message gives its name here, or says that it is not supported,
    because leaving it out would change the result."""
    advice, known, hint = _call_names.advice_on(op, name), _known(op).get(name), _HINTS.get(name)
    if advice is not None:
        if advice.own:
            raise CallError(f"{op} has no {name}", advice.why, advice.suggestion)
        unsupported(f"{op} has no {name}", advice.why, advice.suggestion)
    if name == "grow" and "update_lengths" in keywords:
        raise CallError("grow is called update_lengths", "lengths without the rows of the step are lengths_before",
                        "Pass lengths_before=lengths, update_lengths=True in place of lengths and grow=True.")  # fmt: skip
    if name == "block_mask" and "mask" in keywords:
        unsupported(f"{op} has no block_mask", "the masks of ringattn's functions depend only on positions",
                    "For a block-sparse mask use the program, `ringattn run --block-mask` (docs/block-sparse.md).")  # fmt: skip
    if hint is not None and hint.partition("=")[0] in keywords:
        unsupported(f"{op} has no {name}", f"it was given as {str(value)[:60]}", f"Did you mean {hint}?")
    if name in _NOT_NEEDED:
        unsupported(f"{op} has no {name}", _NOT_NEEDED[name], "Leave it out: no result depends on it.")
    if name == "is_causal" and "mask" in keywords:
        unsupported(f"{op} has no is_causal", "PyTorch aligns it to the first key, and ringattn's masks to the last one",
                    'Pass mask="causal" or mask="full", or call ringattn.scaled_dot_product_attention().')  # fmt: skip
    if name in _MASKING and "mask" in keywords:
        unsupported(f"{op} has no {name}", "ringattn's masks depend only on positions",
                    "Pass mask and cu_seqlens, or use another library.")  # fmt: skip
    if name in ("dropout", "dropout_p"):
        unsupported(f"{op} has no {name}", "ringattn has no dropout", "Leave it out where it is 0, as in evaluation.")
    if name in ("group", "process_group", "cp_group") and "world" in keywords:
        raise CallError(f"{op} has no {name}", "ranks are a world", f"Pass world=ringattn.torch_world({name}).")
    if op == "attention" and known is not None and known.role.startswith("cu_seqlens"):
        unsupported(f"attention has no {name}", "its sequences are equally long", "Call ringattn.varlen().")
    if known is not None and known.refused and not known.refused.startswith(_SETTINGS):
        unsupported(f"{op} has no {name}", known.refused, known.suggestion.replace("lengths_k", "lengths"))
    near = difflib.get_close_matches(name, keywords, 1, 0.75)
    suggestion = f"Did you mean {near[0]}?" if near else f"See help(ringattn.{op}) for what it takes."
    raise CallError(f"{op} has no {name}", f"it was given as {str(value)[:60]}", suggestion)


def causal_of(causal) -> bool:
    return is_true("causal", causal)


def mask_of(causal, window_size):
    """The mask of flash_attn's arguments: a causal window has no right side."""
    causal = causal_of(causal)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        refuse(f"window_size is {str(window_size)[:60]}", "it is two numbers of tokens (left, right), each -1 for no limit",
               "Pass (-1, -1) for none.")  # fmt: skip
    left, right = (-1 if side is None else as_int(side, "a side of window_size") for side in window_size)
    if (left, right) == (-1, -1):
        return "causal" if causal else "full"
    return (left, 0 if causal else right)


class _Call:
    """A call that is translated. named: its arguments by name; foreign: arguments that the function doesn't have."""

    def __init__(self, op: str, keywords, named: dict):
        self.op, self.keywords = op, keywords
        self.named = {name: value for name, value in named.items() if name in keywords}
        self.foreign = {name: value for name, value in named.items() if name not in keywords}
        self.finish: list[Callable] = []  # transformations of the results, the last one first

    def take(self, name: str):
        return self.foreign.pop(name)

    def put(self, name: str, value, instead: str) -> None:
        """Sets a keyword of this package that was given by another name."""
        if self.named.get(name) is not None:
            raise CallError(f"{name} and {instead} of {self.op} are given", "they mean the same", "Pass one of them.")
        self.named[name] = value

    def axes(self) -> None:
        """Refuses SDPA's keywords without order=: shapes do not tell SDPA's axis order from attention()'s."""
        given = [name for name in _SDPA if name in self.foreign]
        if self.op != "attention" or not given or "order" in self.foreign or self.foreign.get("attn_mask") is not None:
            return
        ours, theirs = ("thd", "htd") if getattr(self.named.get("q"), "ndim", 4) == 3 else ("bthd", "bhtd")
        raise CallError(f"{given[0]} of attention is given without order",
                        "it is SDPA's, whose heads come before tokens, and attention() takes tokens before heads",
                        f'Pass order="{theirs}" for SDPA\'s axes, or order="{ours}".')  # fmt: skip

    def masks(self) -> None:
        given = [name for name in ("causal", "window_size") if name in self.foreign]
        if not given or "mask" not in self.keywords:
            return
        if "mask" in self.named:
            raise CallError(f"mask and {given[0]} of {self.op} are given", "mask says both", "Pass mask, or the others.")
        window = self.foreign.pop("window_size", None)
        mask = mask_of(self.foreign.get("causal", False), (-1, -1) if window is None else window)
        if "causal" in self.foreign or mask != "full":
            self.named["mask"] = mask
        self.foreign.pop("causal", None)

    def default_mask(self, given: list[str]) -> None:
        """given: the names that the call was made with. With one row per sequence, at the end, both masks are the same."""
        word = next((name for name in given if name in _FULL_BY_DEFAULT), None)
        if word is None or "mask" not in self.keywords or "mask" in self.named:
            return
        q = self.named["q"]
        if self.op in ("decode", "mla_decode") and (getattr(q, "ndim", 3) != 4 or q.shape[1] == 1):
            return
        raise CallError(f"{word} of {self.op} is given, and no mask",
                        f"without causal {self.op} is causal, and {_FULL_BY_DEFAULT[word]} is not",
                        "Pass causal=True or causal=False, too.")  # fmt: skip

    def is_causal(self) -> None:
        """SDPA's, which is aligned to the first key."""
        if "is_causal" not in self.foreign or self.op != "attention":
            return
        if "mask" in self.named:
            raise CallError("mask and is_causal of attention are given", "mask says both", "Pass one of them.")
        causal = is_true("is_causal", self.take("is_causal"))
        self.named["mask"] = "causal" if causal else "full"
        if causal and self.named.get("q_offset") is None:
            self.named["q_offset"] = 0

    def numbers(self) -> None:
        for names, own in ((_SCALES, "softmax_scale"), (_CAPS, "softcap")):
            for name in names:
                if name in self.foreign and own in self.keywords:
                    value = self.take(name)
                    if value is not None:
                        self.put(own, value, name)
        for name, value in list(self.foreign.items()):
            if _call_names.asks_for_nothing(self.op, name, value):
                self.take(name)
        if "deterministic" in self.foreign:
            is_true("deterministic", self.take("deterministic"))  # every call is
        if "num_splits" in self.foreign and "mask" in self.keywords:
            splits = self.take("num_splits")  # KV splits are at fixed positions
            as_int(0 if splits is None else splits, "num_splits")
        if self.op == "varlen":
            self.longest("max_seqlen_q", "cu_seqlens_q"), self.longest("max_seqlen_k", "cu_seqlens_k")

    def longest(self, name: str, begins: str) -> None:
        if name not in self.foreign:
            return
        given, cu = self.take(name), self.named.get(begins, self.named.get("cu_seqlens_q"))
        if given is None or cu is None:
            return
        found = max(lengths_of(cu, begins), default=0)
        if as_int(given, name) < found:
            refuse(f"{name} is {given}", f"a sequence of {begins} has {found} tokens", "Pass at least that, or leave it out.")

    def heads(self) -> None:
        if "enable_gqa" not in self.foreign or "kv_heads" in self.keywords or self.op not in ("attention", "varlen"):
            return
        if is_true("enable_gqa", self.take("enable_gqa")):
            return  # heads are grouped wherever K/V heads are fewer
        axis = {"bhtd": 1, "htd": 0}.get(self.foreign.get("order"), -2)
        heads, kv_heads = (self.named[name].shape[axis] for name in "qk")
        if heads != kv_heads:
            refuse(f"enable_gqa is False, and there are {heads} heads of q and {kv_heads} of k", "without it there are as many",
                   "Pass enable_gqa=True, or leave it out.")  # fmt: skip

    def results(self) -> None:
        if "mask" not in self.keywords or self.op in ("evict", "decode_partition", "mla_decode_partition"):
            return  # they return no lse
        for name in ("return_lse", "return_softmax_lse"):
            if name in self.foreign and not is_true(name, self.take(name)):
                self.finish.append(lambda made: made[0])
        name = "return_attn_probs"
        if name in self.foreign and not is_true(name, self.foreign[name]):
            self.take(name)
            self.finish.append(lambda made: made[0])

    def lengths(self) -> None:
        """cache_seqlens of flash_attn_with_kvcache: without the new keys, or all keys if there are no new ones."""
        if "cache_seqlens" in self.foreign and "lengths_before" in self.keywords:
            new = "k_new" if "k_new" in self.keywords else "latent"
            own = "lengths" if self.named.get(new) is None else "lengths_before"
            self.put(own, self.take("cache_seqlens"), "cache_seqlens")

    def names(self) -> None:
        known = _known(self.op)
        for name, own in _call_names.ALIASES.get(self.op, {}).items():
            if name in self.foreign:
                self.put(own, self.take(name), name)
        for name in list(self.foreign):
            meaning = known.get(name)
            if self.foreign[name] is None and (meaning is not None or _call_names.advice_on(self.op, name) is not None):
                self.take(name)  # nothing is asked for
                continue
            if meaning is None:
                continue
            own = _ROLES.get(meaning.role, meaning.role)
            if own in self.keywords:
                self.put(own, self.take(name), name)

    def kv_layout(self) -> None:
        """flashinfer's kv_layout: the position of the heads axis in k and v, or in pages. q always has tokens first."""
        if "kv_layout" not in self.foreign or self.op not in ("attention", "varlen", "decode"):
            return
        layout = self.take("kv_layout")
        if layout not in ("NHD", "HND"):
            refuse(f"kv_layout of {self.op} is {str(layout)[:60]!r}", "there are NHD and HND", "Choose one.")
        if "order" in self.foreign:
            raise CallError(f"kv_layout and order of {self.op} are given", "both say axes of k and v", "Pass one of them.")
        if layout == "HND":
            for name in ("k_cache", "v_cache") if self.op == "decode" else ("k", "v"):
                self.named[name] = self._heads_last(name, self.named.get(name), 'Pass kv_layout="NHD".')

    def _heads_last(self, name: str, array, suggestion: str):
        """A view of […, heads, tokens, dim] as [..., tokens, heads, dim]."""
        if array is not None and not hasattr(array, "swapaxes"):
            unsupported(f"{name} of {self.op} is {type(array).__name__}", "its tokens come before its heads", suggestion)
        return None if array is None else array.swapaxes(-3, -2)

    def order(self) -> None:
        """SDPA's and other orders of axes: views of q, k and v, and of the results."""
        if "order" not in self.foreign or self.op not in ("attention", "varlen"):
            return
        order = self.take("order")
        orders = ("thd", "htd") if self.op == "varlen" else ("thd", "htd", "bthd", "bhtd")
        if order not in orders:
            refuse(f"order of {self.op} is {order!r}", f"there are {', '.join(orders)}: batch, tokens, heads, dim", "Choose one.")
        for name in ("q", "k", "v", "out"):
            array = self.named.get(name)
            if array is None:
                continue
            if array.ndim != len(order):
                refuse(f"{name} of {self.op} has {array.ndim} axes", f"the order {order} has {len(order)}", "Choose another.")
            if order in ("htd", "bhtd"):
                self.named[name] = self._heads_last(name, array, 'Pass order="bthd".')
        if order in ("htd", "bhtd"):
            self.finish.append(lambda made: (made[0].swapaxes(-3, -2), made[1].swapaxes(-2, -1)))
        if order == "bhtd" and self.named.get("out") is not None:  # batches of it are no rows of one axis
            out = self.named.pop("out").swapaxes(-3, -2)
            self.finish.insert(0, lambda made: (_into(out, made[0]), made[1]))


def _into(out, made):
    if tuple(out.shape) != tuple(made.shape) or out.dtype != made.dtype:
        refuse(f"out is {out.dtype} {list(out.shape)}", f"the result is {made.dtype} {list(made.shape)}", "Pass one like it.")
    out[...] = made
    return out


def call_spelled(call: Callable, op: str, positional: tuple, required: int, keywords: frozenset, arguments: tuple,
                 named: dict):  # fmt: skip
    """call(*arguments, **named) of the function op, with arguments that it does not have in this form. positional: names of its
    positional arguments, of which the first `required` are required."""
    if len(arguments) > len(positional):
        raise CallError(f"{op} was called with {len(arguments)} arguments by position",
                        f"it takes {', '.join(positional)} by position",
                        f"Pass the others by name: {', '.join(sorted(keywords - set(positional)))}.")  # fmt: skip
    placed = dict(zip(positional, arguments))
    for name in placed:
        if name in named:
            raise CallError(f"{name} of {op} is given twice", "by position and by name", "Pass it once.")
    given = _Call(op, keywords, placed | named)
    foreign = list(given.foreign)
    for translate in (given.axes, given.heads, given.masks, given.is_causal, given.numbers, given.results, given.lengths,
                      given.names, given.kv_layout, given.order):  # fmt: skip
        translate()
    for name, value in given.foreign.items():
        if name == "return_attn_probs":
            unsupported(f"{op} has no attention probabilities", "they are never formed",
                        f"Leave return_attn_probs out: {op}() returns out and lse.")  # fmt: skip
        refuse_keyword(op, name, value, keywords)
    missing = [name for name in positional[:required] if name not in given.named]
    if missing:
        raise CallError(f"{op} lacks {', '.join(missing)}", f"it takes {', '.join(positional[:required])}", "Pass all of them.")
    given.default_mask(foreign)
    placed = [given.named.pop(name) for name in positional[:required]]
    made = call(*placed, **given.named)
    for last in reversed(given.finish):
        made = last(made)
    return made


def signature_of(function: Callable) -> tuple[tuple, int, frozenset]:
    """(positional, required, keywords) of call_spelled()."""
    parameters = inspect.signature(function).parameters.values()
    placed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = sum(p.default is p.empty for p in placed)
    keywords = frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    _known(function.__name__)
    return tuple(p.name for p in placed), required, keywords
