"""Keeps the process's log handlers whole while a library configures its own logging."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Gives every MemoryHandler its target back that it had before the block.

    `logging.config.dictConfig`, which vLLM's start calls, closes all handlers of the process, and a closed
    MemoryHandler has no target. Ray Serve's logger writes through one. A restarted Serve controller asks each replica
    for the file behind it, and stops a replica that cannot answer: without the target it would stop every vLLM
    engine.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    targets = [
        (handler, handler.target)
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, MemoryHandler) and handler.target is not None
    ]
    try:
        yield
    finally:
        for handler, target in targets:
            handler.setTarget(target)
