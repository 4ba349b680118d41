"""Picture of the comparison: bars of tokens a second beside the machine's limits, as SVG."""

from collections.abc import Mapping
from html import escape

COLOURS = {
    "lockstep model": "#0b5fa5",
    "lockstep service": "#3d85c6",
    "vllm engine": "#b25a00",
    "vllm server": "#cf7f2a",
    "llama.cpp model": "#7a7a7a",
}
WIDTH, HEIGHT, TOP, BOTTOM = 880, 330, 60, 40
FONT = 'font-family="sans-serif" font-size="12"'


def draw(
    peers: Mapping[str, Mapping[str, Mapping[str, float]]], limits: Mapping[str, float]
) -> str:
    """Returns the SVG: a group of bars for each column, as high as their share of its limit.

    Args:
        peers: Figures by name and column.
        limits: Tokens a second by column.
    """
    group = (WIDTH - 20) / len(limits)
    bar = (group - 24) / len(peers)
    full = HEIGHT - TOP - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, name in enumerate(peers):
        x = 12 + number * (WIDTH - 20) / len(peers)
        parts.append(f'<rect x="{x:.0f}" y="14" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 18:.0f}" y="24">{escape(name)}</text>')
    for number, (column, limit) in enumerate(limits.items()):
        left = 22 + number * group
        for place, (name, figures) in enumerate(peers.items()):
            speed = figures[column]["tokens_per_s"]
            height = full * speed / limit
            x, y = left + place * bar, HEIGHT - BOTTOM - height
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar - 4:.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[name]}"/><text x="{x + bar / 2 - 2:.1f}" y="{y + 15:.1f}" '
                f'text-anchor="middle" fill="white">{speed:.0f}</text>'
            )
        middle, right = left + group / 2 - 12, left + group - 24
        parts.append(
            f'<path d="M{left - 6:.1f} {TOP}H{right:.1f}" stroke="#c00" stroke-dasharray="4 3"/>'
            f'<text x="{middle:.1f}" y="{TOP - 6}" text-anchor="middle" fill="#c00">'
            f"limit {limit:.0f}</text>"
            f'<text x="{middle:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{escape(column)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 5}" text-anchor="middle" fill="#555">tokens/s; '
        "height: share of what the memory, or for prefill the arithmetic, of this machine allows"
        "</text>"
    )
    return "\n".join([*parts, "</svg>\n"])
