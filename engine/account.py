"""What one client has had of the tokens of one priority."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request


@dataclass(slots=True, eq=False)
class Account:
    """Kept by `engine.queue` for as long as somebody waits in that priority."""

    served: int = 0
    """Prompt tokens computed and, weighted, tokens generated for it, beside what it started with."""
    waiting: list[Request] = field(default_factory=list)
    """Its requests that have not run yet, by arrival."""
    queued: bool = False
    """It has an entry in the heap of turns."""
