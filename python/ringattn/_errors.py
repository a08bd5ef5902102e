# SPDX-License-Identifier: Apache-2.0
"""Errors. A message has the form `problem (why). suggestion.`; its parts are members."""

import functools
import re
from typing import NoReturn

from ._loaded_torch import loaded_torch


class Error(Exception):
    """The error of a failed call. Its text has the form `problem (why). suggestion.`

    Attributes:
        problem, why, suggestion: the parts of the text.
        status: the code of the C API, RINGATTN_USAGE and others.

    Example:
        >>> try:
        ...     ringattn.zigzag([8], 0)
        ... except ringattn.Error as error:
        ...     print(f"{type(error).__name__}: {error}")
        UsageError: a world of 0 ranks is not possible (it has 1 to 1,048,576). Check it.
    """

    status = 7

    def __init__(self, problem: str, why: str = "", suggestion: str = "", text: str | None = None):
        whole = f"{problem} ({why}). {suggestion}" if why or suggestion else problem
        super().__init__(text or whole)
        self.problem, self.why, self.suggestion = problem, why, suggestion

    def __reduce__(self):
        return type(self), (self.problem, self.why, self.suggestion, str(self)), self.__dict__

    def with_names(self, names: dict[str, str]) -> "Error":
        """The same error with other argument names, for a caller that has these names."""
        return type(self)(*(renamed(part, names) for part in (self.problem, self.why, self.suggestion, str(self))))


class WrongResult(Error, AssertionError):
    """A result is wrong."""

    status = 1


class UsageError(Error, ValueError):
    """Arguments contradict themselves, each other, or those of other ranks."""

    status = 2


class CallError(UsageError, TypeError):
    """A function has no such argument, or a required one is missing."""


class FileError(Error, OSError):
    """A file is missing, malformed or can't be written."""

    status = 3


class UnsupportedError(Error, NotImplementedError):
    """Not possible here: no kernel, no device, or a feature that ringattn lacks."""

    status = 4


class OutOfMemory(Error, MemoryError):
    """A budget or a device is too small."""

    status = 5


class PeerError(Error, ConnectionError):
    """Another rank failed, or a deadline passed."""

    status = 6


BY_STATUS = {
    kind.status: kind for kind in (WrongResult, UsageError, FileError, UnsupportedError, OutOfMemory, PeerError)
}


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern:
    """Matches names of arguments: before a verb, an index or a value, and in "overlaps NAME" and "Give NAME memory"."""
    words = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    verbs = "is|are|has|have|holds?|lies?|overlaps?|and|count|requires|to"
    before = rf"({words})(?= (?:{verbs})\b|\[\d+\]|=)"
    return re.compile(rf"(?<![\w.])(?:{before}|(?<=overlaps )({words})\b|(?<=Give )({words})(?= memory\b))")


def renamed(text: str, names: dict[str, str]) -> str:
    return _pattern(tuple(names)).sub(lambda found: names[found[0]], text)


def called_by(names: dict[str, str], function, *arguments, **named):
    """Calls function(…); errors use the caller's names of the arguments."""
    torch = loaded_torch()
    if torch is not None and torch.compiler.is_compiling():
        return function(*arguments, **named)
    try:
        return function(*arguments, **named)
    except Error as error:
        raise error.with_names(names) from None


# Python names of the members of the library's structs, by op.
_MEMBERS = {
    "decode": {"k": "k_cache", "v": "v_cache"},
    "ssm": {"a": "A", "b": "B", "c": "C", "d": "D", "slots": "state_batch_indices"},
    "linear_attention": {"slots": "state_batch_indices"},
    "gated_delta": {"slots": "state_batch_indices"},
    "reshard": {"y": "out"},
    "causal_conv1d": {"slots": "conv_state_indices", "initial_halos": "initial_states", "final_halos": "conv_state"},
}
# The library's words for C and C++ callers (struct members, options, functions) and the names in Python.
_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bRows follow \w+::layout\(\)", "Rows follow the layout"),
        (r"\bDecode::owned\(\)", "ringattn.decode_partition()"),
        (r"\b\w+Spec and \w+Job say what there is", "Its arguments say what there is"),
        (r"ringattn's (info|plan|run|verify|bench|compress|quantize) with (\w+)", r"`ringattn \1 --\2`"),
        (r"ringattn's (info|plan|run|verify|bench|compress|quantize)", r"`ringattn \1`"),
        (r"\bringattn_(attention|decode)\b", r"ringattn.\1()"),
        (r"\bringattn_\w+::(\w+)", r"\1"),
        (r"\bLinearOutput::kReplicated\b", 'output="replicated"'),
        (r"\bLinearOutput::kShard\b", 'output="shard"'),
        (r"\b([A-Z]\w*)::(\w+\(\))", r"\1.\2"),
        (r"\b[A-Z]\w*::(\w+)", r"\1"),
        (r"\btimeout_seconds\b", "timeout"),
        # A decode step: names of the caller's arguments, not of the prepared object's.
        (r"Check the lengths, or prepare for longer sequences\.",
         "Check lengths and max_keys; where the cache has pages, pass its block_table."),
        (r"Each sequence has a page of its own\.", "Without a block_table each sequence has a page of its own."),
        # The result of a scan and of a convolution, which callers pass as `out`, as in attention.
        (r"\by (?=overlaps |is fp|is bf|has |holds )", "out "),
        (r"\b(of|Give) y (?=has |memory )", r"\1 out "),
    )
]


def in_python(text: str, op: str = "") -> str:
    if op in _MEMBERS:
        text = renamed(text, _MEMBERS[op])
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return text


# Maximum length of the error text that other ranks get.
_MAX_ERROR_TEXT = 1000


def told_to_peers(error: BaseException) -> bytes:
    """An error's text for the library. Other ranks must learn of every failure, so neither odd characters nor a __str__ that
    raises may prevent it."""
    try:
        text = str(error) or type(error).__name__
    except Exception:  # noqa: BLE001, of the caller's class
        text = type(error).__name__
    if len(text) > _MAX_ERROR_TEXT:
        text = text[:_MAX_ERROR_TEXT] + "…"
    text = "".join(c if c.isprintable() or c == " " else " " for c in text)
    return text.encode(errors="replace")


def refuse(problem: str, why: str, suggestion: str) -> NoReturn:
    raise UsageError(problem, why, suggestion)


def unsupported(problem: str, why: str, suggestion: str) -> NoReturn:
    raise UnsupportedError(problem, why, suggestion)
