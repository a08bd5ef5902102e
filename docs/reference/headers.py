# SPDX-License-Identifier: Apache-2.0
"""Sphinx extension: `.. c-header:: src/c/ringattn.h` and `.. cpp-header:: src/…hpp` list a header's public declarations with the
comments before or behind them, in Sphinx's C or C++ domain. The headers have plain comments, of which doxygen would need a form
of its own. As a program, `headers.py FILE …` prints the declared names."""

import pathlib
import re
import sys
from dataclasses import dataclass, field

import plain_text

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclass
class Item:
    """A declaration, a heading or a paragraph."""

    kind: str  # Sphinx's directive, such as "function"; "text" or "heading"
    signatures: list[str] = field(default_factory=list)
    comment: list[str] = field(default_factory=list)
    members: list["Item"] = field(default_factory=list)


def _comment(lines: list[str]) -> list[str]:
    """The text of lines of // or of one /* */."""
    text = "\n".join(line.strip() for line in lines)
    if text.startswith("/*"):
        text = re.sub(r"\s*\*/$", "", re.sub(r"^/\*+ ?", "", text))
        return [re.sub(r"^\* ?", "", line) for line in text.split("\n")]
    return [re.sub(r"^// ?", "", line) for line in text.split("\n")]


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(("//", "/*"))


def _parts(line: str) -> tuple[str, str]:
    """Code and the comment behind it."""
    found = re.match(r"""((?:[^"/]|"(?:[^"\\]|\\.)*"|/(?![/*]))*)(//.*|/\*.*)?$""", line)
    return (found[1].rstrip(), found[2] or "") if found else (line, "")


def _statements(lines: list[str]):
    """(comment, statement) of a header's body: both lists of lines, the statement with comments inside it. A comment before an
    empty line has no statement, and a statement right after another one has an empty comment and the same group."""
    i, comment = 0, []
    while i < len(lines):
        line = lines[i]
        if not line.strip():
            if comment:
                yield comment, None
                comment = []
            yield [], None
            i += 1
        elif line.lstrip().startswith("#"):
            yield [], [line]
            i += 1
        elif _is_comment(line):
            first = i
            if line.lstrip().startswith("/*"):
                while "*/" not in lines[i]:
                    i += 1
                i += 1
            else:
                while i < len(lines) and lines[i].lstrip().startswith("//"):
                    i += 1
            if comment:
                yield comment, None
            comment = _comment(lines[first:i])
        else:
            statement, depth = [], 0
            while i < len(lines):
                code, behind = _parts(lines[i])
                statement.append(lines[i])
                depth += sum(code.count(c) for c in "{(") - sum(code.count(c) for c in "})")
                while behind.startswith("/*") and "*/" not in lines[i]:
                    i += 1
                    statement.append(lines[i])
                i += 1
                if depth == 0 and re.search(r"[;}:]$", code) and not code.startswith("template"):
                    break
            while i < len(lines) and re.match(r"\s{12,}//", lines[i]):  # the comment behind it goes on
                statement.append(lines[i])
                i += 1
            yield comment, statement
            comment = []


def _plain(statement: list[str]) -> tuple[str, list[str]]:
    """A statement on one line, and the comments in it."""
    text, comments, open_comment = [], [], False
    for line in statement:
        if open_comment:
            comments[-1] += "\n" + line
            open_comment = "*/" not in line
            continue
        code, behind = _parts(line)
        text.append(code.strip())
        if behind:
            joins = comments and behind.startswith("//") and not code.strip()
            comments[-1:] = [f"{comments[-1]}\n{behind}"] if joins else [*comments[-1:], behind]
            open_comment = behind.startswith("/*") and "*/" not in behind
    return re.sub(r"\s+", " ", " ".join(text)).strip(), [line for one in comments for line in _comment(one.split("\n"))]


def _is_function(code: str) -> bool:
    """A declaration with parentheses outside of template arguments and initializers, and no pointer to a function."""
    bare = re.sub(r"operator\S+?(?=\()", "operator", code)
    while (shorter := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = shorter
    return "(" in re.split(r"[={]", bare)[0] and not re.match(r"[\w:* ]+\(\*", bare)


def _without_body(code: str) -> str:
    """A function without its body and its initializers."""
    depth = 0
    for i, c in enumerate(code):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i > 0 and (c == "{" or (c == ":" and code[i - 1] == " " and ")" in code[:i])):
            return code[:i].strip()
    return re.sub(r" = (default|0)$", "", code.rstrip(" ;"))


def _members(statement: list[str], c: bool, public: bool) -> list[Item]:
    body = "\n".join(statement)
    inside = body[body.index("{") + 1 : body.rindex("}")].split("\n")
    items, visible = [], public
    kept: list[str] = []
    for line in inside:
        access = re.match(r"\s*(public|private|protected):", line)
        if access:
            visible = access[1] == "public"
        elif visible:
            kept.append(line)
    for item in declarations(kept, c, True):
        if item.kind != "text":
            items.append(item)
    return items


def _enumerators(statement: list[str]) -> list[Item]:
    body = "\n".join(statement)
    items: list[Item] = []
    comment: list[str] = []
    for line in body[body.index("{") + 1 : body.rindex("}")].split("\n"):
        code, behind = _parts(line)
        for name in re.findall(r"(\w+(?: = [^,]+)?)(?:,|$)", code.strip()):
            items.append(Item("enumerator", [name], comment))
            comment = []
        if behind and code.strip() and items:
            items[-1].comment = items[-1].comment + _comment([behind.split("*/")[0] + (" */" if "/*" in behind else "")])
        elif behind and not code.strip():
            comment = comment + _comment([behind])
        elif items and line.strip().startswith("*"):
            items[-1].comment.append(re.sub(r"^\* ?|\s*\*/$", "", line.strip()))
    return items


def declarations(lines: list[str], c: bool, inside: bool = False) -> list[Item]:
    """The items of a header's body, or of a class (inside)."""
    items: list[Item] = []
    follows = False  # the last statement has no empty line behind it
    for comment, statement in _statements(lines):
        if statement is None:
            if comment:
                heading = re.fullmatch(r"---- (.*) ----", " ".join(comment))
                items.append(Item("heading", comment=[heading[1]]) if heading else Item("text", comment=comment))
            follows = False
            continue
        code, behind = _plain(statement)
        code = re.sub(r"\bRINGATTN_(HOST_DEVICE|ANY_CALLEE) ", "", code)
        before = len(items)
        if re.match(r"#define RINGATTN_[A-Z]+ ", code):
            items.append(Item("macro", [code.split()[1]], comment))
        elif code.startswith("#") or re.match(r"(namespace|friend|static_assert|extern \"C\")", code) or code.startswith("}"):
            pass
        elif re.match(r"(struct|class) \w+;$", code) or re.match(r"typedef struct (\w+) \w+;$", code):
            if code.startswith("typedef"):
                items.append(Item("struct", [code.split()[2]], comment + behind))
        elif found := re.match(r"(?:typedef )?(struct|class) (\w+)(?: final)?(?: : ([^{]*))? ?\{", code):
            base = f" : {found[3].strip()}" if found[3] else ""
            items.append(Item(found[1], [found[2] + base], comment, _members(statement, c, found[1] == "struct")))
        elif "= delete" in code or (inside and re.match(r"~|\w+\(\w+&&\)|\w+& operator=", code)):
            continue  # what the language makes of a class
        elif found := re.match(r"enum(?: class)?(?: (\w+))?(?: : [\w:]+)? ?\{", code):
            listed = _enumerators(statement)
            items += [Item("enum-class" if "class" in code else "enum", [found[1]], comment, listed)] if found[1] else (
                [Item("text", comment=comment)] if comment else []) + listed  # fmt: skip
        elif re.match(r"using ", code):
            items.append(Item("type", [code.removeprefix("using ").rstrip(";")], comment + behind))
        elif re.match(r"typedef ", code):
            items.append(Item("type", [code.removeprefix("typedef ").rstrip(";")], comment + behind))
        elif _is_function(code):
            if code.endswith("}") and len(statement) > 1:
                behind = []  # comments of its body
            signature = re.sub(r"\b(inline|explicit) ", "", _without_body(code))
            if follows and not comment and not behind and items and items[-1].kind == "function":
                items[-1].signatures.append(signature)
            else:
                items.append(Item("function", [signature], comment + behind))
        else:
            names = re.sub(r"( =)? ?\{[^{}]*\}$", "", code.rstrip(";")).strip()
            names = re.sub(r"^inline constexpr ", "constexpr ", names)
            items.append(Item("member" if inside else "var", [names], comment + behind))
        follows = len(items) > before or follows
    return items


def read(path: pathlib.Path) -> tuple[list[str], list[Item]]:
    """The comment at the top of a header, and its declarations."""
    lines = path.read_text(encoding="utf-8").split("\n")
    c = path.suffix == ".h"
    end = next(i for i, line in enumerate(lines) if ("*/" in line if c else not line.startswith("//")))
    intro = _comment(lines[: end + 1] if c else lines[:end])[1:]
    body, skipped = [], 0
    for line in lines[end + 1 :]:
        if skipped or re.match(r"#(ifdef __cplusplus|ifndef DLPACK)", line):
            skipped += line.startswith("#if") - line.startswith("#endif")
        elif not re.match(r"namespace |}  // namespace", line):
            body.append(line)
    return intro, declarations(body, c)


def _restructured(items: list[Item], domain: str, indent: str, link) -> list[str]:
    lines: list[str] = []
    for item in items:
        text = plain_text.block(item.comment, link, domain)
        if item.kind == "heading":
            lines += [f"{indent}.. rubric:: {text[0]}", ""]
        elif item.kind == "text":
            lines += [indent + line for line in text] + [""]
        else:
            lines.append(f"{indent}.. {domain}:{item.kind}:: {item.signatures[0]}")
            lines += [f"{indent}{' ' * len(f'.. {domain}:{item.kind}:: ')}{more}" for more in item.signatures[1:]]
            lines += ["", *(f"{indent}   {line}" for line in text), ""]
            lines += _restructured(item.members, domain, indent + "   ", link)
    return lines


def names_of(items: list[Item]) -> list[str]:
    found = []
    for item in items:
        for signature in item.signatures:
            end = r"\(" if item.kind == "function" else r"(?:\)\(.*|\[.*)?$"
            name = re.search(rf"([\w~]+){end}", signature.split(" = ")[0] if "operator" not in signature else "")
            found.append(name[1] if name else signature)
        found += names_of(item.members)
    return found


def setup(app):
    from docutils import nodes  # noqa: PLC0415, the program above needs no Sphinx
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class Header(SphinxDirective):
        required_arguments = 1
        domain_of_header = "c"

        def run(self):
            path = ROOT / self.arguments[0]
            self.env.note_dependency(str(path))
            intro, items = read(path)
            names = set(names_of(items))

            def link(name):
                role = "c:func" if self.domain_of_header == "c" else "cpp:func"
                return f":{role}:`{name}`" if name in names and self.domain_of_header == "c" else None

            lines = [*plain_text.block(intro, link, self.domain_of_header), ""]
            inner = "" if self.domain_of_header == "c" else ".. cpp:namespace:: ringattn"
            lines += [inner, "", *_restructured(items, self.domain_of_header, "", link)]
            node = nodes.container()
            self.state.nested_parse(StringList(lines, source=str(path)), self.content_offset, node)
            return node.children

    class CppHeader(Header):
        domain_of_header = "cpp"

    app.add_directive("c-header", Header)
    app.add_directive("cpp-header", CppHeader)
    return {"parallel_read_safe": True, "version": "1"}


if __name__ == "__main__":
    for file in sys.argv[1:]:
        print("\n".join(names_of(read(pathlib.Path(file))[1])))
