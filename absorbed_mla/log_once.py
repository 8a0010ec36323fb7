"""Log messages that every layer of every step would repeat."""

from __future__ import annotations

import functools
import logging


@functools.lru_cache(maxsize=256)
def log_once(logger: logging.Logger, message: str) -> None:
    """Log ``message`` at level INFO, the first time that it comes."""
    logger.info(message)
