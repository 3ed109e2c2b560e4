"""Root mean square norms, alone and together with the residual addition before them, as one kernel each."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl

    from engine.triton_launch import await_previous_kernel, dependent_launch, launch_options
except ImportError:  # without a GPU there may be none, and nothing here then needs it
    triton = None


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), rounded as Llama rounds it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@torch.library.custom_op("stepahead::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., n] normed over n, times weight [n]."""
    return reference_rms_norm(x, weight, eps)


@torch.library.custom_op("stepahead::add_rms_norm", mutates_args=())
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum) of two [..., n]."""
    total = x + residual
    return reference_rms_norm(total, weight, eps), total


@rms_norm.register_fake
def _(x, weight, eps):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@add_rms_norm.register_fake
def _(x, residual, weight, eps):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))


if triton is not None:

    @triton.jit
    def _norm_kernel(
        out,
        total,
        x,
        residual,
        weight,
        eps,
        n,
        WIDTH: tl.constexpr,
        ADD: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        await_previous_kernel(DEPENDENT)
        row = tl.program_id(0).to(tl.int64) * n
        column = tl.arange(0, WIDTH)
        inside = column < n
        value = tl.load(x + row + column, mask=inside, other=0.0)
        if ADD:
            value += tl.load(residual + row + column, mask=inside, other=0.0)
            tl.store(total + row + column, value, mask=inside)
        wide = value.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / n + eps)
        scaled = wide.to(value.dtype) * tl.load(weight + column, mask=inside, other=0.0)
        tl.store(out + row + column, scaled, mask=inside)

    def _launch(x, residual, weight, eps):
        x = x.contiguous()
        out, n = torch.empty_like(x), x.shape[-1]
        total = torch.empty_like(x) if residual is not None else out
        dependent = dependent_launch(x.device)
        _norm_kernel[(x.numel() // n,)](
            out,
            total,
            x,
            x if residual is None else residual.contiguous(),
            weight,
            eps,
            n,
            WIDTH=triton.next_power_of_2(n),
            ADD=residual is not None,
            DEPENDENT=dependent,
            num_warps=8 if n > 2048 else 4,
            **launch_options(dependent),
        )
        return out, total

    @rms_norm.register_kernel("cuda")
    def _(x, weight, eps):
        return _launch(x, None, weight, eps)[0]

    @add_rms_norm.register_kernel("cuda")
    def _(x, residual, weight, eps):
        return _launch(x, residual, weight, eps)
