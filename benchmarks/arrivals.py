"""Requests with the time at which each is due: arrival processes, recorded lengths, shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, to be sent at its time whatever became of those before (an open loop)."""

    at: float
    """Seconds after the first may arrive."""
    prompt: list[int]
    output: int
    """Tokens to generate, exactly."""
    group: str = ""
    """What it is in its scenario."""


def poisson(rng: np.random.Generator, rate: float, seconds: float) -> Floats:
    """Arrivals that know nothing of each other, `rate` a second. float64 [n], sorted, in seconds."""
    return np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))


def gamma(rng: np.random.Generator, rate: float, seconds: float, cv: float = 3.0) -> Floats:
    """Bursts: Gamma distributed gaps with mean 1/rate and coefficient of variation `cv` (1 is Poisson)."""
    shape = 1 / cv**2
    n = int(rate * seconds * 4 + 40 * cv**2)
    times = np.cumsum(rng.gamma(shape, 1 / (rate * shape), n))
    return times[times < seconds]


def on_off(
    rng: np.random.Generator, rate: float, seconds: float, on: float = 1.0, off: float = 3.0
) -> Floats:
    """Silence of `off` seconds after every `on` seconds of Poisson arrivals; `rate` is the mean of all."""
    busy = poisson(rng, rate * (on + off) / on, seconds * on / (on + off))
    times: Floats = busy + np.floor(busy / on) * off
    return times


PROCESSES = {"poisson": poisson, "gamma": gamma, "on-off": on_off}


class Lengths:
    """The joint distribution of prompt and output lengths in a recorded trace, see data/README.md."""

    def __init__(self, name: str) -> None:
        """`name`: of a file in data/. Raises `FileNotFoundError`."""
        table = np.loadtxt(DATA / f"{name}.csv", np.int64, delimiter=",", skiprows=1)
        self._bounds, self._counts = table[:, :4], table[:, 4]

    def draw(self, rng: np.random.Generator, n: int, longest: int | None = None) -> tuple[Ints, Ints]:
        """Prompt and output lengths of n requests, int64 [n] each; prompts are cut to `longest` tokens."""
        bins = self._bounds[rng.choice(len(self._counts), n, p=self._counts / self._counts.sum())]
        prompts = rng.integers(bins[:, 0], bins[:, 1] + 1)
        outputs = rng.integers(bins[:, 2], bins[:, 3] + 1)
        return (prompts if longest is None else np.minimum(prompts, longest)), outputs


def random_prompts(rng: np.random.Generator, lengths: Sequence[int] | Ints, vocab: int) -> list[list[int]]:
    """Random token ids from 1, so that no two prompts share a prefix."""
    return [rng.integers(1, vocab, int(n)).tolist() for n in lengths]


def with_prefixes(
    rng: np.random.Generator, prompts: list[list[int]], prefixes: list[list[int]], share: float
) -> list[list[int]]:
    """The prompts, a `share` of them behind one of the prefixes, the n-th of which has a weight of 1/n."""
    weights = 1 / np.arange(1, len(prefixes) + 1)
    chosen = rng.choice(len(prefixes), len(prompts), p=weights / weights.sum())
    has = rng.random(len(prompts)) < share
    return [
        prefixes[i] + prompt if yes else prompt for prompt, i, yes in zip(prompts, chosen, has, strict=True)
    ]
