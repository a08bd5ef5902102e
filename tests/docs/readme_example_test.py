# SPDX-License-Identifier: Apache-2.0
"""The blocks of the README and of the pages run as they are printed there. Shell blocks print what they echo and the lines
that the page shows; they all run in one folder, one page after the other, so no page may use another one's file by
accident. Python blocks print what their print("...") says.
Usage: readme_example_test.py PROGRAM [LIBRARY]; exits 77 where NumPy or the safetensors library is missing. Without a
library, that of C, Python blocks are left out, and so are those that need a package that is not installed."""

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Page, heading, and the files that the commands leave.
EXAMPLES = [("docs/files.md", "## From a file to an answer", ["qkv", "qkv_four", "qkv_one"]),
            ("README.md", "## Two million tokens on all GPUs", []),
            ("docs/files.md", "## A paged cache", ["paged_cache", "paged_prefill", "paged_rows", "paged_step"]),
            ("docs/block-sparse.md", "## Block masks in files", ["sparse_file", "sparse_pattern", "sparse_qkv"]),
            ("docs/compression.md", "## A file", ["kv_int4", "kv_one", "kv_rows", "kv_three"]),
            ("docs/compression.md", "## A paged KV cache", ["kv_pages", "kv_pages_fp8"]),
            ("docs/mla.md", "## A layer from a file",
             ["mla_cache", "mla_four", "mla_layer", "mla_mpi", "mla_one", "mla_step"]),
            ("docs/mla.md", "## Absorbed queries and latent outputs", ["mla_absorbed", "mla_latent"]),
            ("docs/ssm.md", "## A layer from a file",
             ["ssm_layer", "ssm_next", "ssm_one", "ssm_step", "ssm_two"])]  # fmt: skip
PYTHON_PAGES = ["README.md", "docs/batch-invariance.md"]  # the others' blocks: tests/python/docs_test.py
PACKAGES = ["numpy", "torch", "transformers"]
# mpirun's word that a container's only user may call it, with more ranks than there are cores; and no GPU, which two
# processes could not share.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip


def block(text: str, language: str) -> str:
    """The first one of its language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"there is no block of {language} in:\n{text}"
    return found[1]


def runnable(script: str, program: pathlib.Path) -> str:
    """As in the checkout, where launch/ and bench/ are; and where there is no MPI, ranks are threads."""
    script = script.replace("bench/results/", f"{shlex.quote(str(ROOT))}/bench/results/")
    words = [program, "info", "--json", "-"]
    about = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    if any(row["name"] == "mpi" for row in about["transports"]) and shutil.which("mpirun"):
        return script.replace("launch/ringattn-mpirun", shlex.quote(str(ROOT / "launch/ringattn-mpirun")))
    return re.sub(r"launch/ringattn-mpirun -np (\d+) (\w+)", r"ringattn \2 --ranks \1", script)


def run_example(section: str, folder: str, program: pathlib.Path, expected: list[str]) -> None:
    """Runs the section's commands, which add the expected files to the folder."""
    path = os.pathsep.join([str(program.parent), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    script = runnable(block(section, "bash"), program)
    environment = {**os.environ, **(MPI if "mpirun" in script else {}), "PATH": path}
    before = set(os.listdir(folder))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=folder, text=True,
                          capture_output=True, env=environment)  # fmt: skip
    files = sorted(set(os.listdir(folder)) - before)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert files == [f"{name}.safetensors" for name in expected], files
    for line in re.findall(r'&& echo "([^"]+)"', script):
        assert line in said, f"{line!r} is not printed:\n{done.stdout}"
    for line in block(section, "text").splitlines() if "\n```text\n" in section else []:
        assert line in said, f"{line!r} is not printed, or not there:\n{done.stdout}"
        said = said[said.index(line) + 1 :]  # in this order, with others between


def run_printing(file: pathlib.Path, said: pathlib.Path) -> None:
    with said.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(file.parent)
    sys.argv = [str(file)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_under_torchrun(file: pathlib.Path, said: pathlib.Path) -> None:
    """What `torchrun --nproc-per-node 2` does, with ranks that are forked from this process. (tests/python/worlds_test.py runs
    torchrun itself.)"""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="readme", rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork")  # fmt: skip
    elastic_launch(config, run_printing)(file, said)


def run_forked(file: pathlib.Path, run=run_printing) -> tuple[int, str]:
    """The exit code of a Python program and what it prints: in a process that has imported PACKAGES, which takes longer than
    the blocks do, and nothing of ringattn's."""
    said = file.with_suffix(".said")
    child = multiprocessing.get_context("fork").Process(target=run, args=(file, said))
    child.start()
    child.join()
    return child.exitcode, said.read_text(encoding="utf-8")


def run_python_blocks(page: str, folder: str) -> int:
    """Runs the page's Python blocks, those over torch.distributed under torchrun; returns how many."""
    count = 0
    text = (ROOT / page).read_text(encoding="utf-8")
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        imported = [name for name in PACKAGES if re.search(rf"^import .*\b{name}\b", code, re.MULTILINE)]
        if missing := [name for name in imported if importlib.util.find_spec(name) is None]:
            print(f"left out a block of {page}: needs {', '.join(missing)}")
            continue
        file = pathlib.Path(folder, f"block_{count}.py")
        file.write_text(code, encoding="utf-8")
        status, said = run_forked(file, run_under_torchrun if "torch.distributed" in code else run_printing)
        assert status == 0, f"{page}:\n{code}\n{said}"
        for line in re.findall(r'^print\("([^"]+)"\)$', code, re.MULTILINE):
            assert line in said.splitlines(), f"{line!r} is not printed:\n{said}"
        count += 1
    return count


def main() -> int:
    for library in ("numpy", "safetensors"):
        if importlib.util.find_spec(library) is None:
            print(f"skipped: needs {library}")
            return 77
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        for page, heading, expected in EXAMPLES:
            section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition("\n## ")[0]
            run_example(section, folder, program, expected)
    if len(sys.argv) > 2:
        os.environ |= {"RINGATTN_LIBRARY": str(pathlib.Path(sys.argv[2]).resolve()), "PYTHONPATH": str(ROOT / "python"),
                       "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
        sys.path.insert(0, str(ROOT / "python"))
        for name in [*PACKAGES, "torch._dynamo", "torch.distributed.run"]:
            with contextlib.suppress(ImportError):  # blocks that need it are left out
                importlib.import_module(name)
        with tempfile.TemporaryDirectory() as folder:
            for page in PYTHON_PAGES:
                print(f"{page}: {run_python_blocks(page, folder)} blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
