# SPDX-License-Identifier: Apache-2.0
"""Names of ringattn's calls in torch.profiler, while RINGATTN_RANGES is 1 in the environment. Otherwise functions stay as they
are, so that calls do nothing for it."""

import functools
import os
from collections.abc import Callable

from ._loaded_torch import loaded_torch

_ENABLED = os.environ.get("RINGATTN_RANGES") == "1"


def ranged(function: Callable, name: str) -> Callable:
    """The function, which is in the profiler's range ringattn.<name> while it runs, if ranges are on."""
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
