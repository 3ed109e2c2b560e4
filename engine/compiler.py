"""Compiles a model's whole forward, once for every batch size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from torch._inductor.lowering import constrain_to_fake_tensors, lowerings, make_fallback
from transformers import PreTrainedModel

from engine.fused_attention import fuse_attention
from engine.fused_mlp import fuse_mlps
from engine.fusion import FusionPass, fuse_norms, fuse_projections
from engine.probe import LayerSpec

OPERATIONS = ("paged_attention", "project", "project_add", "rms_norm", "add_rms_norm")
"""To be called as they are. Said before, since a compiler that meets a new one late in a model spells out,
for its log, all that leads there, which doubles with each layer."""


def compile_model(model: PreTrainedModel, layers: list[LayerSpec]) -> Any:
    """The model's forward with fewer kernels, compiled at its first call. Changes the model in place.

    All sizes are symbolic, so batches need no compilation of their own as long as no size is 0 or
    1, which compilers take for constants. A graph break, or one compilation after the other, is an
    error, where torch would go on uncompiled without a word.
    """
    fuse_projections(model)
    fuse_norms(model)
    fused = (fuse_attention(model, layers), fuse_mlps(model))
    # Not /tmp, so that the second start finds what the first one compiled.
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache) / "stepahead" / "inductor"))
    for name in OPERATIONS:
        operation = getattr(torch.ops.stepahead, name, None)  # attention has one by its backend
        if operation is not None and operation.default not in lowerings:
            # With the strides of eager mode, as an operation met on the way has.
            make_fallback(operation.default, constrain_to_fake_tensors, warn=False)  # type: ignore[no-untyped-call]
    inductor.post_grad_custom_pre_pass = FusionPass()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # Each would trace the model a second time: numbers of modules as inputs, and sizes taken for equal
    # because they were so in the first step.
    torch._dynamo.config.specialize_float = True
    torch.fx.experimental._config.use_duck_shape = False
    options: dict[str, Any] = {}
    if fused == (len(layers), len(layers)):
        # Little is left to the compiler, and what several operations read is computed once: on a GPU every
        # fourth attention call had cosines computed for it.
        options["realize_reads_threshold"] = 0
    return torch.compile(model, fullgraph=True, dynamic=True, options=options)
