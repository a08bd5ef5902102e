# SPDX-License-Identifier: Apache-2.0
"""The SIMD target of the CPU kernels."""

import os

from ._abi import lib
from ._errors import refuse

__all__ = ["set_simd_target", "simd_target"]


def set_simd_target(name: str) -> None:
    """Restricts the CPU kernels of this process to a SIMD target, so that hosts of different kinds compute the same bits. The
    environment variable RINGATTN_SIMD_TARGET does the same, and this call replaces it.

    Args:
        name: "avx2", "avx512", "amx" (AVX-512 with AMX tiles for bf16), "sse4" or "neon", or "auto", the best that this
            processor has.

    Returns:
        None.

    Raises:
        UnsupportedError: the processor lacks the target.
        UsageError: there is no such name, or ops with another target exist, which is one for the process. Calls keep their
            ops for later calls, so set the target before the first one.

    Example:
        >>> ringattn.set_simd_target(ringattn.simd_target())
    """
    if not isinstance(name, str):
        refuse(f"name is {name!r}", "a SIMD target is a str", 'Give a name such as "avx2".')
    lib.set_simd_target(name.encode())


def simd_target() -> str:
    """The SIMD target that is set, by set_simd_target() or RINGATTN_SIMD_TARGET.

    Returns:
        "auto" by default.

    Raises:
        UnsupportedError: the environment names a target that the processor lacks.
        UsageError: the environment names none.

    Example:
        >>> ringattn.simd_target()
        'auto'
    """
    name = lib.simd_target()
    if name is None:
        lib.set_simd_target(os.environ.get("RINGATTN_SIMD_TARGET", "auto").encode())
    return name.decode()
