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
    """Raises `LookupError` where there is no page for such lines."""
    for key, kind in (
        ("system", cpu_page),
        ("scenario", traffic_page),
        ("phase", fleet_page),
        ("route", streaming_page),
        ("workload", engine_page),
    ):
        if lines and key in lines[0]:
            return kind(lines)
    raise LookupError("there is no page for such lines")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=argparse.FileType())
    with parser.parse_args().results as results:
        lines = [json.loads(line) for line in results]
    path = Path(results.name).with_suffix(".md")
    try:
        path.write_text(make(lines))
    except LookupError as error:
        parser.error(f"{results.name}: {error}")
    print(path)


if __name__ == "__main__":
    main()
