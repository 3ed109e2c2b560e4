"""Draws what the host and the device did in the same time, as SVG and for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from engine.overlap import OverlapReport, align
from engine.timeline import COLLECT, WORK, Recording

STEPS = 5
"""Whole steps of the slowest panel that are drawn."""


class Bar(NamedTuple):
    """Something in a row, from `begin` to `end` seconds after the left edge."""

    row: str
    kind: str
    """A phase of the host, or `even` and `odd` steps of a lane."""
    text: str
    begin: float
    end: float


ROWS = ("CPU", "H2D", "GPU", "D2H")


@dataclass(frozen=True, slots=True)
class Panel:
    """One run to be drawn beside others."""

    title: str
    recording: Recording
    report: OverlapReport

    @property
    def step_seconds(self) -> float:
        return self.report.step_ms / 1e3 or self.report.seconds

    @property
    def caption(self) -> str:
        r = self.report
        return (
            f"{self.title}: {r.step_ms:.2f} ms a step, GPU active {r.active_ratio:.1%}, gap "
            f"{r.gap_us_p50:.0f} µs, host {r.host_ms:.2f} ms a step, {r.overlap_ratio:.0%} of it hidden"
        )

    def bars(self, seconds: float) -> list[Bar]:
        """What falls into `seconds` from the beginning of a step in the middle."""
        steps = self.recording.steps
        lanes = align(steps)
        first = min(len(steps) // 2, max(len(steps) - STEPS - 1, 0))
        left = float(lanes.begin[first]) - 0.1 * self.step_seconds
        bars = [
            Bar("CPU", span.phase, span.phase, span.begin - left, span.end - left)
            for span in self.recording.spans
            if span.phase in WORK
        ]
        for step, uploaded, begin, end, downloaded in zip(steps, *lanes, strict=True):
            parity = "odd" if step.step % 2 else "even"
            for row, a, b in (
                ("H2D", step.timing.prepared, uploaded),
                ("GPU", begin, end),
                ("D2H", end, downloaded),
            ):
                bars.append(Bar(row, parity, f"step {step.step}", float(a) - left, float(b) - left))
        return [
            bar._replace(begin=max(bar.begin, 0.0), end=min(bar.end, seconds))
            for bar in bars
            if bar.end > 0 and bar.begin < seconds
        ]


def _seconds(panels: list[Panel]) -> float:
    """One scale for all, so that they can be compared."""
    return STEPS * max(panel.step_seconds for panel in panels)


# For a terminal

_LETTERS = {"inbox": "i", "schedule": "s", "prepare": "p", "launch": "l", "commit": "c", "publish": "u"}
_BLOCKS = {"even": "█", "odd": "▒"}


def terminal(panels: list[Panel], width: int = 100) -> str:
    """A character is what took most of its time; a dot is waiting or idle."""
    seconds = _seconds(panels)
    lines = []
    for panel in panels:
        bars = panel.bars(seconds)
        lines.append(panel.caption)
        for row in ("CPU", "GPU"):
            lines.append(f"  {row} {_characters([bar for bar in bars if bar.row == row], seconds, width)}")
        lines.append("")
    letters = ", ".join(f"{letter} {phase}" for phase, letter in _LETTERS.items())
    lines.append(f"  {seconds * 1e3:.2f} ms across. CPU: {letters}. GPU: █ and ▒ are steps in turn.")
    return "\n".join(lines)


def _characters(bars: list[Bar], seconds: float, width: int) -> str:
    signs = sorted({_sign(bar) for bar in bars})
    shares = np.zeros((len(signs) + 1, width))
    edges = np.linspace(0, seconds, width + 1)
    for bar in bars:
        covered = np.minimum(edges[1:], bar.end) - np.maximum(edges[:-1], bar.begin)
        shares[signs.index(_sign(bar))] += np.maximum(covered, 0)
    shares[-1] = seconds / width - shares[:-1].sum(0)
    return "".join([*signs, "·"][i] for i in shares.argmax(0))


def _sign(bar: Bar) -> str:
    return _BLOCKS.get(bar.kind) or _LETTERS[bar.kind]


# SVG

_WIDTH, _LEFT, _ROW, _HEAD, _PANEL = 1000, 56, 26, 30, 158

_STYLE = """
    svg { --paper: #ffffff; --lane: #f3f5f8; --ink: #1f2328; --soft: #59636e; --even: #2563c9; --odd: #7aa5e8;
          --schedule: #b45309; --prepare: #d97706; --launch: #f0a53a; --commit: #0f7b4b; --publish: #58b58a;
          --inbox: #8b949e;
          font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #0d1117; --lane: #171c24; --ink: #e6edf3; --soft: #9198a1; }
    }
    text { fill: var(--ink); }
    .head { font-size: 13px; font-weight: 600; } .soft { fill: var(--soft); }
    .in { fill: #ffffff; text-anchor: middle; font-size: 11px; }
"""


def svg(panels: list[Panel], title: str) -> str:
    """One panel above the other, on one scale of time."""
    seconds = _seconds(panels)
    scale = (_WIDTH - _LEFT - 12) / seconds
    height = 24 + _PANEL * len(panels) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(' '.join(panel.caption for panel in panels))}</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="var(--paper)"/>',
        f'<text x="12" y="18" class="soft">{escape(title)}</text>',
    ]
    for i, panel in enumerate(panels):
        parts += _panel(panel, 24 + i * _PANEL, seconds, scale)
    parts += _axis(height - 40, seconds, scale)
    parts += _legend(height - 12)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int, seconds: float, scale: float) -> list[str]:
    parts = [f'<text x="12" y="{top + 20}" class="head">{escape(panel.caption)}</text>']
    for row in ROWS:
        y = top + _HEAD + ROWS.index(row) * (_ROW + 4)
        parts.append(f'<text x="12" y="{y + 17}">{row}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{seconds * scale:.1f}" height="{_ROW}" fill="var(--lane)"/>'
        )
    for bar in panel.bars(seconds):
        x, y = _LEFT + bar.begin * scale, top + _HEAD + ROWS.index(bar.row) * (_ROW + 4)
        width = max((bar.end - bar.begin) * scale, 0.4)
        tip = f"{bar.text}: {(bar.end - bar.begin) * 1e6:.0f} µs"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="var(--{bar.kind})">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if bar.row == "GPU" and width > 60:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 17}" class="in">{bar.text}</text>')
    return parts


def _axis(y: int, seconds: float, scale: float) -> list[str]:
    ms = seconds * 1e3
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if ms / s <= 12), 1000)
    return [
        f'<text x="{_LEFT + tick * step * scale / 1e3:.1f}" y="{y}" class="soft">{tick * step:g} ms</text>'
        for tick in range(int(ms / step) + 1)
        if _LEFT + tick * step * scale / 1e3 < _WIDTH - 40
    ]


def _legend(y: int) -> list[str]:
    parts, x = [], _LEFT
    kinds = [(phase, phase) for phase in WORK] + [("even", "GPU and copies, steps in turn")]
    for kind, text in kinds:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="var(--{kind})"/>')
        parts.append(f'<text x="{x + 17}" y="{y}" class="soft">{text}</text>')
        x += 34 + 7 * len(text)
    parts.append(f'<text x="{x}" y="{y}" class="soft">empty: waiting</text>')
    return parts


assert {*_LETTERS} == {*WORK} and COLLECT not in WORK
