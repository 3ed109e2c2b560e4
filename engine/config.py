"""Every setting of one engine, with its unit and default."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0, le=2**31 - 1)]


class EngineConfig(BaseModel):
    """Settings of one engine. Frozen; an unknown or ill-typed key is refused with its name.

    `None` means 'derive it': from the model (`context_length`, `dtype: auto`), or by measuring the
    largest step at start and giving the rest of the memory to the cache (`num_blocks`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(default="demo", min_length=1)
    """`demo`, a Hugging Face id, or a local directory."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of weights and cache. `auto`: the checkpoint's on a GPU, float32 on a CPU."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`auto`: a GPU where torch sees one."""
    load_format: Literal["safetensors", "random"] = "safetensors"
    """`random` draws the weights instead of reading them, for benchmarks of a shape."""
    trust_remote_code: bool = False
    """Run modelling code that comes with a checkpoint."""

    overlap: bool = True
    """Prepare step N+1 while the device runs N (pipeline depth 2); False is depth 1."""
    max_running_requests: Annotated[int, Field(gt=0, le=4096)] = 256
    """Requests computed in one step; each owns one row. The rest wait."""
    max_waiting_requests: Annotated[int, Field(gt=0, le=10**6)] = 4096
    """Requests that may wait; one more is refused at once."""
    max_waiting_tokens: Positive = 2**22
    """Prompt tokens that may wait for their first step; a request with more beside others is refused."""
    max_tokens_per_step: Positive = 8192
    """Tokens one step may compute: one for each decoding request, the rest for prompt chunks."""
    inter_token_target_ms: Annotated[float, Field(gt=0)] | None = None
    """If set, steps are measured at start, and are no larger than takes this many milliseconds."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and output together, at most; the model's own limit by default."""

    block_size: Literal[8, 16, 32, 64, 128, 256] = 16
    """Tokens per block of the key-value cache."""
    num_blocks: Annotated[int, Field(ge=2, le=2**26)] | None = None
    """Blocks in the cache, the scratch block included."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of a GPU's memory that weights, cache and the largest step may use together."""
    cpu_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Size of the cache where the device is a CPU, in GiB."""
    prefix_caching: bool = True
    """Share the blocks of equal prefixes."""

    attention: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
    """Backend of the paged attention. `auto`: triton on a GPU, torch on a CPU. `flashinfer`: triton, but its
    XQA kernel decodes (Hopper or Blackwell, 16 bits, blocks of 16 to 128; no windows, no soft cap)."""
    cuda_graphs: bool = True
    """Capture steps of up to 2,048 tokens as CUDA graphs (no effect on a CPU)."""
    compile: bool = True
    """Compile the model with fused kernels (no effect on a CPU). False starts sooner and runs slower."""
    nvtx: bool = False
    """Mark the phases of the engine's loop for Nsight Systems (needs a GPU)."""
    cpu_threads: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Threads of torch on a CPU; torch's own choice by default."""

    @model_validator(mode="after")
    def _decode_fits_in_a_step(self) -> Self:
        if self.max_tokens_per_step < self.max_running_requests:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) is below max_running_requests "
                f"({self.max_running_requests}): every running request decodes in every step"
            )
        return self

    @property
    def depth(self) -> int:
        """Steps in flight at once: the only difference between overlap on and off."""
        return 2 if self.overlap else 1
