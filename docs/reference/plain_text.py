# SPDX-License-Identifier: Apache-2.0
"""Plain text of docstrings and of comments in headers as reStructuredText, in which *, |, ` and a trailing _ are markup."""

import re
from collections.abc import Callable

_PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
_PAGE = re.compile(r"\bdocs/([a-z-]+)\.md")


def inline(text: str, link: Callable[[str], str | None] = lambda name: None) -> str:
    """One line. link: the markup of a call, "name()", or None."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    parts[::2] = [_prose(part, link) for part in parts[::2]]
    return "".join(parts)


def _prose(text: str, link) -> str:
    pieces, at = [], 0
    for found in re.finditer(rf"{_PAPER.pattern}|{_PAGE.pattern}|(?<![\w.])([\w.]+)\(\)", text):
        paper, page, name = found.groups()
        markup = f"`arXiv:{paper} <https://arxiv.org/abs/{paper}>`__" if paper else f":doc:`/{page}`" if page else link(name)
        if markup:
            pieces += [_escaped(text[at : found.start()]), markup]
            at = found.end()
    return "".join(pieces) + _escaped(text[at:])


def _escaped(text: str) -> str:
    return re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"([\\*|`])", r"\\\1", text))


def block(lines: list[str], link=lambda name: None, language: str = "python") -> list[str]:
    """Lines of a comment: paragraphs, lists of "- ", whose items go on with two spaces, and code, which is indented."""
    made: list[str] = []
    state = "text"
    for line in lines:
        if not line.strip():
            made.append("")
            continue
        after_gap = not made or not made[-1].strip()
        indent = len(line) - len(line.lstrip())
        if line.startswith("- "):
            kind = "item"
        elif state == "item" and indent == 2:
            kind = "item"
        elif state == "code" and indent or indent >= 2:
            kind = "code"
        else:
            kind = "text"
        if kind != state and not after_gap:
            made.append("")
        if kind == "code" and state != "code":
            made += [f".. code-block:: {language}", ""]
        made.append(f"   {line}" if kind == "code" else inline(line.strip() if kind == "text" else line, link))
        state = kind
    return made
