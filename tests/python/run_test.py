# SPDX-License-Identifier: Apache-2.0
"""run_test.py TEST.py […]: runs a file of tests; 77 means skipped, with the reason on stdout."""

import importlib.util
import runpy
import sys

if importlib.util.find_spec("numpy") is None:
    print("skipped: needs numpy")
    sys.exit(77)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
