# SPDX-License-Identifier: Apache-2.0
"""The build id of the library that this process has loaded. It identifies the binary."""

import ctypes
import functools
import struct

from ._abi import lib

_NOTES, _BUILD_ID = 4, 3  # of ELF: PT_NOTE and NT_GNU_BUILD_ID


@functools.cache
def build_id() -> str:
    """The build id in hex. It is read from memory, where the library is mapped like its file: ELF header, segments, notes."""
    info = (ctypes.c_void_p * 4)()  # a Dl_info: the file's name and base address, and the same of the function
    address = ctypes.cast(lib.version, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(address, info):
        return ""
    begin = info[1]
    first, size, count = struct.unpack_from("<Q14xHH", ctypes.string_at(begin, 64), 32)
    for i in range(count):
        segment = ctypes.string_at(begin + first + i * size, size)
        kind, place, length = struct.unpack_from("<I12xQ8xQ", segment)
        if kind == _NOTES:
            found = _in_notes(ctypes.string_at(begin + place, length))
            if found:
                return found
    return ""


def _in_notes(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name, words, kind = struct.unpack_from("<III", notes, at)
        name_at, words_at = at + 12, at + 12 + (name + 3) // 4 * 4
        if kind == _BUILD_ID and notes[name_at : name_at + name] == b"GNU\0":
            return notes[words_at : words_at + words].hex()
        at = words_at + (words + 3) // 4 * 4
    return ""
