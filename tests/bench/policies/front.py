"""Front of a comparison: the settings that no other beats in both first token and gap, and their SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Point = tuple[float, float]  # p99 of the first token and of gaps, in milliseconds

COLOURS = {
    "Lockstep": "#0b5fa5",
    "vLLM": "#b25a00",
    "SGLang": "#7a7a7a",
    "TensorRT-LLM": "#5a8f29",
}
WIDTH, HEIGHT, MARGIN = 460, 330, 50
FONT = 'font-family="sans-serif" font-size="11"'


def front_of(points: Mapping[str, Point]) -> list[str]:
    """Returns the names of the points that none is better than in both, by first token."""
    names = sorted(points, key=lambda name: points[name])
    front: list[str] = []
    for name in names:
        if not front or points[name][1] < points[front[-1]][1]:
            front.append(name)
    return front


def leads(own: Mapping[str, Point], others: Mapping[str, Point]) -> list[tuple[str, float]]:
    """Returns each point of the others' front, and its first token over the best of our own whose gap
    is no larger; 0 if there is none."""
    found = []
    for name in front_of(others):
        first, gap = others[name]
        best = min((p[0] for p in own.values() if p[1] <= gap), default=math.inf)
        found.append((name, first / best))
    return found


def draw(panels: Mapping[str, Mapping[str, Point]]) -> str:
    """Returns an SVG with a panel for each load: gap p99 over first token p99, both logarithmic."""
    width = WIDTH * min(2, len(panels))
    height = 40 + HEIGHT * -(-len(panels) // 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (system, colour) in enumerate(COLOURS.items()):
        x = 20 + 110 * number
        parts.append(f'<circle cx="{x}" cy="16" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 8}" y="20">{escape(system)}</text>')
    for number, (title, points) in enumerate(panels.items()):
        left, top = WIDTH * (number % 2), 40 + HEIGHT * (number // 2)
        parts += _panel(title, points, left, top)
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, points: Mapping[str, Point], left: int, top: int) -> Sequence[str]:
    firsts, gaps = zip(*points.values(), strict=True)
    x_of = _axis(firsts, left + MARGIN, left + WIDTH - 15)
    y_of = _axis(gaps, top + HEIGHT - MARGIN, top + 20)
    bottom, right = top + HEIGHT - MARGIN, left + WIDTH - 15
    parts = [
        f'<text x="{left + MARGIN}" y="{top + 12}" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{left + MARGIN} {top + 18}V{bottom}H{right}" fill="none" stroke="#888"/>',
    ]
    for value in _ticks(firsts):
        parts.append(
            f'<text x="{x_of(value):.0f}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
        )
    for value in _ticks(gaps):
        parts.append(
            f'<text x="{left + MARGIN - 4}" y="{y_of(value) + 4:.0f}" '
            f'text-anchor="end">{value:g}</text>'
        )
    parts.append(
        f'<text x="{(left + MARGIN + right) / 2:.0f}" y="{bottom + 30}" text-anchor="middle" '
        f'fill="#555">first token p99, ms (across), gap p99, ms (up)</text>'
    )
    for system, colour in COLOURS.items():
        own = {name: point for name, point in points.items() if name.startswith(system)}
        for first, gap in own.values():
            parts.append(
                f'<circle cx="{x_of(first):.1f}" cy="{y_of(gap):.1f}" r="2.5" fill="{colour}"/>'
            )
        line = " ".join(f"{x_of(own[n][0]):.1f},{y_of(own[n][1]):.1f}" for n in front_of(own))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" opacity="0.5"/>')
    return parts


def _axis(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = math.log(min(values)), math.log(max(values))
    scale = (end - start) / max(high - low, 1e-9)
    return lambda value: start + (math.log(value) - low) * scale


def _ticks(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    ticks = [base * 10.0**power for power in range(7) for base in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]
