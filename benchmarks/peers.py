"""Other systems on the same shapes and prompts, for `python -m benchmarks.engine --peer vllm transformers`.

A peer runs in a thread of its own with a limit: one that does not end costs the rest of the peers
and nothing else.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from benchmarks.measuring import Prompts

T = TypeVar("T")

GRACE = 45.0
"""Seconds that a peer has to end once it is asked to."""
MASKED_TOKENS, MASKED_BLOCK = 1024, 64
"""Tokens of a step and of a block of transformers where its attention needs a mask.

The mask has a row for every token of a step and a column for every token of the cache, and in
asynchronous mode all of it is copied to the device in every step. At the sizes that transformers takes
by itself, most of a GPU's memory, that is tens of GB. So here the cache is just large enough.
"""


BLOCK_SIZE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
"""What transformers calls the tokens of a block of its cache."""


class Peer(Protocol):
    """Another system on one model; made with the directory that has its configuration."""

    def run(
        self, warm_up: Prompts, runs: list[Prompts], output: int, asynchronous: bool, stop: threading.Event
    ) -> list[tuple[dict[str, Any], Prompts | None]]:
        """Of each run's prompts, all admitted at once: the figures, and every request's tokens.

        No tokens where its weights are not the engine's. Raises `TimeoutError` once `stop` is set, and what
        fails there.
        """


class Stuck(RuntimeError):
    """A peer ended neither in its time nor when asked to: its threads remain, and may use the device."""


def within(limit_s: float, work: Callable[[threading.Event], T]) -> T:
    """What `work` returns. The event it is given is set when its time is over, for it to end.

    Raises what `work` raises, `TimeoutError` if its time was over, `Stuck` if it did not end even then.
    """
    stop = threading.Event()
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def body() -> None:
        try:
            result.set_result(work(stop))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=body, name="peer", daemon=True)
    thread.start()
    done, _ = concurrent.futures.wait([result], limit_s)
    if done:
        return result.result()
    faulthandler.dump_traceback()  # where it is
    stop.set()
    thread.join(GRACE)
    if thread.is_alive():
        raise Stuck(f"nothing after {limit_s:.0f} s, nor did it end when asked to")
    raise TimeoutError(f"nothing after {limit_s:.0f} s")


def figures(began: float, stamps: list[list[float]], tokens: Prompts, output: int) -> dict[str, Any]:
    """Of a run that `began` then, by when each request's tokens came, in seconds of one clock."""
    steps = np.concatenate([np.diff(each) for each in stamps]) * 1e3
    total_s = max(each[-1] for each in stamps) - began
    return {
        "ms_per_step": float(np.median(steps)) if len(steps) else None,
        "ms_per_step_p99": float(np.percentile(steps, 99)) if len(steps) else None,
        "total_s": total_s,
        "output_tokens_per_s": sum(map(len, tokens)) / total_s,
        "tokens_checked": all(len(each) == output for each in tokens),
    }


def _has_flash_attention() -> bool:
    return any(
        found(kernels_fallback_ok=True) for found in (is_flash_attn_3_available, is_flash_attn_2_available)
    )


class Transformers:
    """transformers' continuous batching on random weights drawn like the engine's."""

    def __init__(self, directory: str) -> None:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        dtype = torch.bfloat16 if on_gpu else torch.float32
        auto: Any = AutoModelForCausalLM
        with torch.random.fork_rng([device] if on_gpu else []), device:
            torch.manual_seed(0)
            self._model = auto.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
        self._model.train(False).requires_grad_(False)

    def run(
        self, warm_up: Prompts, runs: list[Prompts], output: int, asynchronous: bool, stop: threading.Event
    ) -> list[tuple[dict[str, Any], Prompts | None]]:
        kind: Any = GenerationConfig
        generation = kind(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        settings: dict[str, Any] = {"use_async_batching": asynchronous}
        longest = max(len(prompt) for prompts in runs for prompt in prompts)
        if not _has_flash_attention():
            blocks = -(-(longest + output) // MASKED_BLOCK) + 1
            settings |= {
                BLOCK_SIZE: MASKED_BLOCK,
                "num_blocks": len(warm_up) * blocks + 1,
                "max_batch_tokens": MASKED_TOKENS,
                "safety_margin": 0.0,  # there is a block for every token
            }
        manager = self._model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(**settings),
            workload_hints=WorkloadHints(longest, output, len(warm_up)),
        )
        attention = self._model.config._attn_implementation
        manager.warmup()
        manager.start()
        found = []
        try:
            self._batch(manager, warm_up, min(output, 33), stop)
            found += [self._batch(manager, prompts, output, stop) for prompts in runs]
        finally:
            manager.stop(block=True, timeout=GRACE / 2, hard_stop=not found)
            if manager.is_running():  # what it has for its end would wait for ever
                raise Stuck("its loop did not end when asked to")
            manager.destroy()
        return [(figures | {"peer_attention": attention}, tokens) for figures, tokens in found]

    def _batch(
        self, manager: Any, prompts: list[list[int]], output: int, stop: threading.Event
    ) -> tuple[dict[str, Any], list[list[int]]]:
        names = manager.add_requests(inputs=prompts, max_new_tokens=output, record_timestamps=True)
        results: dict[str, Any] = {}
        while len(results) < len(names):
            result = manager.get_result(timeout=1)
            if stop.is_set():
                raise TimeoutError(f"{len(results)} of {len(names)} requests were through")
            if result is None and not manager.is_running():
                raise RuntimeError(f"its loop ended: {manager.background_thread_status.fatal_error!r}")
            if result is not None and result.error is not None:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                results[result.request_id] = result
        outputs = [results[name] for name in names]
        tokens = [list(each.generated_tokens) for each in outputs]
        stamps = [each.timestamps for each in outputs]
        began = min(each.created_time for each in outputs)
        return figures(began, stamps, tokens, output), tokens


class Vllm:
    """vLLM as it comes, its engine in a process of its own. Random weights it makes itself."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._names = count()

    def run(
        self, warm_up: Prompts, runs: list[Prompts], output: int, asynchronous: bool, stop: threading.Event
    ) -> list[tuple[dict[str, Any], Prompts | None]]:
        import vllm

        random = not any(Path(self._directory).glob("*.safetensors"))
        began = time.perf_counter()
        llm = vllm.LLM(
            model=self._directory,
            skip_tokenizer_init=True,
            load_format="dummy" if random else "auto",
            max_model_len=max(len(prompt) for prompts in runs for prompt in prompts) + output,
            max_num_seqs=len(warm_up),
            gpu_memory_utilization=0.85,  # this process has a context there, too
            async_scheduling=asynchronous,
        )
        about = {"peer_version": vllm.__version__, "start_s": time.perf_counter() - began}
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=output, ignore_eos=True, detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )  # fmt: skip
        try:
            self._batch(llm.llm_engine, warm_up, sampling, stop)
            found = [self._batch(llm.llm_engine, prompts, sampling, stop) for prompts in runs]
        finally:
            llm.llm_engine.engine_core.shutdown()
        return [
            (figures(began, stamps, tokens, output) | about, None if random else tokens)
            for began, stamps, tokens in found
        ]

    def _batch(
        self, engine: Any, prompts: Prompts, sampling: Any, stop: threading.Event
    ) -> tuple[float, list[list[float]], Prompts]:
        began = time.perf_counter()
        names = [str(next(self._names)) for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, sampling)
        stamps: dict[str, list[float]] = {name: [] for name in names}
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            if stop.is_set():
                raise TimeoutError("vLLM was not through")
            for each in outputs:
                stamps[each.request_id].append(now)
                tokens[each.request_id] += each.outputs[0].token_ids
        return began, list(stamps.values()), list(tokens.values())


PEERS: dict[str, Callable[[str], Peer]] = {"transformers": Transformers, "vllm": Vllm}
