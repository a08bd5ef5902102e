# SPDX-License-Identifier: Apache-2.0
"""docs/examples/goldens.yml is a workflow whose names lead somewhere, and its commands do what it says: the first run records,
the next one compares. What takes a runner minutes is left to this build: the library, and packages of the distribution.
Commands are run in the long suite alone (RINGATTN_TEST_LONG=1). Usage: goldens_workflow_test.py PROGRAM LIBRARY; exits 77 where
PyYAML is missing or PyPI gives no packages."""

import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / "docs/examples/goldens.yml"
# A test of the project whose workflow it is.
SUITE = """
import numpy, ringattn

def test_layer(ringattn_goldens):
    q = numpy.random.default_rng(1).standard_normal((50, 2, 64), dtype="float32")
    out, lse = ringattn.attention(q, q, q, mask=MASK)
    ringattn_goldens.check("layer", out=out, lse=lse)
"""
# Installs this build in place of one that cmake would make: cmake -S … -B …, cmake --build …, cmake --install … --prefix ….
CMAKE = """#!/bin/bash
set -eu
case $1 in
  -S) [[ -f $2/CMakeLists.txt && $3 == -B ]]; mkdir -p "$4"
      for option in "${@:5}"; do
        name=${option#-D}; name=${name%%=*}
        [[ $name == CMAKE_BUILD_TYPE ]] || grep -r "option($name\\|set($name" "$2/CMakeLists.txt" "$2/cmake" >/dev/null
      done ;;
  --build) [[ -d $2 ]] ;;
  --install) [[ -d $2 && $3 == --prefix ]]; mkdir -p "$4/bin"
             cp ROOT/launch/ringattn-goldens "$4/bin"; ln -s PROGRAM "$4/bin/ringattn" ;;
  *) exit 1 ;;
esac
"""
# The package without a library of its own.
PIP = """#!/bin/bash
if [[ $1 == wheel ]]; then set -- "$@" -C wheel.cmake=false; fi
exec "$(dirname "$0")/python" -m pip "$@"
"""


def skip(why: str):
    print(f"skipped: {why}")
    sys.exit(77)


if importlib.util.find_spec("yaml") is None:
    skip("needs PyYAML")

import yaml  # noqa: E402


def script(path: pathlib.Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def runner(folder: pathlib.Path, mask: str, program: str) -> dict[str, str]:
    """A runner that has checked out the project and ringattn; and its environment."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/test_layer.py").write_text(SUITE.replace("MASK", repr(mask)))
    checkout = folder / "ringattn"
    (checkout / "launch").mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name not in ("launch", "build", ".git"):
            (checkout / entry.name).symlink_to(entry)
    assert (ROOT / "launch/install-deps.sh").exists()
    script(checkout / "launch/install-deps.sh", "#!/bin/bash\n")
    tools = folder.parent / f"{folder.name}-tools"
    tools.mkdir()
    script(tools / "cmake", CMAKE.replace("ROOT", shlex.quote(str(ROOT))).replace("PROGRAM", shlex.quote(program)))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RINGATTN_PROGRAM")}
    return environment | {"PATH": f"{tools}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(tools / "outputs")}


def run(steps, folder: pathlib.Path, environment: dict[str, str], cached: bool) -> tuple[int, str]:
    """The exit code of the first step that fails, or 0; and all that the steps say."""
    said = ""
    for step in steps:
        if "run" not in step or (cached and "cache-hit != 'true'" in step.get("if", "")):
            continue
        done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=folder, env=environment, text=True, timeout=500,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        said += f"== {step['name']}\n{done.stdout}"
        if re.search("No matching distribution found|Failed to establish a new connection", done.stdout):
            skip("PyPI gives no packages")
        if done.returncode:
            return done.returncode, said
        if (folder / "venv/bin/pip").exists():
            script(folder / "venv/bin/pip", PIP)
    return 0, said


def check_names(workflow: dict, steps: list[dict]) -> None:
    """What it refers to is there: variables, steps, actions, and the version of the library."""
    ids = {step["id"] for step in steps if "id" in step}
    for step in steps:
        assert ("run" in step) != ("uses" in step), step
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "some/action@v1")), step
        for expression in [*re.findall(r"\$\{\{ *(.*?) *\}\}", str(step)), step.get("if", "")]:
            for kind, name in re.findall(r"\b(env|steps)\.([\w-]+)", expression):
                assert name in (workflow["env"] if kind == "env" else ids), f"{step} names {kind}.{name}"
    version = re.search(r"project\(ringattn VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert workflow["env"]["RINGATTN"] == f"v{version}", workflow["env"]


def main(program: str, library: str) -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    steps = job["steps"]
    check_names(workflow, steps)
    if os.environ.get("RINGATTN_TEST_LONG") != "1":
        return
    kept = [step["with"]["path"] for step in steps if "actions/cache" in step.get("uses", "")]
    assert len(kept) == 2, kept
    with tempfile.TemporaryDirectory() as place:
        for number, (mask, code, words) in enumerate((("causal", 0, "They were recorded now"), ("causal", 0, "1 passed"),
                                                      ("full", 1, "the bits of layer: out have changed"))):  # fmt: skip
            folder = pathlib.Path(place, str(number))
            environment = runner(folder, mask, program) | {name: str(value) for name, value in workflow["env"].items()}
            environment |= {"RINGATTN_LIBRARY": library, "PYTHONDONTWRITEBYTECODE": "1"}
            for path in kept if number else ():
                shutil.copytree(pathlib.Path(place, str(number - 1), path), folder / path, symlinks=True)
            left, said = run(steps, folder, environment, cached=number > 0)
            assert left == code and words in said, f"run {number} left with {left}, not {code} and {words!r}:\n{said}"
            assert number == 0 or "recorded now" not in said, said
            print(f"run {number} under a {mask} mask: {words}")


if __name__ == "__main__":
    main(*sys.argv[1:])
