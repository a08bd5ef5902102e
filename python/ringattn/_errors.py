# SPDX-License-Identifier: Apache-2.0
"""Failures. A message reads `problem (why). remedy.`, and its parts are members."""

from typing import NoReturn


class Error(Exception):
    """What a call of ringattn failed with."""

    status = 7

    def __init__(self, problem: str, why: str = "", remedy: str = "", text: str | None = None):
        super().__init__(text or f"{problem} ({why}). {remedy}")
        self.problem, self.why, self.remedy = problem, why, remedy


class WrongResult(Error, AssertionError):
    """A result is not what it should be."""

    status = 1


class UsageError(Error, ValueError):
    """Arguments contradict themselves, each other, or those of other ranks."""

    status = 2


class FileError(Error, OSError):
    """A file is missing, malformed or can't be written."""

    status = 3


class UnsupportedError(Error, NotImplementedError):
    """It can't be done here: no kernel, no device, or what ringattn doesn't compute."""

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


def refuse(problem: str, why: str, remedy: str) -> NoReturn:
    raise UsageError(problem, why, remedy)


def unsupported(problem: str, why: str, remedy: str) -> NoReturn:
    raise UnsupportedError(problem, why, remedy)
