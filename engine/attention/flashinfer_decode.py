"""Decode by FlashInfer's XQA kernel, in place of the Triton one: `pip install stepahead[flashinfer]`.

Of FlashInfer's decode kernels for this GPU, XQA alone needs no plan made on the host for each step: it reads
lengths and block tables on the device, so a captured graph stays right as they grow. It splits contexts
evenly, and only if there are fewer pairs of sequence and key-value head than multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from packaging.version import Version

if TYPE_CHECKING:
    from engine.probe import LayerSpec

OLDEST = "0.6.17"  # before it, a split that came late could overwrite the merged output
WORKSPACE_BYTES = 4 << 20
"""Three times what a GPU full of splits (one for each multiprocessor) of 16 heads of 256 leaves behind."""


def takes(group: int, head_dim: int, window: int | None, softcap: float | None) -> bool:
    """Whether XQA decodes a layer with `group` query heads to a key-value head.

    It knows no soft cap, and reads, with weight 0, values that a window has left behind: garbage times 0.
    """
    return group <= 16 and head_dim <= 256 and head_dim % 16 == 0 and window is None and softcap is None


def check_flashinfer(
    layers: Iterable[LayerSpec], *, device: torch.device, dtype: torch.dtype, block_size: int
) -> None:
    """Raise `ValueError`, which names the setting, unless XQA can decode some of the layers."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype: attention by flashinfer takes bfloat16 or float16, not {dtype}")
    if block_size not in (16, 32, 64, 128):
        raise ValueError(f"block_size: attention by flashinfer takes 16, 32, 64 or 128, not {block_size}")
    if not any(
        takes(each.heads // each.kv_heads, each.head_dim, each.window, each.softcap) for each in layers
    ):
        raise ValueError(
            "attention: flashinfer decodes no layer of this model: it takes head dimensions up to 256 that "
            "are multiples of 16, up to 16 query heads to a key-value head, and neither window nor soft cap"
        )
    try:
        installed = version("flashinfer-python")
    except PackageNotFoundError as error:
        raise ValueError(
            "attention: flashinfer is not installed (pip install 'stepahead[flashinfer]')"
        ) from error
    if Version(installed) < Version(OLDEST):
        raise ValueError(f"attention: flashinfer must be {OLDEST} or later, not {installed}")
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10, 12):
        raise ValueError(f"device: attention by flashinfer needs a Hopper or Blackwell GPU, not {device}")


def flashinfer_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    context_len: torch.Tensor,
    block_tables: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    num_decodes: int,
    scale: float,
) -> None:
    """Fill out[:num_decodes] (contiguous): token i attends over sequence i, up to context_len[i].

    `arrivals`: int32, one for each sequence and key-value head, 0 between launches. The first call compiles.
    """
    from flashinfer import xqa

    head_dim = query.shape[2]
    xqa(
        query[:num_decodes].contiguous()[:, None],
        key_cache,
        value_cache,
        block_tables[:num_decodes].contiguous(),
        context_len[:num_decodes, None].view(torch.uint32),
        out[:num_decodes, None],
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device),
        arrivals.view(torch.uint32),
        num_kv_heads=key_cache.shape[2],
        page_size=key_cache.shape[1],
        q_scale=scale * head_dim**0.5,  # by whose inverse XQA multiplies
    )
