"""Our logs among those of Ray Serve: in its files, with its fields, replica and request id among them.

With `logging_config: {encoding: JSON}` in the Serve configuration each line is a JSON object, what
was passed as `extra` included.
"""

from __future__ import annotations

import logging

PACKAGES = ("deployments", "engine")


def join_serve_logs() -> None:
    """In a process of Ray Serve, once its own logger is set up: before a deployment's constructor."""
    serve = logging.getLogger("ray.serve")
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = serve.handlers  # the list itself: it stays the same when Serve changes it
        logger.setLevel(serve.level)
        logger.propagate = False
