#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The house's rules that a compiler does not enforce: which folder includes which, which files see a vendor's header,
file lengths, licence lines, formatting, the parts of messages, paths in committed results. Prints each breach as
path:line: rule; exits 1 if there is one, 77 (skipped) only where git can't list the files."""
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A folder of src/ and the folders whose headers it may include.
LAYERS = {
    "base": {"base"},
    "comm": {"base", "comm"},
    "kernels": {"base", "kernels"},
    "attention": {"base", "comm", "kernels", "attention"},
    "launch": {"base", "comm", "kernels", "attention", "launch"},
}

# A vendor's header and the files that may include it.
VENDORS = {
    r"mpi\.h": r"src/comm/mpi[^/]*|tests/.*mpi.*|tests/readme/.*",
    r"nccl\.h": r"src/comm/nccl[^/]*",
    r"cuda.*": r"src/kernels/.*|src/comm/(nccl[^/]*|p2p/.*)|src/base/.*",
    r"hwy/.*": r"src/kernels/cpu/.*|tests/kernels/.*",
    r"omp\.h": r"src/kernels/cpu/.*|src/kernels/synthetic.*|src/attention/check/accuracy.*",
    r"nlohmann/.*": r"src/attention/.*|launch/.*|tests/.*",
    r"toml\+\+/.*": r"src/attention/files/flat_toml[^/]*",
    r"CLI/.*": r"launch/.*",
    r"xxhash\.h": r"src/attention/.*|tests/attention/.*",
}

MAX_LINES = 450
MAX_COLUMNS = 130


def tracked_sources():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "launch", "tests", "bench"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listing
            if re.search(r"\.(c|cpp|cu|h|hpp|cuh|py|sh)$", name) and (ROOT / name).exists()]


def arguments_at(text, start):
    """The arguments of the call whose first argument starts at `start`."""
    depth, begin, arguments = 0, start, []
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|[()\[\]{},]', text[start:]):
        if token[0] in ("(", "[", "{"):
            depth += 1
        elif token[0] in (")", "]", "}"):
            depth -= 1
        if depth < 0 or (depth == 0 and token[0] == ","):
            arguments.append(text[begin:start + token.start()].strip())
            begin = start + token.end()
        if depth < 0:
            break
    return arguments


def short_messages(text):
    """Calls of fail() that leave a part of "problem (why). suggestion." out; a bug need not suggest anything."""
    for call in re.finditer(r"(?<![\w.>])fail\(", text):
        arguments = arguments_at(text, call.end())
        whole = len(arguments) == 4 and not {"{}", '""'} & set(arguments)
        if not whole and "kInternal" not in arguments[0]:
            yield text.count("\n", 0, call.start()) + 1, "a message has all its parts: problem (why). suggestion."


def breaches_of(path):
    name = path.relative_to(ROOT).as_posix()
    lines = path.read_text().splitlines()
    if name.startswith(("src/", "launch/")) and path.suffix != ".sh":
        yield from short_messages("\n".join(lines))
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:3]):
        yield 1, "the first lines name the licence (SPDX-License-Identifier: Apache-2.0)"
    if len(lines) > MAX_LINES:
        yield len(lines), f"a file has at most {MAX_LINES} lines: this is two files"
    folder = name.split("/")[1] if name.startswith("src/") else name.split("/")[0]
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS and path.suffix in {".py", ".sh"}:  # clang-format knows about the others
            yield number, f"a line has at most {MAX_COLUMNS} columns"
        include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not include:
            continue
        header = include.group(2)
        if include.group(1) == '"' and folder in LAYERS:
            target = header.split("/")[0]
            if "/" in header and target not in LAYERS[folder] and "hwy/" not in header:
                yield number, f"{folder} does not include {target}"
        for vendor, allowed in VENDORS.items():
            if re.fullmatch(vendor, header) and not re.fullmatch(allowed, name):
                yield number, f"only {allowed} sees {header}"


def format_breaches(paths):
    formatter = shutil.which("clang-format-14") or shutil.which("clang-format")
    if not formatter:
        return
    version = subprocess.run([formatter, "--version"], capture_output=True, text=True, check=True).stdout
    if "version 14." not in version:
        return  # other versions lay lines out differently
    for path in paths:
        if path.suffix in {".cpp", ".hpp", ".cu", ".cuh"}:
            done = subprocess.run([formatter, "--dry-run", "--Werror", str(path)], cwd=ROOT, capture_output=True)
            if done.returncode:
                yield path, "clang-format -i would change it"


def result_breaches():
    """Committed figures tell a command that works in any checkout, not where things lay on one machine."""
    for path in sorted((ROOT / "bench" / "results").rglob("*.json*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r'"/[A-Za-z0-9_.-]', line):
                yield path, number, "a result names no absolute path"


def main():
    try:
        paths = tracked_sources()
    except (OSError, subprocess.CalledProcessError):
        print("skipped: needs git to list the sources")
        return 77
    found = [f"{path.relative_to(ROOT)}:{number}: {rule}" for path in paths for number, rule in breaches_of(path)]
    found += [f"{path.relative_to(ROOT)}:1: {rule}" for path, rule in format_breaches(paths)]
    found += [f"{path.relative_to(ROOT)}:{number}: {rule}" for path, number, rule in result_breaches()]
    print("\n".join(found) if found else f"{len(paths)} files keep the rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
