# SPDX-License-Identifier: Apache-2.0
"""Tables as the pages have them."""

from __future__ import annotations


def columns(rows: list[list[str]], left: int = 1) -> str:
    """A table in Markdown that is legible as text, too; the first columns are aligned to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * width if at < left else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])
