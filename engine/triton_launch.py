"""Programmatic dependent launch: a kernel gets ready while the one before it still runs.

On Hopper and later a kernel launched so takes its place on multiprocessors as soon as these are free,
and waits there for the memory of the kernel before it; so launches of a captured graph follow each
other without a gap. Whatever it reads of what dependent kernels make, and all that it writes, comes after
`await_previous_kernel` or `await_results`; every program of it gets there, or the kernel could end, and the
next one go on, before the one ahead of it has ended.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

if hasattr(tl.extra, "cuda"):
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def admit_next_kernel(DEPENDENT: tl.constexpr):
    """Let the kernel after this one get ready."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def await_results(DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one, and so for all before that."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def await_previous_kernel(DEPENDENT: tl.constexpr):
    """Both, for a kernel that can do nothing before."""
    admit_next_kernel(DEPENDENT)
    await_results(DEPENDENT)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere, where kernels are interpreted one program after the other."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on `device` are to be launched with DEPENDENT and `launch_options`."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and not triton.knobs.runtime.interpret
    )


def launch_options(dependent: bool, registers: int | None = None) -> dict[str, int]:
    """What makes a launch a dependent one, and limits the registers of its threads."""
    options: dict[str, int] = {"launch_pdl": True} if dependent else {}
    return options if registers is None else options | {"maxnreg": registers}
