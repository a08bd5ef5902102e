# SPDX-License-Identifier: Apache-2.0
"""Docstrings of all public functions and classes: they have all sections, name the arguments that there are, and their
examples run. The pages of docs/reference have each of them once, and each declaration of the C headers."""

import builtins
import dataclasses
import doctest
import functools
import importlib.util
import inspect
import pathlib
import re
import sys
import unittest

if any(importlib.util.find_spec(name) is None for name in ("torch", "safetensors", "transformers")):
    print("skipped: needs torch, safetensors and transformers")
    sys.exit(77)

import numpy
import torch

import ringattn
import ringattn.flash_attn
import ringattn.goldens
import ringattn.layouts
import ringattn.nn
import ringattn.quantized
import ringattn.ring_flash_attn
import ringattn.testing
import ringattn.transformers
from ringattn import _job

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs/reference"))
import headers

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
MODULES = (ringattn, ringattn.nn, ringattn.quantized, ringattn.testing, ringattn.goldens, ringattn.layouts, ringattn.flash_attn,
           ringattn.ring_flash_attn)  # fmt: skip
# Where there is nothing to compute.
WITHOUT_FORMULA = ("layouts", "worlds", "torch_worlds", "testing", "goldens", "transformers", "_transformers_paged",
                   "_batch_invariant", "_hf_adapter", "_reshard", "_simd_target")
NAMED_WITHOUT_FORMULA = ("decode_partition", "mla_decode_partition", "parallelize_")
SECTIONS = ("Args", "Shapes", "Attributes", "Returns", "Raises", "Formula", "Example")


def public():
    """(name, object) of each public function and class, once."""
    seen = set()
    modules = [(module, module.__all__) for module in MODULES]
    modules.append((ringattn.transformers, ("batch", "continuous_batching", "make_batch_invariant", "register")))
    for module, names in modules:
        for name in names:
            found = getattr(module, name)
            if not inspect.ismodule(found) and id(found) not in seen:
                seen.add(id(found))
                yield f"{module.__name__}.{name}", found


def sections(docstring: str) -> dict[str, list[str]]:
    """The lines of each section; "": what stands before the first one."""
    found, name = {"": []}, ""
    for line in docstring.splitlines():
        title = re.fullmatch(r"(\w+):", line)
        if title:
            name = title[1]
            assert name in SECTIONS and name not in found, f"section {name} is unknown, or there twice"
            found[name] = []
        else:
            found[name].append(line)
    return found


def entries(lines: list[str]) -> dict[str, str]:
    """The text of each name of a section, of which several may share one: "k, v: …"."""
    texts: list[str] = []
    for line in lines:
        if re.match(r"    \S", line):
            texts.append(line.strip())
        elif line.strip():
            texts[-1] += " " + line.strip()
    found: dict[str, str] = {}
    for text in texts:
        names, colon, meaning = text.partition(": ")
        assert colon, f"no name: {text}"
        for name in names.split(", "):
            assert name not in found, f"{name} is there twice"
            found[name] = meaning
    return found


def arguments(function) -> list[str]:
    """Names of the arguments as docstrings have them, without the keywords of other libraries."""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    return [marks.get(one.kind, "") + one.name for one in parameters if one.name not in ("self", "unknown")]


def is_made_by_calls(kind: type) -> bool:
    """True for classes whose constructor is no part of the public API, or is that of Exception."""
    return issubclass(kind, (_job.Prepared, ringattn.World, Exception))


class Docstrings(unittest.TestCase):
    def test_functions_have_all_sections(self):
        seen = 0
        for name, function in public():
            if inspect.isclass(function):
                continue
            seen += 1
            with self.subTest(name):
                found = sections(inspect.getdoc(function) or "")
                wanted = {"Returns", "Raises", "Example"} | ({"Args"} if arguments(function) else set())
                module = function.__module__.rpartition(".")[2]
                if module not in WITHOUT_FORMULA and function.__name__ not in NAMED_WITHOUT_FORMULA:
                    wanted.add("Formula")
                self.assertEqual(wanted - found.keys(), set())
                self.assertRegex(found[""][0], r"^\S.{10,}")
                for lines in found.values():
                    self.assertTrue("".join(lines).strip())
        self.assertGreater(seen, 70)

    def test_arguments_are_those_of_the_signature(self):
        for name, found in public():
            with self.subTest(name):
                parts = sections(inspect.getdoc(found) or "")
                named = entries(parts.get("Args", []))
                if not inspect.isclass(found):
                    self.assertEqual(sorted(named), sorted(arguments(found)))
                elif "Args" in parts:
                    self.assertEqual(sorted(named), sorted(arguments(found.__init__)))
                elif dataclasses.is_dataclass(found) or hasattr(found, "_fields"):
                    fields = getattr(found, "_fields", None) or [field.name for field in dataclasses.fields(found)]
                    self.assertEqual(sorted(entries(parts["Attributes"])), sorted(fields))
                else:
                    self.assertTrue(is_made_by_calls(found))
                self.assertLessEqual(set(entries(parts.get("Shapes", []))) - set(named), {"x", "weight", "scales", "zeros"})

    def test_errors_are_errors(self):
        for name, found in public():
            for errors in entries(sections(inspect.getdoc(found) or "").get("Raises", [])):
                with self.subTest(f"{name}: {errors}"):
                    kind = getattr(ringattn, errors, None) or getattr(builtins, errors, None)
                    self.assertTrue(isinstance(kind, type) and issubclass(kind, Exception))

    def test_classes_and_their_methods_say_what_they_are(self):
        for name, kind in public():
            if not inspect.isclass(kind):
                continue
            self.assertTrue((kind.__doc__ or "").strip(), name)
            own = (base for base in kind.__mro__ if base.__module__.startswith("ringattn"))
            for attribute, member in [pair for base in own for pair in vars(base).items()]:
                if attribute.startswith("_") or not (inspect.isroutine(member) or isinstance(member, property | classmethod)):
                    continue
                with self.subTest(f"{name}.{attribute}"):
                    found = sections(inspect.getdoc(getattr(kind, attribute)) or "")
                    self.assertTrue(found[""])
                    if "Args" in found:
                        self.assertEqual(sorted(entries(found["Args"])), sorted(arguments(getattr(kind, attribute))))

    def test_examples_run(self):
        finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
        names = {"np": numpy, "torch": torch, "ringattn": ringattn}
        classes = [(name, kind) for name, kind in public() if inspect.isclass(kind)]
        methods = [(f"{name}.{attribute}", getattr(kind, attribute)) for name, kind in classes for attribute in vars(kind)
                   if not attribute.startswith("_") and callable(getattr(kind, attribute))]  # fmt: skip
        for name, found in [*public(), *methods]:
            for example in finder.find(found, name, globs=dict(names)):
                with self.subTest(name):
                    said: list[str] = []
                    self.assertEqual(runner.run(example, out=said.append).failed, 0, "".join(said))


class Reference(unittest.TestCase):
    def test_pages_have_each_name_once(self):
        listed = []
        for page in REFERENCE.glob("*.rst"):
            module = "ringattn"
            for directive, name in re.findall(r"^\.\. (currentmodule|autofunction|autoclass):: (\S+)$", page.read_text(), re.M):
                if directive == "currentmodule":
                    module = name
                else:
                    listed.append(f"{module}.{name}")
        objects = {id(found): name for name, found in public()}
        named = [functools.reduce(getattr, name.split(".")[1:], ringattn) for name in listed]
        self.assertEqual(sorted(objects.get(id(found), name) for name, found in zip(listed, named)), sorted(objects.values()))

    def test_pages_have_the_headers(self):
        cpp, c = ((REFERENCE / page).read_text() for page in ("cpp.rst", "c.rst"))
        guide = (ROOT / "docs/cpp.md").read_text(encoding="utf-8")
        for found in re.findall(r"`(src/[^`]*\.hpp)`|#include \"([^\"]*)\"", guide):
            self.assertIn(f".. cpp-header:: {found[0] or 'src/' + found[1]}\n", cpp)
        for header in (ROOT / "src/c").glob("ringattn*.h"):
            self.assertIn(f".. c-header:: src/c/{header.name}\n", c)
            code = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
            functions = re.findall(r"(?<!\* )\b(ringattn_\w+)\(", code)
            listed = headers.names_of(headers.read(header)[1])
            self.assertEqual(set(functions) - set(listed), set())
            self.assertEqual([name for name in listed if name in functions and listed.count(name) > 1], [])


if __name__ == "__main__":
    unittest.main()
