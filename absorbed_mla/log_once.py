"""Log messages that every layer of every step would repeat."""

from __future__ import annotations

import functools
import itertools
import logging


def log_once(logger: logging.Logger, what: str, why: str = "") -> None:
    """Log ``what`` at level INFO the first time that it comes, with the reason it has then."""
    if next(times_logged(logger, what)) == 0:
        logger.info(f"{what}: {why}" if why else what)


@functools.lru_cache(maxsize=256)
def times_logged(logger: logging.Logger, what: str) -> itertools.count:
    """Counts how often a message came."""
    return itertools.count()
