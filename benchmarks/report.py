"""Make the page of a file of results: `python -m benchmarks.report benchmarks/results/h200.jsonl`.

Writes the same name with .md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.pages.cpu import cpu_page
from benchmarks.pages.engine import engine_page
from benchmarks.pages.fleet import fleet_page
from benchmarks.pages.streaming import streaming_page
from benchmarks.pages.traffic import traffic_page


def make(lines: list[dict[str, Any]]) -> str:
    for key, kind in (
        ("system", cpu_page),
        ("scenario", traffic_page),
        ("phase", fleet_page),
        ("route", streaming_page),
    ):
        if key in lines[0]:
            return kind(lines)
    return engine_page(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    results: Path = parser.parse_args().results
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    results.with_suffix(".md").write_text(make(lines))


if __name__ == "__main__":
    main()
