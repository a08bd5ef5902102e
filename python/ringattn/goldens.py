# SPDX-License-Identifier: Apache-2.0
"""Goldens: digests of arrays in a small JSON file, so that a project's tests notice the first change of bits.

    goldens = ringattn.goldens.Goldens("goldens/prefill.json", record=False)
    goldens.check("layer 0", out=out, lse=lse)

Bits depend on the build of the library and the type of device, so a file has a section for each. If there is none, the
error
says how to record it. Tests get a Goldens from the pytest fixture ringattn_goldens (ringattn/pytest_plugin.py)."""

import base64
import functools
import hashlib
import json
import os
import pathlib
import warnings
import zlib

import numpy as np

from . import _abi
from ._abi import lib
from ._attention import Attention
from ._build_id import build_id
from ._errors import Error, FileError, UnsupportedError, WrongResult, refuse
from ._job import c_spec
from ._tensors import device_of, is_torch
from .testing import raw_bytes
from .worlds import self_world

__all__ = ["Goldens", "this_machine"]


@functools.cache
def this_machine(device: tuple[int, int] = (_abi.CPU, 0)) -> str:
    """Describes everything that bits depend on besides the job, as in golden files of `ringattn verify`: version and build,
    kernel, and instruction set or GPU model and architecture. The kernel is the one for bf16 attention.

    Args:
        device: (type, index) as in DLPack: (1, 0) is the host, (2, i) GPU i.

    Returns:
        The name of a section of a golden file.

    Raises:
        UnsupportedError: the device does not exist.

    Example:
        >>> ringattn.goldens.this_machine().startswith(f"ringattn {ringattn.__version__}, build ")
        True
    """
    smallest = Attention(self_world(device), c_spec("bfloat16", 1, 1, 128, 128, (0, 0, 0), None, 0.0, False), [1])
    kind = "CPU" if device[0] == _abi.CPU else "GPU"
    build = build_id()[:16] or "without an id"
    return f"ringattn {lib.version().decode()}, build {build}, {kind}, {smallest.kernel}, {smallest.machine}"


def dl_device_of(device) -> tuple[int, int]:
    """"cpu", "cuda" or "cuda:1" as a DLPack pair; a pair is returned as it is."""
    if isinstance(device, tuple):
        return device
    kind, _, number = str(device).partition(":")
    if kind == "cuda" and (number.isdecimal() or str(device) == kind):
        return _abi.CUDA, int(number or 0)
    if str(device) != "cpu":
        refuse(f"device is {device!r}", 'bits are those of "cpu" or of a GPU such as "cuda:0"', "Name one of these.")
    return _abi.CPU, 0


def _entry(array) -> dict:
    raw = raw_bytes(array)
    rows = array.shape[0] if array.ndim else 1
    sums = np.array([zlib.crc32(row.tobytes()) for row in raw.reshape(rows, -1)] if raw.size else [], "<u4")
    return {
        "dtype": str(array.dtype).removeprefix("torch."),
        "shape": list(array.shape),
        "sha256": hashlib.sha256(raw.tobytes()).hexdigest(),
        "rows": base64.b64encode(sums.tobytes()).decode(),  # a CRC-32 of each, which names the first that differs
    }


class Goldens:
    """A golden file: digests of arrays, with a section for each build and type of device. The pytest fixture ringattn_goldens
    makes one for a module of tests (docs/python.md).

    Args:
        path: path of the JSON file.
        record: True writes the checked arrays into this machine's section instead of comparing them.
        device: the device that computed the arrays, e.g. "cuda:0" for host copies of GPU results. None: each array's own.
        missing: what to do if a golden is not recorded: "fail", or "record" it with a warning.

    Raises:
        UsageError: missing or device has another value.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "goldens.json")
        >>> ringattn.goldens.Goldens(path, record=True).check("layer 0", out=np.arange(3))
        >>> ringattn.goldens.Goldens(path).check("layer 0", out=np.arange(3))
    """

    def __init__(self, path, record: bool = False, device=None, missing: str = "fail"):
        self.path = pathlib.Path(path)
        self.record = record
        self.device = None if device is None else dl_device_of(device)
        self.missing = missing
        if missing not in ("fail", "record"):
            refuse(f"missing is {missing!r}", "goldens that are not there fail, or are recorded",
                   'Pass "fail" or "record".')  # fmt: skip

    def _read(self) -> dict:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise FileError(f"{self.path} is not a file of goldens", str(error), "Record it anew.") from error

    def check(self, name: str, **arrays) -> None:
        """Compares arrays with those recorded under these names.

        Args:
            name: name of the comparison.
            **arrays: NumPy arrays, or PyTorch tensors on any device, by name.

        Raises:
            WrongResult: a row differs (the error names the first one), or an array is not recorded.
            UnsupportedError: the file has no section for this machine.
            FileError: the file is not a golden file."""
        known = self._read()
        new: dict = {}
        for array_name, array in arrays.items():
            what, machine = f"{name}: {array_name}", self._machine_of(array_name, array)
            entry = _entry(array)
            golden = None if self.record else known.get(machine, {}).get(what)
            if golden is not None:
                self._compare(what, golden, entry)
            else:
                new.setdefault(machine, {})[what] = entry
        if not new:
            return
        if not self.record:
            self.lacks(self._missing(known, new))
        for machine, entries in new.items():
            known.setdefault(machine, {}).update(entries)
        self._write(known)

    def _machine_of(self, name: str, array) -> str:
        if not isinstance(array, np.ndarray) and not is_torch(array):
            refuse(f"{name} is {type(array).__name__}", "it should be a NumPy array or a PyTorch tensor", "Convert it.")
        own = device_of(array)  # refuses devices that ringattn doesn't support
        return this_machine(own if self.device is None else self.device)

    def _missing(self, known: dict, new: dict) -> Error:
        """The error for a missing section of this machine, or for the first missing golden."""
        record = "Record here, too: pytest --ringattn-record."
        machine, entries = next(iter(new.items()))
        if machine not in known:
            others = "; ".join(sorted(known)) or "none"
            return UnsupportedError(f"{self.path} has no goldens of this machine",
                                    f"it is {machine}; there are those of {others}", record)  # fmt: skip
        return WrongResult(f"{self.path} knows no {next(iter(entries))!r}", f"it was not recorded by {machine}", record)

    def lacks(self, error: Error) -> None:
        """Fails or warns, as `missing` says."""
        if self.missing == "fail":
            raise error
        warnings.warn(f"{error.problem} ({error.why}). They were recorded now.", stacklevel=3)

    def _write(self, known: dict) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        unfinished.replace(self.path)

    def _compare(self, what: str, golden: dict, now: dict) -> None:
        if golden == now:
            return
        for fact in ("dtype", "shape"):
            if golden[fact] != now[fact]:
                raise WrongResult(
                    f"{what} is {fact} {now[fact]}", f"the golden's is {golden[fact]}", "Compare results of one job."
                )
        before, after = (np.frombuffer(base64.b64decode(entry["rows"]), "<u4") for entry in (golden, now))
        different = np.flatnonzero(before != after)
        row = f"row {different[0]} is the first of {different.size} rows" if different.size else "a row"
        raise WrongResult(f"the bits of {what} have changed", f"{row} that differ from {self.path}",
                          "Record them anew if that was meant: pytest --ringattn-record.")  # fmt: skip
