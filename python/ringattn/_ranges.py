# SPDX-License-Identifier: Apache-2.0
"""Names ringattn's calls in torch.profiler if RINGATTN_RANGES is 1 in the environment. Otherwise functions are not wrapped, so
calls do no extra work."""

import functools
import os
from collections.abc import Callable

from ._loaded_torch import loaded_torch

_ENABLED = os.environ.get("RINGATTN_RANGES") == "1"


def ranged(function: Callable, name: str) -> Callable:
    """If ranges are on, wraps the function so that it runs inside the profiler range ringattn.<name>."""
    if not _ENABLED:
        return function

    @functools.wraps(function)
    def call(*arguments, **named):
        torch = loaded_torch()
        if torch is None:
            return function(*arguments, **named)
        with torch.profiler.record_function(f"ringattn.{name}"):
            return function(*arguments, **named)

    return call
