"""Pinning a replica to the cores near its GPU; NVML's answer is given, the kernel's part is real."""

from __future__ import annotations

import contextlib
import os
import threading

import pynvml
import pytest

from deployments.affinity import pin_to_gpu

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Its answer has the first core that this process may use; the list fills with the GPUs asked for."""
    asked: list[object] = []

    def affinity(handle: object, words: int) -> list[int]:
        asked.append(handle)
        found = [0] * words
        found[ALLOWED[0] // 64] |= 1 << ALLOWED[0] % 64
        return found

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCpuAffinity", affinity)
    return asked


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two cores: with one there is nothing to choose")
@pytest.mark.parametrize(("name", "gpu"), [("1", 1), ("GPU-8a6f", "GPU-8a6f")])
def test_every_thread_is_pinned(nvml: list[object], name: str, gpu: object) -> None:
    ready, done = threading.Event(), threading.Event()
    cores: list[set[int]] = []

    def work() -> None:
        ready.set()
        done.wait()
        cores.append(os.sched_getaffinity(0))

    earlier = threading.Thread(target=work)
    earlier.start()
    ready.wait()
    try:
        assert pin_to_gpu(name) == frozenset({ALLOWED[0]})
        later = threading.Thread(target=work)
        later.start()
        done.set()
        for thread in (earlier, later):
            thread.join()
        assert cores == [{ALLOWED[0]}] * 2
        assert nvml == [gpu]
    finally:
        done.set()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), ALLOWED)


def test_all_cores_near_changes_nothing(nvml: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCpuAffinity", lambda handle, words: [2**64 - 1] * words)
    assert pin_to_gpu("0") is None
    assert sorted(os.sched_getaffinity(0)) == ALLOWED


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert pin_to_gpu("0") is None
