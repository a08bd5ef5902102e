# SPDX-License-Identifier: Apache-2.0
"""Goldens: the bits of arrays, kept in a small JSON file, so that a project's tests notice the first change of them.

    goldens = ringattn.goldens.Goldens("goldens/prefill.json", record=False)
    goldens.check("layer 0", out=out, lse=lse)

Bits are those of one library, kernel and kind of machine: a file has a section for each, and a machine without one is told to
record. Tests get one by the pytest fixture ringattn_goldens (ringattn/pytest_plugin.py)."""

import base64
import hashlib
import json
import os
import pathlib
import zlib

import numpy as np

from ._abi import lib
from ._attention import Attention
from ._errors import FileError, UnsupportedError, WrongResult
from ._job import c_spec
from .testing import raw_bytes
from .worlds import self_world


def this_machine(device: tuple[int, int] = (1, 0)) -> str:
    """What bits are a function of, beside the job: version, kernel, device model and instruction set."""
    like = np.empty((1, 1, 64), "float32")
    smallest = Attention(self_world(device), c_spec(like, 1, 1, 64, 64, (0, 0, 0), None, 0.0, False), [1])
    return f"ringattn {lib.version().decode()}, {smallest.kernel}, {smallest.machine}"


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
    """A file of goldens. With record=True what is checked is written into this machine's section instead."""

    def __init__(self, path, record: bool = False, device: tuple[int, int] = (1, 0)):
        self.path = pathlib.Path(path)
        self.record = record
        self.machine = this_machine(device)

    def _read(self) -> dict:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise FileError(f"{self.path} is no file of goldens", str(error), "Record it anew.") from error

    def check(self, name: str, **arrays) -> None:
        """Compares arrays, NumPy's or PyTorch's, with what was recorded under these names. Raises WrongResult that names the
        first row that differs."""
        entries = {f"{name}: {array_name}": _entry(array) for array_name, array in arrays.items()}
        known = self._read()
        section = known.setdefault(self.machine, {})
        if self.record:
            section.update(entries)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            unfinished.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            unfinished.replace(self.path)
            return
        if not section:
            raise UnsupportedError(f"{self.path} has no goldens of this machine", f"it is {self.machine}; there are those of "
                                   f"{', '.join(sorted(set(known) - {self.machine})) or 'none'}",
                                   "Record here, too: pytest --ringattn-record.")  # fmt: skip
        for what, entry in entries.items():
            if what not in section:
                raise WrongResult(
                    f"{self.path} knows no {what!r}", "it was not recorded", "Record it: pytest --ringattn-record."
                )
            self._compare(what, section[what], entry)

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
