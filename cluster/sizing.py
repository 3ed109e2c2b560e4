"""The table of docs/operations.md: requests at once, by model, GPU and length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.memory import GIB, GPUS, budget
from cluster.shape import ModelShape
from deployments.settings import Settings


def table(
    shapes: dict[str, ModelShape], gpus: Sequence[str], contexts: Sequence[int], engine: dict[str, Any]
) -> str:
    """As Markdown. Raises `ValueError` for a GPU that is not known."""
    unknown = [gpu for gpu in gpus if gpu not in GPUS]
    if unknown:
        raise ValueError(f"gpu: {unknown[0]!r} is none of {', '.join(GPUS)}")
    head = [
        "model",
        "GPU",
        "weights, GiB",
        "cache, tokens",
        *(f"{context:,} tokens each" for context in contexts),
    ]
    rows = [head, ["---", "---", *["--:"] * (len(head) - 2)]]
    for name, shape in shapes.items():
        # Every length of the table has to be one that the engine takes.
        limit = max(*contexts, shape.context or 0)
        config = Settings(engine={"context_length": limit} | engine).engine_config(gpu=True)
        for gpu in gpus:
            found = budget(shape, config, GPUS[gpu] * 2**20)
            cells = [
                name,
                gpu,
                f"{found.weights / GIB:.1f}",
                f"{found.tokens:,}" if found.tokens else "does not fit",
            ]
            for context in contexts:
                fits = not shape.context or context <= shape.context
                cells.append((f"{n}" if (n := found.requests(context)) else "–") if fits else "too long")
            rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
