# SPDX-License-Identifier: Apache-2.0
"""structs_test.py HEADERS: the structs in ctypes lie in memory as the header's do, by the C compiler's word."""

import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

from ringattn import _abi, _structs

HEADERS = pathlib.Path(sys.argv.pop(1))
TEXT = "".join(header.read_text() for header in HEADERS.glob("*.h"))
STRUCTS = {name: kind for name, kind in vars(_structs).items() if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
           and name not in ("DLTensor", "DLDataType", "Sized", "Structure")}  # fmt: skip


class Structs(unittest.TestCase):
    def test_every_struct_of_the_header_is_there(self):
        named = set(re.findall(r"\n} ringattn_(\w+);", TEXT))
        self.assertEqual(named, {name.lower() for name in STRUCTS})
        self.assertEqual(int(re.search(r"#define RINGATTN_ABI (\d+)", TEXT)[1]), _abi.ABI)

    def test_an_older_library_is_refused_whatever_it_lacks(self):
        for words, functions in (
            (f"too old (it serves interface {_abi.ABI - 1}, this package needs {_abi.ABI})",
             {"ringattn_abi": lambda: _abi.ABI - 1}),
            ("can't be used", {}),
            ("can't be used", {"ringattn_abi": lambda: _abi.ABI}),
        ):  # fmt: skip
            with mock.patch("ringattn._abi._open", return_value=types.SimpleNamespace(**functions)):
                with self.assertRaises(ImportError) as caught:
                    _abi._load()
            self.assertIn(words, str(caught.exception))

    def test_members_lie_where_the_compiler_puts_them(self):
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if not compiler:
            self.skipTest("needs a C compiler")
        wanted = [("DLTensor", "DLTensor", None), ("DLDataType", "DLDataType", None)]
        lines = []
        for name, kind in STRUCTS.items():
            tag = f"ringattn_{name.lower()}"
            wanted.append((name, tag, None))
            wanted += [(name, tag, member) for member, _ in kind._fields_]
        for _, tag, member in wanted:
            what = f"sizeof({tag})" if member is None else f"offsetof({tag}, {member})"
            lines.append(f'printf("%zu\\n", {what});')
        source = (
            f'#include <stdio.h>\n#include "{HEADERS}/ringattn.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
        )
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "offsets"
            subprocess.run([compiler, "-std=c11", "-x", "c", "-o", program, "-"], input=source, text=True, check=True)
            said = [
                int(line)
                for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
            ]
        for (name, _, member), place in zip(wanted, said, strict=True):
            kind = getattr(_structs, name)
            ours = ctypes.sizeof(kind) if member is None else getattr(kind, member).offset
            self.assertEqual(ours, place, f"{name}.{member}")

    def test_a_struct_has_no_other_members(self):
        for kind in STRUCTS.values():
            with self.assertRaises(AttributeError):  # else a call that sets a member the library lacks would do nothing
                kind().synchronous = 1

    def test_no_struct_ends_with_room_that_a_new_member_could_hide_in(self):
        for name, kind in STRUCTS.items():
            last, held = kind._fields_[-1]
            self.assertEqual(getattr(kind, last).offset + ctypes.sizeof(held), ctypes.sizeof(kind), name)


if __name__ == "__main__":
    unittest.main()
