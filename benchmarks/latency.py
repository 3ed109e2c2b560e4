"""What a client cares about, from the times of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.targets import Seen

QUANTILES = (50, 90, 99)


def quantiles(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """`name`_p50 and so on, in milliseconds; None where nothing was measured."""
    values = np.fromiter(seconds, np.float64)
    found = np.percentile(values, QUANTILES) * 1e3 if len(values) else [None] * len(QUANTILES)
    return {f"{name}_p{q}": None if v is None else float(v) for q, v in zip(QUANTILES, found, strict=True)}


def gaps(one: Seen) -> list[float]:
    """From tokens to the next tokens, as a reader sees it: what comes at once has no gap between."""
    return [b - a for a, b in zip(one.times, one.times[1:], strict=False)]


def gaps_between(seen: Iterable[Seen], begin: float, end: float) -> list[float]:
    """The gaps that ended in an interval of time."""
    return [
        b - a for one in seen for a, b in zip(one.times, one.times[1:], strict=False) if begin <= b <= end
    ]


def ttft(one: Seen) -> float:
    """From when the request was due, so a client that falls behind does not flatter the server."""
    return one.times[0] - one.due


def good(one: Seen, ttft_target: float, gap_target: float) -> bool:
    """Complete, begun within `ttft_target` seconds, 99 % of its gaps at most `gap_target` seconds."""
    if not one.complete or ttft(one) > ttft_target:
        return False
    between = gaps(one)
    return not between or float(np.percentile(between, 99)) <= gap_target


def window(seen: Sequence[Seen], begin: float, end: float) -> dict[str, Any]:
    """Figures of an interval in which as many requests run all the time.

    Tokens come at the times of `Seen.times`, as many each time as in the mean of that request; of one
    that is cut off over HTTP their number is not known, and the mean of all others counts.
    """
    known = [one for one in seen if one.tokens and one.times]
    times, tokens = sum(len(one.times) for one in known), sum(one.tokens for one in known)
    each = tokens / times if times else 1.0
    came = sum(
        (one.tokens / len(one.times) if one.tokens else each) * sum(begin <= t < end for t in one.times)
        for one in seen
        if one.times
    )
    due = [one for one in seen if begin <= one.due < end]
    return {
        "requests": len(due),
        "failed": sum(one.error != "stopped" and not one.complete for one in seen),
        "errors": sorted({one.error for one in seen if one.error not in (None, "stopped")})[:5],
        "seconds": end - begin,
        "output_tokens_per_s": came / (end - begin),
        "tokens_per_event": each,
        **quantiles("ttft_ms", (ttft(one) for one in due if one.times)),
        **quantiles("itl_ms", gaps_between(seen, begin, end)),
    }


def summary(seen: Sequence[Seen], ttft_target: float, gap_target: float) -> dict[str, Any]:
    """Latencies in milliseconds, of every request that got tokens. Rates: from the first due to the last end.

    `cache_hit_rate`: prompt tokens that need not be computed, of those of all complete requests.
    `client_late_p99`: how far behind its schedule the client itself was.
    """
    begun = [one for one in seen if one.times]
    complete = [one for one in seen if one.complete]
    seconds = max(one.ended for one in seen) - min(one.due for one in seen)
    prompt = sum(one.prompt for one in complete)
    return {
        "requests": len(seen),
        "complete": len(complete),
        "refused": sum(one.error == "refused" for one in seen),
        "failed": sum(not one.complete and one.error != "refused" for one in seen),
        "seconds": seconds,
        "requests_per_s": len(complete) / seconds,
        "output_tokens_per_s": sum(one.tokens for one in seen) / seconds,
        **quantiles("ttft_ms", map(ttft, begun)),
        **quantiles("itl_ms", (gap for one in begun for gap in gaps(one))),
        "goodput_per_s": sum(good(one, ttft_target, gap_target) for one in seen) / seconds,
        "good_share": sum(good(one, ttft_target, gap_target) for one in seen) / len(seen),
        "ttft_target_ms": ttft_target * 1e3,
        "itl_target_ms": gap_target * 1e3,
        "cache_hit_rate": sum(one.cached for one in complete) / prompt if prompt else None,
        "client_late_p99": float(np.percentile([one.sent - one.due for one in seen], 99)) * 1e3,
    }
