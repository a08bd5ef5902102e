# SPDX-License-Identifier: Apache-2.0
"""PyTorch where the caller has imported it: this package imports it only where it is needed."""

import sys


def _is_loaded() -> bool:
    return "torch" in sys.modules


# What torch.compiler.assume_constant_result() sets. Dynamo would otherwise wrap and guard every entry of sys.modules, which
# takes most of the time of tracing a call.
_is_loaded._dynamo_marked_constant = True


def loaded_torch():
    """The module, or None."""
    if not _is_loaded():
        return None
    import torch  # noqa: PLC0415, only where it is loaded

    return torch
