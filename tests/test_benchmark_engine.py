"""The engine's benchmark, on a CPU: what it measures, what it checks, and what it makes of it."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import engine as benchmark
from benchmarks import peers
from benchmarks.limits import Widths, measure_limits, percentages
from benchmarks.measuring import Span, busy, host_ms, kernel_figures
from benchmarks.pages.engine import engine_page, screen
from benchmarks.peers import Stuck, figures, within
from benchmarks.workloads import SHAPES, Workload, random_prompts, save_config
from engine.plan import StepTiming
from engine.timeline import Recording, StepTimes
from engine.timeline import Span as HostSpan


def step(number: int, collected: float, *, requests: int = 4, decodes: int = 4) -> StepTimes:
    timing = StepTiming(0, 0, 0, 0, 0)
    return StepTimes(number, requests, 4, decodes, 0, False, timing, 0.0, 0.0, collected, 0.0)


# The whole


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """With decode steps and without, with a peer; an older line is there already."""
    out = tmp_path_factory.mktemp("results") / "lines.jsonl"
    out.write_text('{"old": true}\n')
    with pytest.MonkeyPatch.context() as patch:
        arguments = (
            "--workload tiny --shape tiny --requests 3 --prompt 16 --output 1 --runs 2 --peer transformers"
        )
        patch.setattr(sys, "argv", ["engine", *arguments.split(), "--out", str(out)])
        benchmark.main()
    old, *new = map(json.loads, out.read_text().splitlines())
    assert old == {"old": True}
    return new


def test_each_run_is_a_line_that_has_what_there_is_to_know(lines: list[dict[str, Any]]) -> None:
    ours = [line for line in lines if line["peer"] is None and line["workload"] == "tiny"]
    assert [(line["overlap"], line["run"]) for line in ours] == [(True, 0), (True, 1), (False, 0), (False, 1)]
    for line in ours:
        assert line["tokens_checked"] is line["tokens_equal"] is True
        assert line["cached_tokens"] == 0
        assert line["steps"] == line["output"] == 64
        assert set(line["host_ms"]) == {
            "inbox", "schedule", "prepare", "launch", "collect", "commit", "publish",
        }  # fmt: skip
        assert all(time > 0 for time in line["host_ms"].values())
        assert line["percent_of_limit"] > 0 and line["percent_of_matmul_limit"] > 0
        assert line["percent_of_total_limit"] == 100 * line["limit_total_s"] / line["total_s"]
        assert line["startup_s"]["weights"] < line["start_s"]
        assert line["limit_ms"] == ours[0]["limit_ms"]


def test_without_decode_steps_there_is_no_limit_of_one(lines: list[dict[str, Any]]) -> None:
    ours = [line for line in lines if line["peer"] is None and line["output"] == 1]
    assert len(ours) == 4
    for line in ours:
        assert line["limit_ms"] is line["limit_matmul_ms"] is line["ms_per_step"] is None
        assert line["percent_of_total_limit"] > 0 and line["host_ms"]["schedule"] > 0
        assert line["tokens_checked"] is line["tokens_equal"] is True


def test_a_peer_has_the_same_weights_and_prompts_and_its_ratio(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["peer"] is None or "error" in line:
            continue
        own = next(
            x
            for x in lines
            if x["peer"] is None and all(x[key] == line[key] for key in ("workload", "overlap", "run"))
        )
        assert line["tokens_checked"]
        if not torch.cuda.is_available():  # there it is bfloat16, and other kernels round otherwise
            assert line["tokens_equal_share"] == 1
        assert line["ratio"] == own["output_tokens_per_s"] / line["output_tokens_per_s"]
    compared = [line for line in lines if line["peer"] and not line["overlap"]]
    assert len(compared) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers batches asynchronously on a GPU")
def test_a_peer_that_fails_is_a_line_and_the_others_go_on(lines: list[dict[str, Any]]) -> None:
    failed = [line for line in lines if "error" in line]
    assert [(line["peer"], line["overlap"]) for line in failed] == [("transformers", True)] * 2
    assert all("Async batching requires" in line["error"] for line in failed)
    assert "Async batching requires" in screen(failed)[-1]


@pytest.mark.gpu
def test_kernels_are_busy_for_a_share_of_a_step(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line["peer"] is None and line["output"] > 1:  # the other has one step, which is no share of itself
            assert 0 < line["gpu_active_kernels"] <= 1
            assert line["kernel_ms_per_step"] < line["profiled_ms_per_step"]


def test_the_page_of_these_lines(lines: list[dict[str, Any]]) -> None:
    page = engine_page(lines)
    speed, times = page.split("Where the time goes.")
    rows = [row for row in speed.splitlines() if "| tiny | " in row]
    assert len(rows) == 2 and all("| 2 |" in row and " to " in row and "yes | yes |" in row for row in rows)
    assert "| tiny, transformers | off | 2 |" in speed
    assert "| tiny | on | 2 |" in times


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "name a --workload, --shape or --model"),
        ("--workload tiny --runs 0", "argument --runs: 0 is less than 1"),
        pytest.param(
            "--workload tiny --peer vllm",
            "argument --peer: vllm is not installed here",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="it is"),
        ),
        ("--workload tiny --out /nowhere/lines", "argument --out: /nowhere/lines can't be written"),
        ("--model /nowhere", "argument --model: there is no folder /nowhere"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine", *arguments.split()])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_8b_model_is_not_tried_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["engine", "--workload", "8b-b32"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "there is no GPU" in capsys.readouterr().err


# Its parts


def test_runs_have_different_prompts_and_the_same_each_time() -> None:
    workload = Workload("x", "tiny", 3, 16, 1)
    assert random_prompts(workload, 1) == random_prompts(workload, 1)
    tokens = [prompt for seed in (0, 1) for prompt in random_prompts(workload, seed)]
    assert len({tuple(prompt[:8]) for prompt in tokens}) == 6


@pytest.mark.parametrize("shape", ["8b", "0.6b", "tiny"])
def test_limits_count_what_the_model_computes(shape: str, tmp_path: Path) -> None:
    """Against torch's own counter, over transformers' model as it stands."""
    directory = save_config(shape, tmp_path, 64)
    config = transformers.AutoConfig.from_pretrained(directory)
    config.num_hidden_layers, prompt = 2, 24
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, attn_implementation="sdpa")
        tokens, mask = torch.zeros(1, prompt, dtype=torch.long), torch.zeros(1, 1, prompt, prompt)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(tokens, attention_mask=mask, position_ids=tokens, use_cache=False, logits_to_keep=1)
    widths = Widths.of(config)
    attention = widths.attention_flops(prompt)
    head = widths.vocabulary * widths.hidden
    # The counter takes attention for as much as if it was not causal.
    assert counter.get_total_flops() == 2 * prompt * widths.layer_weights + 2 * head + 2 * attention
    assert SHAPES[shape]["vocab_size"] == widths.vocabulary


def test_limits_grow_with_the_work() -> None:
    config = transformers.LlamaConfig(**{k: v for k, v in SHAPES["tiny"].items() if k != "model_type"})

    def limits(workload: Workload, prompt: int) -> Any:
        settings = {"max_tokens_per_step": 64, "bandwidth": 1e9, "dtype": torch.float32}
        return measure_limits(config, workload, prompt, device=torch.device("cpu"), **settings)  # type: ignore[arg-type]

    short = limits(Workload("x", "tiny", 4, 16, 8), 16)
    long = limits(Workload("x", "tiny", 4, 16, 4096), 16)
    cache = 4 * (4096 - 8) / 2 * 2 * 64 * 4 * 2  # requests, mean context, K and V, widths, bytes, layers
    assert long.limit_ms - short.limit_ms == pytest.approx(cache / 1e9 * 1e3)
    assert short.limit_matmul_ms > short.matmul_ms > 0
    assert long.limit_total_s > 4095 * cache / 1e9
    assert short.read_gb_per_s == 1


def test_percentages_only_of_what_is_known() -> None:
    line = {"limit_ms": 4.0, "ms_per_step": 5.0, "limit_matmul_ms": None, "total_s": 2.0}
    assert percentages(line) == {"percent_of_limit": 80.0}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12))), st.integers(0, 20), st.integers(1, 15))
def test_busy_is_the_union_within_the_window(spans: list[tuple[int, int]], begin: int, length: int) -> None:
    ticks = {tick for first, n in spans for tick in range(first, first + n)}
    found = busy([Span(first, first + n) for first, n in spans], begin, begin + length)
    assert found == len(ticks & set(range(begin, begin + length)))


def test_kernels_count_in_full_steps_only_by_any_clock() -> None:
    steps = [step(i, 10 + i, requests=4 if i < 5 else 2) for i in range(8)]
    # Each step's kernels end with it and take three quarters of it; those of the small ones, one.
    spans = [Span(1000 + i - (0.75 if i < 5 else 0.25), 1000 + i) for i in range(8)]
    found = kernel_figures(spans, steps)
    assert found["gpu_active_kernels"] == pytest.approx(0.75)
    assert found["kernel_ms_per_step"] == pytest.approx(750)
    assert found["profiled_ms_per_step"] == pytest.approx(1000)
    assert kernel_figures([], steps) == {"gpu_active_kernels": None}


def test_phases_are_summed_over_a_step_and_steps_with_prompts_left_out() -> None:
    steps = [step(0, 1.0, decodes=0), step(1, 2.0), step(2, 3.0)]
    spans = [HostSpan("schedule", 0, 0.0, 0.5), HostSpan("idle", 0, 0.5, 0.9)]
    for number in (1, 2):
        spans += [HostSpan("publish", number, number, number + 0.001), HostSpan("publish", number, 5, 5.002)]
    found = host_ms(Recording(steps, spans))
    assert found["publish"] == pytest.approx(3)
    assert found["schedule"] == 0
    assert "idle" not in found


def test_figures_of_a_peer() -> None:
    found = figures(1.0, [[2.0, 2.5, 3.0], [2.0, 2.5, 5.0]], [[1, 2, 3], [4, 5, 6]], 3)
    assert found["ms_per_step"] == 500 and 500 < found["ms_per_step_p99"] < 2500
    assert (found["total_s"], found["output_tokens_per_s"], found["tokens_checked"]) == (4.0, 1.5, True)
    one = figures(1.0, [[2.0], [2.0]], [[1], []], 1)
    assert one["ms_per_step"] is one["ms_per_step_p99"] is None and not one["tokens_checked"]


def test_work_within_its_time_and_work_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GRACE", 0.05)
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda: None)  # pytest has its own stderr
    assert within(10, lambda stop: stop.is_set()) is False

    def fails(stop: threading.Event) -> None:
        raise KeyError("here")

    with pytest.raises(KeyError):
        within(10, fails)
    monkeypatch.setattr(peers, "GRACE", 10)
    with pytest.raises(TimeoutError, match="nothing after"):
        within(0.01, lambda stop: stop.wait())
    monkeypatch.setattr(peers, "GRACE", 0.01)
    end = threading.Event()
    with pytest.raises(Stuck):
        within(0.01, lambda stop: end.wait())
    end.set()


# Pages of lines of any age


def test_old_lines_keep_their_rows_below_newer_ones() -> None:
    old = {
        "workload": "8b-b32", "overlap": True, "peer": None, "version": "eager", "date": "2026-11-29",
        "device": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17.0", "ms_per_step": 8.0,
        "limit_ms": 4.0, "tokens_equal": True, "host_ms": {"schedule": 0.5}, "start_s": 5.0,
    }  # fmt: skip
    changes = {"version": "new", "limit_matmul_ms": 4.5, "tokens_checked": True}
    new = [old | changes | {"ms_per_step": ms, "run": i} for i, ms in enumerate((5.0, 6.0))]
    speed, times = engine_page([old, *new]).split("Where the time goes.")
    cells = [[cell.strip() for cell in row.split("|")] for row in speed.splitlines() if "8b-b32" in row]
    assert [row[2:6] for row in cells] == [["new", "8b-b32", "on", "2"], ["eager", "8b-b32", "on", "1"]]
    assert cells[0][6:10] == ["5.50 (5.00 to 6.00)", "", "4.00 (4.00 to 4.00)", "73 (67 to 80)"]
    assert cells[1][6:11] == ["8.00", "", "4.00", "50", ""]
    assert [row[-3:-1] for row in cells] == [["yes", "yes"], ["yes", ""]]
    assert times.count("| 8b-b32 |") == 2
