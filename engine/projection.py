"""Projections with what stands before and after them, as operations that a compiler takes as they stand.

For few rows (a decode step) each is one kernel, and a norm between two projections is none: the first
stores its sum times the norm's weight and the squares of its sum, the second scales its result by the
norm's factor. That is the norm, since the factor is one number for each row, and a product is linear
in its rows. For many rows (prompts) they are the library's products and the separate kernels.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import torch
from torch.nn.functional import linear, silu

from engine.norm import add_rms_norm

MAX_ROWS = 64
PART = 64
"""Columns whose squares are summed up together: those of one program of the kernel."""
DEPTH = 128
"""The kernel takes a multiple of so many inputs."""

_library = torch.library.Library("stepahead", "FRAGMENT")
_library.define("project(Tensor x, Tensor weight, Tensor? squares, float eps, bool gated) -> Tensor")
_library.define(
    "project_add(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight, float eps)"
    " -> (Tensor, Tensor, Tensor)"
)
project = torch.ops.stepahead.project
"""x [..., K], weight [N, K] -> [..., N], of x's dtype.

With `gated`, weight is two matrices, one below the other: [..., N / 2], SiLU(first) * second.
With `squares` (and `eps`) of a `project_add`, x is what it gave, and is normed on the way.
"""
project_add = torch.ops.stepahead.project_add
"""(normed, total, squares): total = x @ weight.T + residual, [..., N], and its norm times norm_weight [N].

`normed` and `squares` together are for `project`; what they hold depends on the number of rows.
"""


def can_defer_norm(inputs: int, outputs: int, dtype: torch.dtype) -> bool:
    """Whether `project_add` takes a weight [outputs, inputs]: in float16 the unnormed sum may overflow."""
    return inputs % DEPTH == 0 and outputs % PART == 0 and dtype != torch.float16


def _few(x: torch.Tensor) -> bool:
    return x.numel() // x.shape[-1] <= MAX_ROWS


def _fast(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    return (
        x.is_cuda
        and _few(x)
        and x.dtype == torch.bfloat16
        and x.shape[-1] % DEPTH == 0
        and weight.shape[0] % (PART * (2 if gated else 1)) == 0
        and torch.cuda.get_device_capability(x.device)[0] in (9, 10)  # others have less shared memory
    )


def _project(x, weight, squares, eps, gated):
    if _fast(x, weight, gated):
        from engine import triton_projection  # comes with torch's CUDA builds only

        return triton_projection.launch(x, weight, squares=squares, eps=eps, gated=gated)[0]
    out = linear(x, weight)
    if squares is not None and _few(x):
        factor = torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)
        out = (out.float() * factor).to(x.dtype)
    if not gated:
        return out
    if x.is_cuda:
        from engine import triton_projection

        return triton_projection.gate(out)
    first, second = out.chunk(2, -1)
    return silu(first) * second


def _project_add(x, weight, residual, norm_weight, eps):
    if _fast(x, weight):
        from engine import triton_projection

        return triton_projection.launch(x, weight, residual=residual, norm_weight=norm_weight)
    out = linear(x, weight)
    if not _few(x):
        normed, total = add_rms_norm(out, residual, norm_weight, eps)
        return normed, total, x.new_empty(*x.shape[:-1], len(weight) // PART, dtype=torch.float32)
    total = out + residual
    squares = total.float().square().unflatten(-1, (-1, PART)).sum(-1)
    return total * norm_weight, total, squares


for _name, _function in (("project", _project), ("project_add", _project_add)):
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, _function, "CUDA")


@torch.library.register_fake("stepahead::project", lib=_library)
def _(x, weight, squares, eps, gated):
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


@torch.library.register_fake("stepahead::project_add", lib=_library)
def _(x, weight, residual, norm_weight, eps):
    shape = (*x.shape[:-1], weight.shape[0])
    squares = x.new_empty(*x.shape[:-1], weight.shape[0] // PART, dtype=torch.float32)
    return x.new_empty(shape), x.new_empty(shape), squares
