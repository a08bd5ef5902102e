# SPDX-License-Identifier: Apache-2.0
"""client_test.py LIBRARY HEADERS FIRST_CLIENT CLIENT NEXT_CLIENT [MPIEXEC MPI_CLIENT]

The C interface as programs see it that were compiled with its first header, with this one, and with one to come; and what the
library exports."""

import pathlib
import re
import shutil
import subprocess
import sys
import unittest

LIBRARY, HEADERS, FIRST, CLIENT, NEXT = map(pathlib.Path, sys.argv[1:6])
MPI = sys.argv[6:8]
ABI = int(re.search(r"#define RINGATTN_ABI (\d+)", (HEADERS / "ringattn.h").read_text())[1])


def call(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout.strip()


def declared_in(folder):
    """The functions that the headers of a folder declare."""
    text = "".join(header.read_text() for header in folder.glob("*.h"))
    return set(re.findall(r"\b(ringattn_\w+)\(", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)))


class Clients(unittest.TestCase):
    def test_old_headers_are_served_with_the_same_bits(self):
        code, bits = call(CLIENT)
        self.assertEqual(code, 0, bits)
        self.assertRegex(bits, "^[0-9a-f]{16}$")
        self.assertEqual(call(FIRST), (0, bits))

    def test_ranks_of_one_process_give_the_same_bits(self):
        alone = call(CLIENT)
        for ranks in ("1", "3", "4"):
            self.assertEqual(call(CLIENT, "threads", ranks), alone)
        self.assertEqual(call(FIRST, "threads", "2"), alone)

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
        self.assertIn(f"serves 1 to {ABI}", said)
        self.assertEqual(call(CLIENT, "abi", "0")[0], 2)


class Symbols(unittest.TestCase):
    def exported(self):
        if not shutil.which("nm"):
            self.skipTest("needs nm")
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True
        ).stdout
        # Of the version's node there is a symbol, too.
        return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.split()[1] != "A"}

    def test_the_library_exports_what_the_header_declares_and_nothing_else(self):
        declared = declared_in(HEADERS)
        self.assertGreater(len(declared), 40)
        self.assertEqual(self.exported(), declared)

    def test_nothing_of_the_first_header_is_missing(self):
        declared = declared_in(pathlib.Path(__file__).parent / "headers/1")
        self.assertGreater(len(declared), 15)
        self.assertLessEqual(declared, self.exported())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
