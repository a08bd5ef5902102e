# SPDX-License-Identifier: Apache-2.0
"""PyTorch, if the caller has imported it. This package imports PyTorch only where it is needed."""

import sys


def _is_loaded() -> bool:
    return "torch" in sys.modules


# The attribute that torch.compiler.assume_constant_result() sets. Otherwise Dynamo would wrap and guard all of sys.modules, which
# takes most of the time of tracing a call.
_is_loaded._dynamo_marked_constant = True


def loaded_torch():
    """The module, or None."""
    if not _is_loaded():
        return None
    import torch  # noqa: PLC0415, only where it is loaded

    return torch
