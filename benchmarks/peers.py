"""Other systems on the same weights and prompts, for `python -m benchmarks.engine --peer transformers`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def run_transformers(
    directory: str, prompts: list[list[int]], output: int, asynchronous: bool
) -> tuple[dict[str, Any], list[list[int]]]:
    """transformers' continuous batching with random bf16 weights drawn like the engine's.

    Returns the figures and every request's tokens. The same batch runs once before the one measured.
    """
    device = torch.device("cuda")
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    with device:
        model = auto.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    model.train(False)
    kind: Any = GenerationConfig
    generation = kind(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(use_async_batching=asynchronous)

    def generate() -> list[Any]:
        found = model.generate_batch(
            inputs=prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            record_timestamps=True,
            progress_bar=False,
        )
        return [found[key] for key in sorted(found, key=lambda key: int(key.rsplit("_", 1)[-1]))]

    generate()
    begin = time.perf_counter()
    outputs = generate()
    whole_s = time.perf_counter() - begin
    stamps = [each.timestamps for each in outputs]
    steps = np.concatenate([np.diff(each) for each in stamps]) * 1e3 if output > 1 else np.zeros(0)
    # Without the start of its manager, which a server would pay once.
    total_s = max(each[-1] for each in stamps) - min(each.created_time for each in outputs)
    figures = {
        "ms_per_step": float(np.median(steps)) if len(steps) else None,
        "ms_per_step_p99": float(np.percentile(steps, 99)) if len(steps) else None,
        "total_s": total_s,
        "whole_s": whole_s,
        "output_tokens_per_s": len(prompts) * output / total_s,
        "prompt_tokens": statistics.mean(map(len, prompts)),
    }
    return figures, [list(each.generated_tokens) for each in outputs]
