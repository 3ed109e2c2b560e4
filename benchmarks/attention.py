"""Paged attention against the device's own limits: `python -m benchmarks.attention [--sweep] [--json FILE]`.

Decode is judged by the read bandwidth, prefill by the matmul rate, both measured in the same run.
Each case is captured in a CUDA graph that goes round several sets of pages, together larger than
the L2 cache; a figure is the median of 20 replays, with the span of the middle 80 %. `--flashinfer`
measures FlashInfer's decode beside the own one, wherever it takes the case.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

try:
    import triton
except ImportError:
    raise SystemExit("needs a CUDA GPU, and Triton, which comes with torch's CUDA builds") from None

from benchmarks.arguments import file
from engine.attention.flashinfer_decode import flashinfer_decode, takes
from engine.attention.rotary import Rotary
from engine.attention.triton_decode import decode
from engine.attention.triton_prefill import prefill
from engine.attention.triton_rotary import rotate_and_write
from engine.attention.triton_splits import SplitScratch
from engine.attention.triton_tiles import TileConfig
from engine.attention.triton_write import write_cache
from engine.triton_launch import multiprocessors

DTYPE = torch.bfloat16
DEVICE = "cuda"
REPLAYS = 20
MIN_REPLAY_US = 3000
PAGES_BYTES = 400 << 20
"""The page sets of one case hold at least this much, if it says no more: several times the L2 cache."""
MIN_SETS = 4
"""As in a model, launches follow one another: each takes the places that the one before it leaves."""


@dataclass(frozen=True)
class Timing:
    us: float
    us_low: float
    us_high: float


def time_calls(calls: Sequence[Callable[[], object]]) -> Timing:
    """Microseconds of one call, from replays of a graph that makes all the calls in turn, repeatedly."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    repeat = max(1, round(MIN_REPLAY_US / (_replay_us(graph, 1) + 1)))
    times = sorted(_replay_us(graph, repeat) / (repeat * len(calls)) for _ in range(REPLAYS))
    return Timing(statistics.median(times), times[REPLAYS // 10], times[-1 - REPLAYS // 10])


def _replay_us(graph: torch.cuda.CUDAGraph, repeat: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(repeat):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000


def read_bandwidth() -> float:
    """Bytes per second: the best of a few reductions over 4 GiB."""
    flat = torch.ones(1 << 30, dtype=torch.float32, device=DEVICE)
    timings = [
        time_calls([lambda view=view: view.sum(-1)]).us  # type: ignore[misc]
        for view in (flat, flat.view(1 << 14, -1), flat.view(1 << 17, -1))
    ]
    return flat.nbytes / min(timings) * 1e6


def matmul_rate() -> float:
    """FLOP per second of torch's own matmul, 8192 cubed."""
    a, b = (torch.randn(8192, 8192, dtype=DTYPE, device=DEVICE) for _ in range(2))
    return 2 * 8192**3 / time_calls([lambda: a @ b] * 4).us * 1e6


@dataclass(frozen=True)
class Case:
    """One launch of one kernel."""

    name: str
    contexts: tuple[int, ...]
    new: int = 1
    """Query tokens of every sequence; 1 is decode."""
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    grown: bool = False
    """Pages in the order in which sequences that decode together take them, not shuffled."""
    pages_bytes: int = PAGES_BYTES

    @property
    def kernel(self) -> str:
        return "decode" if self.new == 1 else "prefill"

    def visible(self) -> int:
        """Pairs of query token and visible token."""
        pairs = 0
        for context in self.contexts:
            positions = range(context - self.new, context)
            pairs += sum(min(p + 1, self.window or p + 1) for p in positions)
        return pairs

    def bytes(self) -> int:
        """Of the keys and values that a decode must read."""
        return self.visible() * self.kv_heads * self.head_dim * 2 * DTYPE.itemsize

    def flops(self) -> int:
        return 4 * self.visible() * self.heads * self.head_dim


DECODE = (
    Case("32 x 4K", (4096,) * 32),
    Case("256 x 1K", (1024,) * 256),
    Case("32 x 512", (512,) * 32),
    Case("32 x 8K", (8192,) * 32),
    Case("1 x 32K", (32768,)),
    Case("2 x 64K among 62 x 1K", ((65536,) + (1024,) * 31) * 2),
    Case("uneven: 32 of 256 to 8K", tuple(256 * i for i in range(1, 33))),
    Case("20 x 4K", (4096,) * 20),
    Case("48 x 4K", (4096,) * 48),
    Case("32 x 4K, block 64", (4096,) * 32, block_size=64),
    Case("32 x 4K, window 1024", (4096,) * 32, window=1024),
    Case("32 x 4K, softcap", (4096,) * 32, softcap=30.0),
    Case("32 x 4K, head dim 64", (4096,) * 32, head_dim=64),
    Case("32 x 4K, head dim 96", (4096,) * 32, head_dim=96),
    Case("32 x 4K, head dim 256", (4096,) * 32, head_dim=256, heads=16, kv_heads=4),
    Case("256 x 512, 0.6B", (512,) * 256, heads=16, kv_heads=8),
    Case("256 x 256, 0.6B", (256,) * 256, heads=16, kv_heads=8),
    Case("256 x 640, 0.6B", (640,) * 256, heads=16, kv_heads=8),
    Case("256 x 640", (640,) * 256),
    Case("200 x 768", (768,) * 200),
    Case("256 to 4K", tuple(64 + 16 * i for i in range(256))),
    Case("256 x 1K, head dim 64", (1024,) * 256, head_dim=64),
    Case("32 x 8K, grown, of 32 GiB", (8192,) * 32, grown=True, pages_bytes=32 << 30),  # as 32 layers have
)
PREFILL = (
    Case("8 x 2048", (2048,) * 8, 2048),
    Case("1 x 32768", (32768,), 32768),
    Case("16 x 512", (512,) * 16, 512),
    Case("2048 after 30K", (32768,), 2048),
    Case("8 x 2048, window 512", (2048,) * 8, 2048, window=512),
    Case("8 x 2048, softcap", (2048,) * 8, 2048, softcap=30.0),
    Case("8 x 2048, head dim 64", (2048,) * 8, 2048, head_dim=64),
    Case("8 x 2048, head dim 256", (2048,) * 8, 2048, head_dim=256, heads=16, kv_heads=4),
)

DECODE_SWEEP = [
    TileConfig(tile, num_warps, num_stages)
    for tile, num_warps, num_stages in (
        (32, 2, 7),
        (32, 4, 7),
        (64, 2, 4),
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 5),
        (64, 8, 4),
        (128, 4, 2),
        (128, 4, 3),
        (128, 8, 3),
    )
]
PREFILL_SWEEP = [
    TileConfig(tile, num_warps, num_stages, rows)
    for rows, tile, num_warps, num_stages in (
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 4, 3),
        (128, 32, 8, 3),
    )
]
MANY_SWEEP = [TileConfig(64, 4, 4), TileConfig(64, 4, 3, resident=3, registers=168)]
"""Two places on a multiprocessor, and three."""
SWEEP = {
    "32 x 4K": DECODE_SWEEP,
    "256 x 1K": DECODE_SWEEP,
    "32 x 512": DECODE_SWEEP,
    "32 x 4K, head dim 256": [
        TileConfig(tile, num_warps, num_stages)
        for tile, num_warps, num_stages in ((32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3))
    ],
    **dict.fromkeys(
        ("256 x 256, 0.6B", "256 x 640, 0.6B", "256 x 640", "200 x 768", "256 to 4K"), MANY_SWEEP
    ),
    "8 x 2048": PREFILL_SWEEP,
    "1 x 32768": PREFILL_SWEEP,
    "8 x 2048, head dim 256": [
        TileConfig(tile, num_warps, num_stages, rows)
        for rows, tile, num_warps, num_stages in ((128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 4, 3))
    ],
}


class Bench:
    """The limits of this device, and the rows measured against them."""

    def __init__(self, json_path: Path | None, flashinfer: bool) -> None:
        self.json_path = json_path
        self.flashinfer = f"flashinfer {version('flashinfer-python')}" if flashinfer else ""
        self.bandwidth = read_bandwidth()
        self.flops = matmul_rate()
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: "
            f"reads {self.bandwidth / 1e12:.2f} TB/s, matmul {self.flops / 1e12:.0f} TFLOP/s"
        )

    def report(self, case: Case, timing: Timing, limit_us: float, note: str) -> None:
        rate = f"{case.bytes() / timing.us / 1e6:6.2f} TB/s"
        if case.kernel == "prefill":
            rate = f"{case.flops() / timing.us / 1e6:6.0f} TFLOP/s"
        print(
            f"{case.kernel:8} {case.name:26} {timing.us:9.1f} us "
            f"({timing.us_low:.1f} - {timing.us_high:.1f}) {rate} "
            f"{limit_us / timing.us:6.1%} of limit  {note}",
            flush=True,
        )
        if self.json_path:
            row = {
                "kernel": case.kernel,
                **asdict(case),
                **asdict(timing),
                "limit_us": limit_us,
                "note": note,
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
            }
            with self.json_path.open("a") as lines:
                lines.write(json.dumps(row) + "\n")

    def run(self, case: Case, *variants: TileConfig) -> None:
        """Measure one case: the kernel as it is, then cut otherwise."""
        torch.cuda.empty_cache()
        inputs = Inputs(case)
        limit_us = case.bytes() / self.bandwidth * 1e6
        if case.kernel == "prefill":
            limit_us = case.flops() / self.flops * 1e6
        calls = inputs.calls(None)
        calls[0]()
        want = inputs.out.clone()
        self.report(case, time_calls(calls), limit_us, "as it is")
        group = case.heads // case.kv_heads
        if self.flashinfer and case.new == 1 and takes(group, case.head_dim, case.window, case.softcap):
            calls = inputs.flashinfer_calls()
            inputs.out.fill_(torch.nan)
            calls[0]()
            torch.testing.assert_close(inputs.out, want, atol=2e-2, rtol=2e-2)
            self.report(case, time_calls(calls), limit_us, self.flashinfer)
        for config in variants:
            note = str(config)
            calls = inputs.calls(config)
            try:
                calls[0]()
            except triton.runtime.errors.OutOfResources as error:
                print(f"{case.kernel:8} {case.name:26} {note}: {error}")
                continue
            torch.testing.assert_close(inputs.out, want, atol=2e-2, rtol=2e-2)
            self.report(case, time_calls(calls), limit_us, note)


class Inputs:
    """One case's tensors; as many sets of pages as outgrow the L2 cache."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator(DEVICE).manual_seed(0)
        blocks = [-(-context // case.block_size) for context in case.contexts]
        page_bytes = 2 * case.block_size * case.kv_heads * case.head_dim * DTYPE.itemsize
        sets = max(MIN_SETS, -(-case.pages_bytes // (sum(blocks) * page_bytes)))
        shape = (1 + sets * sum(blocks), case.block_size, case.kv_heads, case.head_dim)
        sequences, tokens = len(case.contexts), len(case.contexts) * case.new

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)

        self.key_cache, self.value_cache = randn(*shape), randn(*shape)
        self.query = randn(tokens, case.heads, case.head_dim)
        self.out = torch.empty_like(self.query)
        self.context_len = torch.tensor(case.contexts, dtype=torch.int32, device=DEVICE)
        self.query_len = torch.full_like(self.context_len, case.new)
        self.query_start = torch.arange(0, tokens, case.new, dtype=torch.int32, device=DEVICE)
        self.tables = torch.zeros(sets, sequences, max(blocks), dtype=torch.int32)
        pages = 1 + torch.randperm(shape[0] - 1, generator=torch.Generator().manual_seed(0)).int()
        if case.grown:
            pages = pages.sort().values
        taken = 0
        for table in self.tables:
            for column in range(max(blocks)):
                rows = [row for row, count in enumerate(blocks) if column < count]
                table[rows, column] = pages[taken : taken + len(rows)]
                taken += len(rows)
        self.tables = self.tables.to(DEVICE)

    def calls(self, config: TileConfig | None) -> list[Callable[[], None]]:
        """One launch for each set of pages."""
        case, sequences = self.case, len(self.case.contexts)
        options = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
        tensors = (self.out, self.query, self.key_cache, self.value_cache)
        device = self.out.device
        scratch = SplitScratch.allocate(
            sequences, case.heads, case.kv_heads, case.head_dim, multiprocessors(device), device
        )
        lengths = (self.query_start, self.query_len, self.context_len)
        kernel: Callable[..., None] = decode
        kinds = {"num_decodes": sequences}
        if case.kernel == "prefill":
            kernel, kinds = prefill, {"num_decodes": 0, "num_prefills": sequences}
        return [
            partial(kernel, *tensors, *lengths, table, scratch, config=config, **kinds, **options)
            for table in self.tables
        ]

    def flashinfer_calls(self) -> list[Callable[[], None]]:
        """One launch of FlashInfer's decode for each set of pages."""
        case, sequences = self.case, len(self.case.contexts)
        arrivals = torch.zeros(sequences * case.kv_heads, dtype=torch.int32, device=DEVICE)
        tensors = (self.out, self.query, self.key_cache, self.value_cache, self.context_len)
        options = {"num_decodes": sequences, "scale": case.head_dim**-0.5}
        return [partial(flashinfer_decode, *tensors, table, arrivals, **options) for table in self.tables]


def bench_write(tokens: int) -> None:
    """The cache write alone: it should take a few microseconds, whatever the bandwidth."""
    cache = torch.empty(2, 8192, 16, 8, 128, dtype=DTYPE, device=DEVICE)
    fused = torch.randn(tokens, 48, 128, device=DEVICE).to(DTYPE)
    slots = torch.randperm(8192 * 16, device=DEVICE)[:tokens].int()
    timing = time_calls([lambda: write_cache(fused[:, 32:40], fused[:, 40:], cache[0], cache[1], slots)] * 8)
    print(f"write    {tokens} tokens{'':18} {timing.us:9.1f} us ({timing.us_low:.1f} - {timing.us_high:.1f})")


def bench_rotary(tokens: int, heads: int, *, norms: bool, bandwidth: float) -> None:
    """From projections to rotated queries and a filled cache, against the bytes read and written."""
    cache = torch.empty(2, 8192, 16, 8, 128, dtype=DTYPE, device=DEVICE)
    fused = [torch.randn(tokens, heads + 16, 128, device=DEVICE).to(DTYPE) for _ in range(8)]
    cos, sin = (torch.rand(1, tokens, 128, device=DEVICE).to(DTYPE) for _ in range(2))
    weight = torch.rand(128, device=DEVICE).to(DTYPE) if norms else None
    rotary = Rotary(cos, sin, weight, weight, 1e-6)
    slots = torch.randperm(8192 * 16, device=DEVICE)[:tokens].int()

    def call(states: torch.Tensor) -> None:
        query, key, value = torch.split(states, [heads, 8, 8], dim=1)
        rotate_and_write(query, key, value, rotary, cache[0], cache[1], slots)

    timing = time_calls([partial(call, states) for states in fused])
    name = f"{tokens} tokens, {heads} heads{', norms' if norms else ''}"
    moved = 2 * fused[0].nbytes + cos.nbytes + sin.nbytes
    print(
        f"rotary   {name:26} {timing.us:9.1f} us ({timing.us_low:.1f} - {timing.us_high:.1f}) "
        f"{moved / timing.us / 1e6:6.2f} TB/s {moved / bandwidth * 1e6 / timing.us:6.1%} of limit"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tile configurations too")
    parser.add_argument("--flashinfer", action="store_true", help="measure FlashInfer's decode too")
    parser.add_argument("--case", nargs="*", choices=[case.name for case in (*DECODE, *PREFILL)])
    parser.add_argument("--json", type=file, help="append one JSON line per figure to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    if arguments.flashinfer and find_spec("flashinfer") is None:
        parser.error("--flashinfer: FlashInfer is not installed")
    bench = Bench(arguments.json, arguments.flashinfer)
    for tokens in () if arguments.case else (32, 256, 8192):
        bench_write(tokens)
        bench_rotary(tokens, 32, norms=False, bandwidth=bench.bandwidth)
        bench_rotary(tokens, 16, norms=True, bandwidth=bench.bandwidth)
    for case in (*DECODE, *PREFILL):
        if arguments.case and case.name not in arguments.case:
            continue
        bench.run(case, *(SWEEP.get(case.name, ()) if arguments.sweep else ()))


if __name__ == "__main__":
    main()
