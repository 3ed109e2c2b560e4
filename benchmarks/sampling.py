"""Sampling against the device's bandwidth: `python -m benchmarks.sampling [--sweep] [--out FILE]`.

Each figure is one call captured in a CUDA graph, as the engine replays it: the median of 20 timings, with
the span of the middle 80 %. The limit is the time to read the logits once from memory; after a forward they
are in the L2 cache as far as it holds them, and so they are here. `share` is of a decode step of the 8B
shape, 5.3 ms at 32 requests and 12.9 ms at 256. Raises where tokens differ from those of plain torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import file
from benchmarks.attention import DEVICE, read_bandwidth, time_calls
from engine import sampler, triton_sampler
from engine.penalties import Penalties, PenaltyTensors
from engine.sampler import SamplingTensors
from engine.triton_sampler import SamplerConfig

STEP_US = {32: 5300.0, 256: 12900.0}
VOCABULARIES = (128_256, 151_936)
SPREADS = {"flat": 1.0, "peaked": 3.0}
"""Standard deviation of the logits: of a model with random weights, and more like a trained one's."""

KINDS: dict[str, dict[str, float]] = {
    "noise": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "top_k, top_p, min_p": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}
SWEEP = [
    SamplerConfig(chunk, block, pivots, warps)
    for chunk, block, pivots, warps in (
        (4096, 1024, 8, 8),
        (4096, 512, 8, 4),
        (8192, 512, 8, 4),
        (8192, 2048, 8, 8),
        (8192, 1024, 4, 8),
        (8192, 1024, 16, 8),
        (8192, 512, 16, 8),
        (16384, 1024, 8, 8),
        (16384, 2048, 4, 8),
    )
]


@dataclass(frozen=True)
class Case:
    kind: str
    rows: int
    vocab: int
    dtype: torch.dtype
    spread: str

    def logits(self) -> torch.Tensor:
        generator = torch.Generator(DEVICE).manual_seed(0)
        normal = torch.randn(self.rows, self.vocab, generator=generator, device=DEVICE)
        return (normal * SPREADS[self.spread]).to(self.dtype)

    def params(self) -> SamplingTensors:
        values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | KINDS.get(self.kind, {})
        position = torch.arange(self.rows, dtype=torch.int32, device=DEVICE)
        return SamplingTensors(
            **{
                name: torch.full(
                    (self.rows,),
                    value,
                    dtype=torch.int32 if name == "top_k" else torch.float32,
                    device=DEVICE,
                )
                for name, value in values.items()
            },
            seed_low=position * 77,
            seed_high=position,
            position=position,
        )


class Bench:
    """The bandwidth of this device, and what is measured against it."""

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self.bandwidth = read_bandwidth()
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {version('triton')}: "
            f"reads {self.bandwidth / 1e12:.2f} TB/s"
        )

    def report(
        self, case: Case, logits: torch.Tensor, call: Callable[[], object], config: SamplerConfig | None
    ) -> None:
        timing = time_calls([call])
        limit_us = logits.nbytes / self.bandwidth * 1e6
        share = timing.us / STEP_US[case.rows]
        dtype = str(case.dtype).removeprefix("torch.")
        print(
            f"{case.kind:20} {case.rows:4} x {case.vocab} {dtype:8} {case.spread:6} {timing.us:8.1f} us "
            f"({timing.us_low:.1f} - {timing.us_high:.1f}) {timing.us / limit_us:6.1f} reads, "
            f"{share:6.2%} of a step  {config or ''}",
            flush=True,
        )
        if self.out:
            line: dict[str, Any] = {
                **asdict(case),
                "dtype": dtype,
                **asdict(timing),
                "limit_us": limit_us,
                "share": share,
                "config": asdict(config) if config else None,
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": version("triton"),
            }
            with self.out.open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    def run(self, case: Case, config: SamplerConfig) -> None:
        logits, params = case.logits(), case.params()
        filtered = bool(KINDS[case.kind])

        def call() -> torch.Tensor:
            return triton_sampler.sample(logits, params, filtered=filtered, config=config)

        plain = sampler.sample(
            logits.cpu(),
            SamplingTensors(*(getattr(params, name).cpu() for name in params.__slots__)),
            filtered=filtered,
        )
        different = int((call().cpu() != plain).sum())
        if different > case.rows // 16:  # rounding decides now and then
            raise RuntimeError(f"{case}, {config}: {different} tokens differ from plain torch's")
        self.report(case, logits, call, config)

    def run_penalties(self, case: Case) -> None:
        """What penalties take before a token is chosen, and counting it."""
        logits, params = case.logits(), case.params()
        penalties = Penalties(case.rows + 1, case.vocab, torch.device(DEVICE))
        half = torch.full((case.rows,), 0.5, device=DEVICE)
        asked = PenaltyTensors(params.position + 1, half, half, 1 + half)
        tokens = params.position * 7
        penalties.count(asked.row, tokens)

        def call() -> None:
            penalties.apply(logits, asked)
            penalties.count(asked.row, tokens)

        self.report(case, logits, call, None)

    def run_beside(self, kind: str, case: Case) -> None:
        """What greedy takes, and what torch's sort alone would."""
        logits, params = case.logits(), case.params()
        calls: dict[str, Callable[[], object]] = {
            "greedy": lambda: sampler.sample(logits, params, greedy=True),
            "a sort alone": lambda: logits.sort(-1, descending=True),
        }
        named = Case(kind, case.rows, case.vocab, case.dtype, case.spread)
        self.report(named, logits, calls[kind], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other ways to cut the work too")
    parser.add_argument("--out", type=file, help="append one JSON line per figure to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    bench = Bench(arguments.out)
    for vocab in VOCABULARIES:
        for rows in STEP_US:
            first = Case("noise", rows, vocab, torch.bfloat16, "flat")
            bench.run_beside("greedy", first)
            bench.run_beside("a sort alone", first)
            for kind in KINDS:
                for spread in SPREADS if KINDS[kind] else ("flat",):
                    bench.run(Case(kind, rows, vocab, torch.bfloat16, spread), SamplerConfig())
            # With penalties, logits are float32.
            bench.run_penalties(Case("penalties", rows, vocab, torch.bfloat16, "flat"))
            bench.run(Case("top_k, top_p, min_p", rows, vocab, torch.float32, "flat"), SamplerConfig())
    if arguments.sweep:
        for dtype in (torch.bfloat16, torch.float32):
            for rows in STEP_US:
                for config in SWEEP:
                    bench.run(Case("top_k, top_p, min_p", rows, 128_256, dtype, "flat"), config)


if __name__ == "__main__":
    main()
