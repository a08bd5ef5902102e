# SPDX-License-Identifier: Apache-2.0
"""The SIMD target of the CPU kernels."""

import os

from ._abi import lib
from ._arguments import as_text

__all__ = ["set_simd_target", "simd_target"]


def set_simd_target(name: str) -> None:
    """Sets the SIMD target of this process's CPU kernels, so that hosts of different kinds compute the same bits. The environment
    variable RINGATTN_SIMD_TARGET sets it, too; this call overrides it.

    Args:
        name: "amx" (AVX-512 with AMX tiles for bf16), "avx512", "avx2", "sse4", "neon", or "auto", the best target of the
            processor.

    Returns:
        None.

    Raises:
        UnsupportedError: the processor lacks the target.
        UsageError: there is no such target, or ops with another target exist. Calls keep their ops for later calls, so set the
            target before the first call.

    Example:
        >>> ringattn.set_simd_target(ringattn.simd_target())
    """
    lib.set_simd_target(as_text(name, "name"))


def simd_target() -> str:
    """The SIMD target that set_simd_target() or RINGATTN_SIMD_TARGET has set.

    Returns:
        "auto" by default.

    Raises:
        UnsupportedError: the environment names a target that the processor lacks.
        UsageError: the environment names an unknown target.

    Example:
        >>> ringattn.simd_target()
        'auto'
    """
    name = lib.simd_target()
    if name is None:
        lib.set_simd_target(os.environ.get("RINGATTN_SIMD_TARGET", "auto").encode())
    return name.decode()
