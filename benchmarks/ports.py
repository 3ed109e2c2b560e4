"""Ports for servers that are started beside others."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Of this machine; somebody else may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
