"""Compiles a model's whole forward, once for every batch size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.lowering import add_needs_realized_inputs
from transformers import PreTrainedModel

from engine.fused_attention import fuse_attention
from engine.fusion import FusionPass, fuse_norms, fuse_projections
from engine.probe import LayerSpec


def compile_model(model: PreTrainedModel, layers: list[LayerSpec]) -> Any:
    """The model's forward with fewer kernels, compiled at its first call. Changes the model in place.

    All sizes are symbolic, so batches need no compilation of their own as long as no size is 0 or
    1, which compilers take for constants. A graph break, or one compilation after the other, is an
    error, where torch would go on uncompiled without a word.
    """
    fuse_projections(model)
    fuse_norms(model)
    fuse_attention(model, layers)
    # Not /tmp, so that the second start finds what the first one compiled.
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache) / "stepahead" / "inductor"))
    if (attention := getattr(torch.ops.stepahead, "paged_attention", None)) is not None:
        # Else the first compilation, in which the op is new, computes cosines and sines for every layer.
        add_needs_realized_inputs(attention)  # type: ignore[no-untyped-call]
    inductor.post_grad_custom_pre_pass = FusionPass()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, fullgraph=True, dynamic=True)
