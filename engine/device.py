"""Which device and dtype an engine uses, and how large its cache may be there."""

from __future__ import annotations

import os
from typing import Protocol

import torch
from transformers import AutoConfig

from engine.attention import LayerCache
from engine.config import EngineConfig
from engine.graphs import mixed_buckets
from engine.lanes import make_lanes
from engine.plan import StepPlan, scratch_plan
from engine.runner import Model, Runner
from engine.slots import AT_ONCE


class SizedModel(Model, Protocol):
    def cache_bytes_per_block(self, block_size: int) -> int: ...

    def allocate_cache(self, num_blocks: int, block_size: int) -> list[LayerCache]: ...


def choose_device(config: EngineConfig) -> torch.device:
    """Raises `ValueError` naming `device` where a GPU is asked for and torch sees none, or `attention`."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch sees no GPU")
    if config.attention == "torch" and (config.compile or config.cuda_graphs):
        raise ValueError(
            "attention: torch reads lengths on the host, so on a GPU it needs "
            "compile: false and cuda_graphs: false"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Of weights and cache: as configured, or the checkpoint's on a GPU and float32 on a CPU."""
    if config.dtype != "auto":
        found: torch.dtype = getattr(torch, config.dtype)
        return found
    if device.type == "cpu":
        return torch.float32
    stored = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code).dtype
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def choose_num_blocks(config: EngineConfig, model: SizedModel, max_blocks: int, device: torch.device) -> int:
    """Blocks of the cache, the scratch block included.

    On a GPU: what `memory_fraction` leaves beside the weights, the largest step that can be
    planned, and the memory that captured graphs keep, both measured by running such steps.
    Raises `ValueError` naming the setting to change if not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = model.cache_bytes_per_block(config.block_size)
    if device.type == "cpu":
        setting, room = "cpu_cache_gib", config.cpu_cache_gib * 2**30
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if room > memory:
            raise ValueError(
                f"{setting}: {config.cpu_cache_gib:g} are more than this machine has ({memory / 2**30:.1f})"
            )
    else:
        s = config.max_running_requests
        runner = make_runner(config, model, 2, max_blocks, device, depth=1)
        warm_up(runner)
        context = max_blocks * config.block_size
        plan = scratch_plan(config.max_tokens_per_step, s, context, max_blocks, everything=True)
        largest = _peak_bytes(runner, plan)
        captured = 0
        if config.cuda_graphs:
            most, _ = mixed_buckets(config.max_tokens_per_step, s)[-1]
            sizes = {s, max(s, most)}  # in tokens, of s sequences
            captured = max(_peak_bytes(runner, scratch_plan(t, s, context, max_blocks)) for t in sizes)
            # Logits lie outside the memory that graphs reuse for one another.
            captured += s * model.vocab_size * runner.caches[0].key.dtype.itemsize
        # What grammars take: a copy of the logits, masked some rows at a time; five 32-bit numbers a token.
        largest += model.vocab_size * (4 * s + 20 * AT_ONCE)
        del runner
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        setting = "memory_fraction"
        room = total * config.memory_fraction - (total - free) - largest - captured
    if room < 2 * block_bytes:
        raise ValueError(
            f"{setting}: leaves {room / 2**20:.0f} MiB for the key-value cache, and the smallest one "
            f"takes {2 * block_bytes / 2**20:.0f} MiB"
        )
    return int(room // block_bytes)


def make_runner(
    config: EngineConfig,
    model: SizedModel,
    num_blocks: int,
    max_blocks: int,
    device: torch.device,
    depth: int,
) -> Runner:
    """With a cache of `num_blocks`; sequences of at most `max_blocks`, and `depth` steps in flight."""
    return Runner(
        model,
        model.allocate_cache(num_blocks, config.block_size),
        make_lanes(device),
        device,
        max_tokens=config.max_tokens_per_step,
        max_sequences=config.max_running_requests,
        max_blocks=max_blocks,
        depth=depth,
        min_sequences=2 if device.type == "cuda" else 1,
    )


def warm_up(runner: Runner) -> None:
    """Run a small step, so that whatever is compiled at first use is compiled now.

    Its sizes all differ, so that a compiler for symbolic sizes takes none for another.
    """
    tokens, sequences = min(11, runner.max_tokens), min(7, runner.max_sequences)
    runner.launch(scratch_plan(tokens, sequences, 3, runner.max_blocks, everything=True))
    runner.collect()
    runner.penalties.release()


def _peak_bytes(runner: Runner, plan: StepPlan) -> int:
    """Memory that a step needs while it runs."""
    device = runner.last_token.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.launch(plan)
    runner.collect()
    return torch.cuda.max_memory_allocated(device) - before
