"""Kernels that start before the one ahead of them has ended: what they may do before they wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.norm import rms_norm
from tests.attention_reference import random_step

triton = pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = triton.knobs.runtime.interpret
ROOT = Path(__file__).parents[1]

# A process of its own, since triton may be set to interpret in this one.
COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engine.attention.triton_decode import _decode_kernel as kernel

sizes = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "ALIGN": 16, "TILE": 64}
sizes |= {"MIN_TILES": 4, "CUT_TILES": 4, "PROGRAMS": 33, "WINDOW": False, "SOFTCAP": False}
sizes |= {"PADDED_SEQUENCES": 32, "ROWS": 16}
sizes |= {"PADDED_GROUP": 4, "PADDED_DIM": 128, "MERGE": 16, "ALL": True, "FRESH": sys.argv[1] == "fresh"}
sizes |= {"NORM": False, "DEPENDENT": True}
kinds = {
    "*bf16": "out query key_cache value_cache key value cos sin query_norm key_norm",
    "*i32": "query_start query_len context_len block_tables arrivals cache_slots",
    "*fp32": "partial partial_lse",
    "fp32": "eps inner outer",
}
named = {name: kind for kind, names in kinds.items() for name in names.split()}
signature = {name: "constexpr" if name in sizes else named.get(name, "i32") for name in kernel.arg_names}
source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
print(compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])
"""


@pytest.mark.parametrize("keys", ["fresh", "cached"])
def test_decode_reads_lengths_before_it_waits_and_nothing_else(keys: str, tmp_path: Path) -> None:
    """Compiled for Hopper, which takes no GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, keys]
    ptx = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert ptx.count("griddepcontrol.wait") == 1  # programs without work do so, too
    accesses = re.findall(r"griddepcontrol\.\w+|\b(?:ld|st|atom|red|cp\.async)\.(?:\w+\.)*global\S*", ptx)
    assert accesses[0] == "griddepcontrol.launch_dependents" and accesses[2] == "griddepcontrol.wait"
    assert accesses[1].startswith("ld.global")


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET is set")
def test_programs_without_work_wait_too() -> None:
    """Or the kernel after a decode of nothing would read what the one ahead of it has not written yet."""
    from engine.attention.triton_backend import TritonAttention
    from engine.attention.triton_decode import decode

    step = random_step(
        [(40, 2), (9, 3)],
        num_decodes=0,
        heads=8,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    batch, out = step.batch, torch.zeros_like(step.query)
    scratch = TritonAttention(max_sequences=2, heads=8, kv_heads=2, head_dim=64, device="cuda").scratch
    # Few programs, each of which takes long: the other multiprocessors are free for the kernels after it.
    inputs = torch.randn(2, 32, 1 << 16, dtype=torch.bfloat16, device="cuda")
    weight, x = torch.ones_like(inputs[0, 0]), inputs[0].clone()

    def work() -> torch.Tensor:
        first = rms_norm(x, weight, 1e-6)
        decode(
            out,
            step.query,
            step.cache.key,
            step.cache.value,
            batch.query_start,
            batch.query_len,
            batch.context_len,
            batch.block_tables,
            scratch,
            num_decodes=len(batch.query_len),
            every=False,
            scale=step.scale,
        )
        second: torch.Tensor = rms_norm(first, weight, 1e-6)
        return second

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    for i in range(50):
        x.copy_(inputs[i % 2])
        graph.replay()
        wanted = rms_norm(x, weight, 1e-6)
        torch.cuda.synchronize()
        assert torch.equal(result, rms_norm(wanted, weight, 1e-6))
    assert not out.any()
