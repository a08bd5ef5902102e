# SPDX-License-Identifier: Apache-2.0
"""run_test.py TEST.py […]: runs a file of tests; 77 means skipped, with the reason on stdout.

run_test.py --together MODULE,… TEST.py … does so for each file, in a process of its own that has imported the modules
already: importing torch and transformers takes eight seconds. 77 means that every file was skipped.
"""

import contextlib
import importlib
import importlib.util
import os
import runpy
import sys
import time


def run(arguments):
    sys.argv = arguments
    runpy.run_path(sys.argv[0], run_name="__main__")


def compile_first_graph():
    """torch.compile imports and prepares for two seconds for a process's first graph, and for the first with gradients. No
    gradient is computed: it would start PyTorch's threads, and a process that has them can't be forked."""
    import torch

    with torch.inference_mode():
        torch.compile(torch.sin, fullgraph=True, backend="aot_eager")(torch.ones(8))
    torch.compiler.reset()
    importlib.import_module("torch._inductor.fx_passes.joint_graph")


def run_together(modules, files):
    for module in modules.split(","):
        with contextlib.suppress(ImportError):  # tests that need the module skip themselves
            importlib.import_module(module)
    if "torch._dynamo" in sys.modules:
        compile_first_graph()
    codes = []
    for file in files:
        print(f"=== {os.path.basename(file)}", flush=True)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            run([file])
            sys.exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(f"=== exit code {codes[-1]} after {time.monotonic() - began:.1f} s", flush=True)
    failed = [os.path.basename(file) for file, code in zip(files, codes) if code not in (0, 77)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    sys.exit(77 if all(code == 77 for code in codes) else 0)


if importlib.util.find_spec("numpy") is None:
    print("skipped: needs numpy")
    sys.exit(77)
if sys.argv[1] == "--together":
    run_together(sys.argv[2], sys.argv[3:])
else:
    run(sys.argv[1:])
