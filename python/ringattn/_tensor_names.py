# SPDX-License-Identifier: Apache-2.0
"""Names that other libraries give tensors: aliases of this library's names, and names that are refused because the
tensor would change the result and is not supported. The table is the C library's,
src/io/known_names.cpp."""

import functools
import json
from typing import NamedTuple

from . import _abi


class Meaning(NamedTuple):
    role: str  # the name it is an alias of; empty: it is refused
    refused: str  # why
    suggestion: str
    unless: str  # a tensor together with which a file may have it; empty: none


@functools.cache
def known_names(op: str) -> dict[str, Meaning]:
    """The meaning of names for "attention", "decode", "mla", "mla_decode", "ssd", "selective_scan" or
    "causal_conv1d"."""
    return {
        one["name"]: Meaning(*(one.get(key, "") for key in Meaning._fields)) for one in _table() if op in one["ops"]
    }


@functools.cache
def _table() -> list[dict]:
    text = _abi.lib.tensor_names()
    if text is None:
        raise MemoryError("there is no memory for the table of tensor names")
    return json.loads(text)
