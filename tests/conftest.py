"""What every test stands on: no hub, no home directory, no clock, a GPU only where there is one."""

from __future__ import annotations

import os

import hypothesis
import pytest

# Before anything imports ray or transformers, and inherited by every process a test starts.
os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would be written into ~/.ray
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # as scripts/serve.py does
os.environ["HF_HUB_OFFLINE"] = "1"
# Tiny models gain nothing from a second thread, and lose a great deal beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when triton is first imported, which transformers may do: without a GPU its kernels run interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

hypothesis.settings.register_profile(
    "stepahead",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("stepahead")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--schemas", help="folder of custom resource definitions, for the tests of cluster/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # only here: the host half's tests run without it

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
