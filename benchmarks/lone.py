"""Makes the engine of a replica that is measured; who only names it does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig

if TYPE_CHECKING:
    from benchmarks.lone_engine import LoneEngine


def lone_engine(config: EngineConfig, pace: float | None) -> LoneEngine:
    """On a GPU or, `pace` times slower, without one. The shape is then the name of the model's directory."""
    from benchmarks.lone_engine import LoneEngine, LonePacedEngine
    from benchmarks.paced import PACES

    if pace is None:
        return LoneEngine(config)
    return LonePacedEngine(config, PACES[Path(config.model).name].slowed(pace))
