"""Frames over a stream socket: a big-endian uint32 length, and as many bytes."""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import cast

import msgspec

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("!I")


class Frames(asyncio.Protocol):
    """One end of a connection. A peer that sends something else is cut off."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.max_frame = 2**32 - 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) >= start + LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, start)
            if length > self.max_frame:
                logger.warning("closed a connection: a frame of %d bytes is not expected here", length)
                return self.close()
            end = start + LENGTH.size + length
            if len(buffer) < end:
                break
            payload = bytes(memoryview(buffer)[start + LENGTH.size : end])
            start = end
            try:
                self.frame_received(payload)
            except msgspec.DecodeError as error:
                logger.warning("closed a connection: %s", error)
                return self.close()
        del buffer[:start]

    def frame_received(self, payload: bytes) -> None:
        raise NotImplementedError

    def send(self, payload: bytes) -> None:
        """At once, as far as the socket takes it. Without a connection, nothing happens, nor does a warning,
        which might itself be sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(LENGTH.pack(len(payload)) + payload)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
