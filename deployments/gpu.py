"""The replica's own GPU as NVML sees it. What it does not tell is left out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One moment. None: this GPU, or a MIG slice, does not say."""

    utilization: float | None
    """Share of NVML's last sample (up to a second) in which a kernel ran."""
    memory_used: int | None
    """Bytes."""
    memory_total: int | None
    power: float | None
    """Watts."""
    energy: float | None
    """Joules since the driver was loaded."""


class Gpu:
    """Whole, or a MIG slice: of a slice only the memory is its own."""

    def __init__(self, uuid: str) -> None:
        """Raises `pynvml.NVMLError` where there is no NVML, or no such GPU."""
        pynvml.nvmlInit()
        self.uuid = uuid
        self.mig = uuid.startswith("MIG-")
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        name = pynvml.nvmlDeviceGetName(self._handle)
        self.name: str = name.decode() if isinstance(name, bytes) else name

    def read(self) -> GpuReading:
        """Takes up to milliseconds, with the GIL released."""
        handle, whole = self._handle, not self.mig
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle) if whole else None
        power = _ask(pynvml.nvmlDeviceGetPowerUsage, handle) if whole else None
        energy = _ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) if whole else None
        return GpuReading(
            utilization=None if rates is None else rates.gpu / 100,
            memory_used=None if memory is None else memory.used,
            memory_total=None if memory is None else memory.total,
            power=None if power is None else power / 1e3,
            energy=None if energy is None else energy / 1e3,
        )


def _ask(question: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return question(handle)
    except pynvml.NVMLError:  # not supported here
        return None


def own_gpu(cuda_uuid: str) -> Gpu | None:
    """The GPU that CUDA calls `cuda_uuid` in this process; None, with a warning, where NVML cannot say.

    Ray names whole GPUs in CUDA_VISIBLE_DEVICES by index, which NVML may count differently, so the
    UUID decides; a MIG slice is named there by its own.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    uuid = visible if visible.startswith("MIG-") else f"GPU-{cuda_uuid.removeprefix('GPU-')}"
    try:
        return Gpu(uuid)
    except pynvml.NVMLError as error:
        logger.warning("no readings of the GPU %s: %s", uuid, error)
        return None
