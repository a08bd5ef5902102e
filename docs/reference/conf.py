# SPDX-License-Identifier: Apache-2.0
"""Sphinx: the API reference and the guides of docs/. build.sh is the command."""

import inspect
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs/reference"), str(ROOT / "python")]

import plain_text
import ringattn
from ringattn import _job

project, author, copyright = "ringattn", "the ringattn authors", "the ringattn authors, Apache-2.0"
version = release = ringattn.__version__
extensions = ["headers", "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "reference/index"
exclude_patterns = ["examples", "pictures"]
suppress_warnings = ["misc.highlighting_failure"]  # blocks of the guides that leave something out

highlight_language = "none"  # of formulas; examples and other blocks name theirs
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"ringattn {version}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False

myst_heading_anchors = 4
myst_linkify_fuzzy_links = False

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_param = napoleon_use_rtype = napoleon_use_ivar = False
napoleon_custom_sections = [("Shapes", "params_style"), ("Raises", "params_style"), "Formula"]
python_use_unqualified_type_names = True
nitpicky = True
# Types of other libraries, and those of the library's own headers that no page lists.
nitpick_ignore_regex = [("c(pp)?:.*", ".*"), ("py:.*", r"(torch|numpy|collections|typing|enum|builtins)\..*"),
                        ("py:(class|exc)", "[A-Z][A-Za-z]*(Error|Exception)|NamedTuple|Exception|optional"),
                        ("py:class", r"_\w+\.\w+|ringattn\._\w+\.\w+")]  # fmt: skip


def python_link(name: str) -> str | None:
    """The markup of a public function, by its name in docstrings."""
    name = name.removeprefix("ringattn.")
    holder = ringattn
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return f":py:func:`{name}() <ringattn.{name}>`" if callable(holder) and not name.startswith("_") else None


def restructure(app, what, name, obj, options, lines: list[str]) -> None:
    """Plain text of a docstring: its examples, and blocks after "::", are left as they are."""
    if what == "module":
        lines[:] = plain_text.block(lines, python_link)
        return
    made, code = [], None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if code is not None and line.strip() and indent <= code:
            code = None
        is_code = code is not None or line.lstrip().startswith((">>>", "...")) or (made and made[-1].lstrip().startswith(">>>"))
        if is_code or re.match(r" +\*\*", line):
            made.append(line)
        elif line.endswith("::"):
            code = indent
            made.append(plain_text.inline(line[:-2], python_link) + "::")
        else:
            made.append(plain_text.inline(line, python_link))
    lines[:] = _with_returns(made)


def _with_returns(lines: list[str]) -> list[str]:
    """The section Returns as a field, because napoleon takes what stands before a colon in it for a type."""
    if "Returns:" not in lines:
        return lines
    begin = lines.index("Returns:")
    end = next((i for i in range(begin + 1, len(lines)) if lines[i].strip() and not lines[i].startswith(" ")), len(lines))
    text = [line[4:] for line in lines[begin + 1 : end]]
    return [*lines[:begin], f":returns: {text[0]}", *(f"   {line}" if line else "" for line in text[1:]), *lines[end:]]


def skipped(app, what, name, member, skip, options) -> bool | None:
    """Fields of results, which the class describes, and members of prepared objects that are no methods."""
    return None if inspect.isroutine(member) or inspect.isclass(member) or isinstance(member, property) else True


def guides(app, docname: str, source: list[str]) -> None:
    """Pages of Markdown outside of docs/ are files to download."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def signature(app, what, name, obj, options, arguments, returned):
    """Without the keywords of other libraries, and without the constructors of what functions make."""
    if what == "class" and isinstance(obj, type) and issubclass(obj, (_job.Prepared, ringattn.World, Exception)):
        return "", None
    return (arguments.replace(", **unknown", ""), returned) if arguments else None


def setup(app):
    app.connect("autodoc-process-docstring", restructure, priority=100)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skipped)
    app.connect("source-read", guides)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
