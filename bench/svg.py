# SPDX-License-Identifier: Apache-2.0
"""Line charts and timelines as SVG text, by the standard library alone. The same data give the same bytes on every machine,
so a test can tell whether a committed picture follows from the committed figures. A picture has a light and a dark form in
one file: it follows the reader's colour scheme, and paints its own background, so it is legible on any page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

# For each series: its colour on a light and on a dark background (text in it has a contrast of at least 4.5 to 1 on
# both), its dashes, and its marker. Any two series differ in more than hue.
SERIES = (
    ("#0b62a4", "#6cb6ff", "", "circle"),
    ("#b34700", "#ffa657", "7 4", "square"),
    ("#00735c", "#56d4a4", "2 4", "diamond"),
    ("#7a3fa0", "#d2a8ff", "10 3 2 3", "triangle"),
    ("#57606a", "#b1bac4", "5 3", "circle"),
    ("#a3195b", "#ff9bce", "1 3", "down"),
    ("#6b5900", "#d9c74a", "12 4", "plus"),
    ("#b3001e", "#ff8a80", "4 2", "cross"),
    ("#4f46c8", "#b3adff", "8 3 2 3 2 3", "star"),
    ("#0a6e80", "#6fd6e8", "3 3", "hexagon"),
    ("#7a4420", "#e0b090", "6 2 1 2", "left"),
    ("#3d6b00", "#a5d64f", "14 3 3 3", "right"),
)
LANES = {"compute": ("#00735c", "#56d4a4"), "wait": ("#b34700", "#ffa657"), "transfer": ("#0b62a4", "#6cb6ff")}
PAPER, INK, FAINT, GRID = (("#ffffff", "#0d1117"), ("#1f2328", "#e6edf3"), ("#59636e", "#9198a1"), ("#d9dee3", "#2b323b"))

PLOT_WIDTH, PLOT_HEIGHT = 560.0, 270.0
LEFT, TOP, BOTTOM = 58.0, 68.0, 56.0
LABEL_GAP = 17.0  # between the baselines of two labels
TEXT_WIDTH = 7.0  # of a character of a label, a generous guess


@dataclass(frozen=True)
class Line:
    """A series: (x, y), ascending. The first ones of a chart are drawn on top of the others."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Chart:
    """y against x, whose axis is of powers of two and has these ticks."""

    title: str
    subtitle: str
    x_label: str
    ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]
    y_label: str = ""

    @property
    def width(self) -> float:
        longest = max((len(line.name) for line in self.lines), default=0)
        return LEFT + PLOT_WIDTH + 30 + TEXT_WIDTH * longest

    @property
    def height(self) -> float:
        return TOP + PLOT_HEIGHT + BOTTOM


ARM = ((-1.6, -1.6), (-1.6, -5), (1.6, -5))  # of a plus: the other three are turned by a right angle each
PLUS = tuple((x * c - y * s, x * s + y * c) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1)) for x, y in ARM)
STAR = tuple((r * math.sin(i * math.pi / 5), -r * math.cos(i * math.pi / 5)) for i in range(10) for r in ((5.4, 2.3)[i % 2],))


def number(value: float) -> str:
    """To a tenth of a pixel, and never -0."""
    return f"{round(value, 1) + 0.0:g}"


def text(x: float, y: float, content: str, style: str, anchor: str = "start") -> str:
    return f'<text x="{number(x)}" y="{number(y)}" class="{style}" text-anchor="{anchor}">{escape(content)}</text>'


def segment(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" class="{style}"/>'


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" class="{style}"/>'


def marker(shape: str, x: float, y: float, style: str) -> str:
    if shape == "circle":
        return f'<circle cx="{number(x)}" cy="{number(y)}" r="3.8" class="{style}"/>'
    corners = {
        "square": ((-3.4, -3.4), (3.4, -3.4), (3.4, 3.4), (-3.4, 3.4)),
        "diamond": ((0, -4.9), (4.9, 0), (0, 4.9), (-4.9, 0)),
        "triangle": ((0, -4.6), (4.6, 3.6), (-4.6, 3.6)),
        "down": ((0, 4.6), (4.6, -3.6), (-4.6, -3.6)),
        "left": ((-4.8, 0), (3.6, -4.6), (3.6, 4.6)),
        "right": ((4.8, 0), (-3.6, 4.6), (-3.6, -4.6)),
        "hexagon": ((-4.4, 0), (-2.2, -3.8), (2.2, -3.8), (4.4, 0), (2.2, 3.8), (-2.2, 3.8)),
        "plus": PLUS,
        "cross": tuple(((x - y) * 0.72, (x + y) * 0.72) for x, y in PLUS),
        "star": STAR,
    }[shape]
    return f'<polygon points="{" ".join(f"{number(x + dx)},{number(y + dy)}" for dx, dy in corners)}" class="{style}"/>'


def steps_up_to(most: float) -> list[float]:
    """Ticks of an axis from 0 to `most` or just beyond: at most eight, at round numbers."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most))
    step = next(power * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if most / (power * part) <= 7)
    return [index * step for index in range(math.ceil(most / step - 1e-9) + 1)]


def apart(wanted: list[float], least: float, top: float, bottom: float) -> list[float]:
    """Where labels stand that would stand at `wanted`: at least so far apart, in the same order, moved together where they
    crowd."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    clusters: list[tuple[float, list[int]]] = []  # middle, members
    for index in order:
        middle, members = wanted[index], [index]
        while clusters and middle - clusters[-1][0] < least * (len(members) + len(clusters[-1][1])) / 2:
            _, before = clusters.pop()
            members = before + members
            middle = sum(wanted[member] for member in members) / len(members)
        clusters.append((middle, members))
    places = [0.0] * len(wanted)
    for middle, members in clusters:
        half = least * (len(members) - 1) / 2
        middle = max(top + half, min(bottom - half, middle))
        for position, member in enumerate(members):
            places[member] = middle - half + least * position
    return places


def draw_chart(chart: Chart) -> list[str]:
    """The chart's elements, its upper left corner at 0, 0."""
    shown = [x for x, _ in chart.ticks] + [x for line in chart.lines for x, _ in line.points]
    low, high = math.log2(min(shown)), math.log2(max(shown))
    span = high - low or 1.0
    levels = steps_up_to(max((y for line in chart.lines for _, y in line.points), default=0.0))

    def place(x: float, y: float) -> tuple[float, float]:
        across = 14 + (PLOT_WIDTH - 28) * (math.log2(x) - low) / span
        return LEFT + across, TOP + PLOT_HEIGHT * (1 - y / levels[-1])

    drawn = [text(LEFT - 40, 26, chart.title, "title"), text(LEFT - 40, 47, chart.subtitle, "faint")]
    for level in levels:
        height = place(2.0**low, level)[1]
        drawn.append(segment(LEFT, height, LEFT + PLOT_WIDTH, height, "axis" if level == 0 else "grid"))
        drawn.append(text(LEFT - 8, height + 4, f"{level:g}", "faint", "end"))
    for x, name in chart.ticks:
        across = place(x, 0)[0]
        drawn.append(segment(across, TOP + PLOT_HEIGHT, across, TOP + PLOT_HEIGHT + 5, "axis"))
        drawn.append(text(across, TOP + PLOT_HEIGHT + 20, name, "faint", "middle"))
    drawn.append(text(LEFT + PLOT_WIDTH / 2, TOP + PLOT_HEIGHT + 43, chart.x_label, "faint", "middle"))
    if chart.y_label:
        turned = text(0, 0, chart.y_label, "faint", "middle")
        drawn.append(f'<g transform="translate(14 {number(TOP + PLOT_HEIGHT / 2)}) rotate(-90)">{turned}</g>')

    label_x = LEFT + PLOT_WIDTH + 16
    ends = [place(*line.points[-1]) for line in chart.lines]
    labels = apart([y for _, y in ends], LABEL_GAP, TOP, TOP + PLOT_HEIGHT)
    for index in reversed(range(len(chart.lines))):
        line, style = chart.lines[index], f"s{index % len(SERIES)}"
        places = [place(x, y) for x, y in line.points]
        drawn.append(segment(ends[index][0] + 6, ends[index][1], label_x - 5, labels[index], "leader"))
        drawn.append(f'<polyline points="{" ".join(f"{number(x)},{number(y)}" for x, y in places)}" class="line {style}"/>')
        drawn += [marker(SERIES[index % len(SERIES)][3], x, y, f"mark {style}") for x, y in places]
        drawn.append(text(label_x, labels[index] + 4.5, line.name, f"label {style}"))
    return drawn


def draw_timeline(ranks: list[str], bars: list[tuple[int, str, float, float]]) -> tuple[list[str], float, float]:
    """The elements, and how wide and high they are. A bar: rank, lane, begin and duration in milliseconds."""
    row, left, top, span = 46.0, 24 + TEXT_WIDTH * max(map(len, ranks)), 62.0, 760.0
    levels = steps_up_to(max(begin + duration for _, _, begin, duration in bars))
    bottom = top + row * len(ranks)
    drawn = []
    for position, lane in enumerate(LANES):
        drawn += [rectangle(left + 110 * position, 18, 12, 12, lane), text(left + 110 * position + 18, 29, lane, "label")]
    for level in levels:
        across = left + span * level / levels[-1]
        drawn += [segment(across, top - 6, across, bottom, "grid"), text(across, bottom + 18, f"{level:g}", "faint", "middle")]
    drawn.append(text(left + span / 2, bottom + 40, "ms", "faint", "middle"))
    for rank, name in enumerate(ranks):
        drawn.append(text(left - 10, top + row * rank + 22, name, "label", "end"))
    for rank, lane, begin, duration in bars:
        height = top + row * rank + 13 * list(LANES).index(lane)
        scale = span / levels[-1]
        drawn.append(rectangle(left + begin * scale, height, max(0.3, duration * scale), 11, lane))
    return drawn, left + span + 30, bottom + 52


def style_sheet() -> str:
    def rules(theme: int) -> str:
        colours = [
            f".paper{{fill:{PAPER[theme]}}}",
            f".title,.label{{fill:{INK[theme]}}}",
            f".faint{{fill:{FAINT[theme]}}}",
            f".grid{{stroke:{GRID[theme]}}}.axis,.leader{{stroke:{FAINT[theme]}}}",
            f".mark{{stroke:{PAPER[theme]}}}",
        ]
        for index, series in enumerate(SERIES):
            colours.append(f".line.s{index}{{stroke:{series[theme]}}}.mark.s{index},.label.s{index}{{fill:{series[theme]}}}")
        colours += [f".{lane}{{fill:{colour[theme]}}}" for lane, colour in LANES.items()]
        return "\n".join(colours)

    dashes = "".join(f".line.s{index}{{stroke-dasharray:{dash}}}" for index, (*_, dash, _) in enumerate(SERIES) if dash)
    return f"""text{{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}}
.title{{font-size:17px;font-weight:600}}
.label.s0{{font-weight:700}}
.line{{fill:none;stroke-width:2;stroke-linejoin:round}}
.line.s0{{stroke-width:3.2}}
.mark{{stroke-width:1}}
.leader{{stroke-width:.8;stroke-dasharray:1 3}}
{dashes}
{rules(0)}
@media (prefers-color-scheme:dark){{
{rules(1)}
}}"""


def document(description: str, width: float, height: float, elements: list[str]) -> str:
    """A whole file. The description is what a reader hears who sees no picture."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<desc>{escape(description)}</desc>",
        f"<style>\n{style_sheet()}\n</style>",
        rectangle(0, 0, width, height, "paper"),
        *elements,
        "</svg>\n",
    ])  # fmt: skip


def charts(description: str, panels: list[Chart]) -> str:
    """One chart below the other."""
    elements, height = [], 0.0
    for panel in panels:
        elements += [f'<g transform="translate(0 {number(height)})">', *draw_chart(panel), "</g>"]
        height += panel.height
    return document(description, max(panel.width for panel in panels), height, elements)


def timeline(ranks: list[str], bars: list[tuple[int, str, float, float]]) -> str:
    elements, width, height = draw_timeline(ranks, bars)
    return document(f"What {len(ranks)} ranks did when", width, height, elements)
