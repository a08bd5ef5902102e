# SPDX-License-Identifier: Apache-2.0
"""client_test.py LIBRARY HEADERS CLIENT NEXT_CLIENT [MPIEXEC MPI_CLIENT]

The C interface as programs see it that were compiled with its header and with a later one, and the symbols that the library
exports."""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

LIBRARY, HEADERS, CLIENT, NEXT = map(pathlib.Path, sys.argv[1:5])
MPI = sys.argv[5:7]
FIRST_ABI = 6  # names before it were different, and never released
ABI = int(re.search(r"#define RINGATTN_ABI (\d+)", (HEADERS / "ringattn.h").read_text())[1])


def call(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout.strip()


def text_of(folder):
    """What the headers of a folder say, without comments, in lines of any length."""
    text = "".join(header.read_text() for header in sorted(folder.glob("*.h")))
    return re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def declared_in(folder):
    """Of each function that the headers of a folder declare, its parameters; whether they are const is no caller's affair."""
    return dict(re.findall(r"\b(ringattn_\w+)\(([^()]*)\);", text_of(folder).replace("const ", "")))


def structs_in(folder):
    """Of each struct its members, in order."""
    found = re.findall(r"typedef struct ringattn_\w+ \{(.*?)\} (ringattn_\w+);", text_of(folder))
    return {name: [member.strip() for member in members.split(";")[:-1]] for members, name in found}



class Clients(unittest.TestCase):
    def test_a_client_gets_bits(self):
        code, bits = call(CLIENT)
        self.assertEqual(code, 0, bits)
        self.assertRegex(bits, "^[0-9a-f]{16}$")

    def test_ranks_of_one_process_give_the_same_bits(self):
        alone = call(CLIENT)
        for ranks in ("1", "3", "4"):
            self.assertEqual(call(CLIENT, "threads", ranks), alone)

    @unittest.skipUnless(MPI, "needs MPI")
    def test_ranks_of_mpi_give_the_same_bits(self):
        for ranks in ("1", "3"):
            self.assertEqual(call(MPI[0], "-np", ranks, "--oversubscribe", "--bind-to", "none", MPI[1]), call(CLIENT))

    def test_newer_headers_are_refused_with_the_reason(self):
        code, said = call(NEXT)
        self.assertEqual(code, 2)
        self.assertRegex(said, r"^world: 2: ringattn_world_options has \d+ bytes \(.* newer header\)\. Load a newer")
        # A later interface whose struct is as large as this one's.
        code, said = call(CLIENT, "abi", str(ABI + 1))
        self.assertEqual(code, 2)
        self.assertIn(f"world: 2: the program wants interface {ABI + 1} of ringattn", said)
        self.assertIn(f"serves {FIRST_ABI} to {ABI}", said)
        for earlier in ("0", str(FIRST_ABI - 1)):
            self.assertEqual(call(CLIENT, "abi", earlier)[0], 2)


class Symbols(unittest.TestCase):
    def exported(self):
        if not shutil.which("nm"):
            self.skipTest("needs nm")
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
        ).stdout
        # The version's node has a symbol, too, of type A.
        return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.split()[1] != "A"}

    def test_the_library_exports_what_the_header_declares_and_nothing_else(self):
        declared = set(declared_in(HEADERS))
        self.assertGreater(len(declared), 40)
        self.assertEqual(self.exported(), declared)


class Headers(unittest.TestCase):
    def test_the_sizes_of_all_structs_are_tested(self):
        tested = (pathlib.Path(__file__).parent / "sizes_test.cpp").read_text()
        sized = {name for name, members in structs_in(HEADERS).items() if members[0] == "uint64_t size"}
        self.assertGreater(len(sized), 20)
        self.assertEqual({name for name in sized if f'"{name}"' not in tested}, set())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
