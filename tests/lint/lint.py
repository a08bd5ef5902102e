#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The project's rules that a compiler does not enforce: which folder includes which, which files see a vendor's header,
file lengths, licence lines, formatting, the parts and words of messages, paths in committed results. Prints each breach as
path:line: rule; exits 1 if there is one, 77 (skipped) only where git can't list the files."""
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A module of src/ (the folder that a file lies in, or the nearest one above it that is named here) and the modules
# whose headers it may include besides its own. Includes go one way: launch and c, ops, attention, then comm, kernels and
# io, then base.
ATTENTION = ["attention", "attention/ring", "attention/tokens"]
OPS = ["ops/common", "ops/attention_jobs", "ops/jobs"]
MODULES = {
    "base": [],
    "comm": ["base", "comm/p2p", "comm/tcp"],
    "comm/p2p": ["base", "comm"],
    "comm/tcp": ["base", "comm"],
    "kernels": ["base"],  # kernels/<op>: interface, kernel table and oracle of an op; kernels/common
    "kernels/cpu": ["base", "kernels"],  # kernels/<op>/cpu, and so on
    "kernels/cuda": ["base", "kernels"],
    "kernels/sm80": ["base", "kernels", "kernels/cuda"],
    "kernels/sm90": ["base", "kernels", "kernels/cuda"],
    "io": ["base"],
    "attention/tokens": ["base", "comm", "kernels"],
    "attention/ring": ["base", "comm", "kernels", "io", "attention/tokens"],
    "attention": ["base", "comm", "kernels", "io", *ATTENTION],  # the ring runtime that the ops share
    # ops/<op>: an op, its plan, its job and its row of the table. What ops share is in three layers.
    "ops": ["base", "comm", "kernels", "io", *ATTENTION, *OPS],
    "ops/common": ["base", "comm", "kernels", "io", *ATTENTION],  # knows no op
    "ops/attention_jobs": ["base", "comm", "kernels", "io", *ATTENTION, "ops", "ops/common"],
    "ops/jobs": ["base", "comm", "kernels", "io", *ATTENTION, "ops", "ops/common", "ops/attention_jobs"],
    "c": ["base", "comm", "comm/tcp", "kernels", "io", "ops", "ops/common", *ATTENTION],  # no jobs from files
    "launch": ["base", "comm", "kernels", "io", "ops", "ops/common", "ops/jobs", *ATTENTION],
}

# The tables that name every implementation, and so include them all.
TABLES = {
    f"src/kernels/{table}_table.cpp": [src_module for src_module in MODULES if src_module.startswith("kernels/")]
    for table in ("attention/attention", "attention_backward/attention_backward", "decode/decode", "gemm/batched_gemm",
                  "gemm/weight_gradient", "linear/linear", "rope/rope", "gated_delta/gated_delta",
                  "ssd_backward/ssd_backward", "ssm/ssm", "ssm/causal_conv1d")
}

# A vendor's header and the files that may include it.
VENDORS = {
    r"mpi\.h": r"src/comm/mpi[^/]*|tests/.*mpi.*",
    r"nccl\.h": r"src/comm/nccl[^/]*",
    r"cuda.*": r"src/kernels/.*|src/comm/(nccl[^/]*|p2p/.*)|src/base/.*|tests/support/far_pages[^/]*",
    r"hwy/.*": r"src/kernels/[a-z_]+/cpu/.*|src/kernels/quant/(quant|row_codec)_ops\.cpp|tests/kernels/.*",
    r"omp\.h": r"src/kernels/[a-z_]+/cpu/.*|src/kernels/common/synthetic.*|src/ops/attention_jobs/accuracy.*",
    r"nlohmann/.*": r"src/io/.*|launch/.*|tests/.*",
    r"toml\+\+/.*": r"src/io/flat_toml[^/]*",
    r"CLI/.*": r"launch/.*",
    r"openssl/.*": r"src/comm/tcp/mac\.cpp",
    r"xxhash\.h": r"src/(io|ops|attention)/.*|tests/ops/.*",
}

# Where a number of seconds becomes a deadline.
TIMEOUTS = ["src/comm/timeouts.hpp", "src/base/device_timeouts.hpp"]

# Words that the project no longer uses: a regular expression, the paths it is searched in, what to write instead.
RETIRED = [(re.compile(word), glob, better) for word, glob, better in
           (line.split("\t") for line in (ROOT / "tests/lint/retired.tsv").read_text(encoding="utf-8").splitlines()
            if line and not line.startswith("#"))]
# Committed results keep the names of their day; these files say what old names are called now.
KEEP_OLD_WORDS = ("tests/lint/retired.tsv", "docs/renamed.md", "bench/results/", "bench/aliases.py",
                  "tests/bench/lines/", "tests/lint/lint_test.py", "src/kernels/common/renamed_kernels.hpp")

MAX_LINES = 900
MAX_COLUMNS = 130


def tracked_sources():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "launch", "tests", "bench", "python"],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listing
            if re.search(r"\.(c|cpp|cu|h|hpp|cuh|py|sh)$", name) and (ROOT / name).exists()]


def tracked_pages():
    """What is no source but holds words: pages and lists of targets."""
    listing = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*CMakeLists.txt",
                              "*.cmake"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listing if (ROOT / name).exists()]


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


def module_of(folder):
    """The module that a folder ("kernels/attention/sm90") belongs to; None where it is in none."""
    folder = re.sub(r"^kernels/[a-z_]+/(cpu|cuda|sm80|sm90)(/.*)?$", r"kernels/\1", folder)
    while folder and folder not in MODULES:
        folder = folder.rpartition("/")[0]
    return folder or None


def include_breaches(name, text):
    folder = name.removeprefix("src/").rpartition("/")[0]
    src_module = module_of(folder) if name.startswith(("src/", "launch/")) else None
    for number, line in enumerate(text.splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if not include:
            continue
        header = include.group(2)
        target = module_of(header.rpartition("/")[0])
        if src_module and target not in (None, src_module, *MODULES[src_module], *TABLES.get(name, [])):
            yield number, f"{src_module} does not include {target}"
        if "./" in header or (include.group(1) == "<" and src_module and target):
            yield number, "a header of the house is included by its path from src/, in quotes"
        if header == "bit" and name.endswith((".cu", ".cuh")):
            yield number, "device code takes __ffs() and __clz(): nvcc makes constants of what <bit> counts"
        for vendor, allowed in VENDORS.items():
            if re.fullmatch(vendor, header) and not re.fullmatch(allowed, name):
                yield number, f"only {allowed} sees {header}"


def ops_by_name(name, text, ops):
    """Programs and lower layers that know an op: they iterate ops/op_table.hpp, and each op is in its own directory."""
    if name.startswith(("src/ops/", "src/c/", "python/", "tests/")) or name == "bench/layers_gpu.cpp":  # times one op
        return
    literal = "|".join(sorted(ops - {"attention"} if name.startswith("src/io/") else ops))  # a word of model configs
    named = re.compile(rf'[!=]= "({literal})"|"({literal})" [!=]=|\b(find_op|op_entry)\("|\bOp::k[A-Z]|\bop_name\(')
    for number, line in enumerate(text.splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*"ops/([a-z0-9_]+)/', line)
        if include and include.group(1) not in ("common", "jobs"):
            yield number, f"only ops/ knows the headers of {include.group(1)}: iterate op_table()"
        if found := named.search(line):
            yield number, f"only ops/ knows an op by its name, as in {found[0]}: iterate op_table()"


def op_names():
    """The names of the rows of ops/op_table.cpp, which each op's directory defines."""
    rows = set(re.findall(r"&(k\w+Op)\b", (ROOT / "src/ops/op_table.cpp").read_text()))
    texts = [entry.read_text() for entry in (ROOT / "src/ops").glob("*/*_entry.cpp")]
    defined = {row: name for text in texts for row, name in re.findall(r'(k\w+Op)\{\s*\.name = "(\w+)"', text)}
    assert rows == set(defined), f"rows without an entry, or entries without a row: {rows ^ set(defined)}"
    return set(defined.values())


def literals(text):
    """The string literals of C++ code, with the number of the line that each begins in. Comments hold none."""
    for token in re.finditer(r'//[^\n]*|/\*.*?\*/|\'(?:\\.|[^\'\\\n])\'|"(?:\\.|[^"\\\n])*"', text, re.DOTALL):
        if token[0].startswith('"'):
            yield text.count("\n", 0, token.start()) + 1, token[0]


def spelled_flags(text):
    """The library names settings and commands, base/message_template.hpp; how a program's user spells them it does not know."""
    for number, literal in literals(text):
        if re.search(r'--[a-z]|["\s]-[a-z](?=["\s])', literal):
            yield number, 'the library spells no flag: setting("name")'
        if re.search(r'^"ringattn [a-z]|`ringattn ', literal):
            yield number, 'the library spells no command: command("name")'


def unknown_settings(text, flags, commands):
    """Settings and commands in messages of the library that the program's user could not use."""
    for call in re.finditer(r'\b(setting|command)\("([^"]*)"(?:, "([^"]*)")?', text):
        kind, name, second = call.groups()
        named_flags = [name] if kind == "setting" else [second] if second else []
        number = text.count("\n", 0, call.start()) + 1
        if kind == "command" and name not in commands:
            yield number, f"{name} is no command of launch/commands.cpp"
        for flag in named_flags:
            if flag.replace("_", "-") not in flags:
                yield number, f"{flag} is no flag of launch/flags.cpp"


def table_names(path):
    """The names of the rows of a table in launch/: the first literal behind a brace that begins a line."""
    return set(re.findall(r'^    \{"([a-z-]+)"', (ROOT / path).read_text(), re.MULTILINE))


def own_settings():
    """The names of the settings that ops' entries define."""
    texts = [entry.read_text() for pattern in ("*/*_entry.cpp", "*/*_settings.hpp") for entry in (ROOT / "src/ops").glob(pattern)]
    return {name for text in texts for name in re.findall(r'\{\.name = "([a-z-]+)",\s*\.kind = SettingKind', text)}


def own_deadlines(name, text):
    """How long a wait may last is said in one place for waits for peers, and in one for those for the own device."""
    if name in TIMEOUTS:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bDeadline::after\(", line.partition("//")[0]):
            yield number, f"a wait's deadline comes from {' or '.join(TIMEOUTS)}"


def dropped_prefetches(name, text):
    """g++ 12 takes a function that only prefetches for one without effects, and drops its calls."""
    if not re.match(r"src/kernels/\w+/cpu/", name):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bvoid prefetch\w*\(", line.partition("//")[0]) and not re.search(r"always_inline|_INLINE\b", line):
            yield number, "a function that prefetches is always inlined"


def stray_test_support(name, text):
    """What tests share is in one namespace. (What GoogleTest prints a type with lies beside the type.)"""
    if not name.startswith("tests/") or not name.endswith(".hpp") or name.startswith("tests/package/consumer/"):
        return
    opened = list(re.finditer(r"^namespace (ringattn[\w:]*) \{\n(.*)", text, re.MULTILINE))
    strays = [text.count("\n", 0, one.start()) + 1 for one in opened
              if one[1] != "ringattn::testing" and not one[2].startswith("inline void PrintTo(")]
    if not strays and not any(one[1] == "ringattn::testing" for one in opened):
        strays = [1]
    for number in strays:
        yield number, "what tests share is in namespace ringattn::testing"


def length_breaches(name, text):
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield len(lines), f"a file has at most {MAX_LINES} lines: this is two files"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS and name.endswith((".py", ".sh")):  # clang-format knows about the others
            yield number, f"a line has at most {MAX_COLUMNS} columns"


def retired_words(name, text):
    if name.startswith(KEEP_OLD_WORDS):
        return
    for word, glob, better in RETIRED:
        if glob != "**" and not name.startswith(glob.removesuffix("**")):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = word.search(line)
            if found and "old name" not in line:
                yield number, f'retired: "{found[0].strip()}"; write {better}'


def names_with_retired_words():
    """The files that any of the expressions matches in. git finds them thirty times as fast as Python's re does. None where
    git has no PCRE: any file may be one."""
    words = [argument for word, _, _ in RETIRED for argument in ("-e", word.pattern)]
    done = subprocess.run(["git", "grep", "--untracked", "-zlP", *words], cwd=ROOT, capture_output=True, text=True)
    return set(done.stdout.split("\0")) if done.returncode in (0, 1) else None


def licence_breaches(text):
    if not any("SPDX-License-Identifier: Apache-2.0" in line for line in text.splitlines()[:3]):
        yield 1, "the first lines name the licence (SPDX-License-Identifier: Apache-2.0)"


def breaches_of(name, text, flags, commands, ops, with_retired_words=None):
    """All breaches of one file, as (line, rule)."""
    if name.startswith(("src/", "launch/")) and not name.endswith(".sh"):
        yield from short_messages(text)
    if name.startswith("src/"):
        yield from spelled_flags(text)
        yield from unknown_settings(text, flags, commands)
        yield from own_deadlines(name, text)
        yield from dropped_prefetches(name, text)
    if name.endswith((".cpp", ".hpp", ".cu", ".cuh")):
        yield from ops_by_name(name, text, ops)
    yield from stray_test_support(name, text)
    if with_retired_words is None or name in with_retired_words:
        yield from retired_words(name, text)
    yield from licence_breaches(text)
    yield from length_breaches(name, text)
    yield from include_breaches(name, text)


def format_breaches(paths):
    formatter = shutil.which("clang-format-14") or shutil.which("clang-format")
    if not formatter:
        return
    version = subprocess.run([formatter, "--version"], capture_output=True, text=True, check=True).stdout
    if "version 14." not in version:
        return  # other versions lay lines out differently
    def unchanged(some):
        return subprocess.run([formatter, "--dry-run", "--Werror", *map(str, some)], cwd=ROOT,
                              capture_output=True).returncode == 0

    sources = [path for path in paths if path.suffix in {".cpp", ".hpp", ".cu", ".cuh"}]
    for first in range(0, len(sources), 64):  # a process each would take most of the time
        some = sources[first:first + 64]
        if unchanged(some):
            continue
        for path in some:
            if not unchanged([path]):
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
    flags = table_names("launch/flags.cpp") | own_settings()
    commands, ops = table_names("launch/commands.cpp"), op_names()
    old = names_with_retired_words()
    found = []
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        found += [f"{name}:{number}: {rule}"
                  for number, rule in breaches_of(name, path.read_text(), flags, commands, ops, old)]
    for path in tracked_pages():
        name = path.relative_to(ROOT).as_posix()
        if old is not None and name not in old:
            continue
        found += [f"{name}:{number}: {rule}" for number, rule in retired_words(name, path.read_text(encoding="utf-8"))]
    found += [f"{path.relative_to(ROOT)}:1: {rule}" for path, rule in format_breaches(paths)]
    found += [f"{path.relative_to(ROOT)}:{number}: {rule}" for path, number, rule in result_breaches()]
    print("\n".join(found) if found else f"{len(paths)} files keep the rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
