"""Keeps a replica on the processor cores that are nearest to its GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pynvml

logger = logging.getLogger(__name__)

_WORD = 64  # bits in one of NVML's words, which are `unsigned long`


def pin_to_gpu(visible_devices: str) -> frozenset[int] | None:
    """Run all threads of this process on the cores of the GPU's own memory node.

    `visible_devices` names the GPU as `CUDA_VISIBLE_DEVICES` does; Ray sets it, one for each replica.
    Call it before the engine starts: what is allocated then lies near, and threads inherit the cores.
    Returns the cores, or None where nothing was changed: no NVML, a slice of a GPU, all cores equally near.
    """
    allowed = os.sched_getaffinity(0)
    try:
        pynvml.nvmlInit()
        if visible_devices.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible_devices))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible_devices)
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, max(allowed) // _WORD + 1)
    except pynvml.NVMLError as error:
        logger.info("not pinned to the cores near GPU %s: %s", visible_devices, error)
        return None
    near = frozenset(core for core in allowed if words[core // _WORD] >> core % _WORD & 1)
    if not near or near == allowed:
        return None
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), near)
        except ProcessLookupError:
            continue  # it has ended
    logger.info("pinned to %d cores near GPU %s", len(near), visible_devices)
    return near
