"""What the server writes to its log: lines for people, or JSON for machines."""

from __future__ import annotations

import copy
import json
import logging
from datetime import UTC, datetime
from typing import Any

from uvicorn.config import LOGGING_CONFIG

# Has the line of each request.
_REQUESTS = "absorbed_mla.serving.server.metrics"
# Says which parsers are taken.
_PARSERS = "absorbed_mla.serving.server.output_parsers"
_ACCESS = ("client", "method", "path", "http_version", "status")


class JsonLines(logging.Formatter):
    """An object on a line for each message; what is said of a request has fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging``."""
        when = datetime.fromtimestamp(record.created, UTC)
        found: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            found |= dict(zip(_ACCESS, record.args))
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, default=str)


def log_config(form: str, *, requests: bool = True) -> dict[str, Any]:
    """Uvicorn's configuration of ``logging``.

    Args:
        form: ``"text"``, or ``"json"`` for :class:`JsonLines` of all loggers.
        requests: Whether there is a line of each request.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    level = "INFO" if requests else "WARNING"
    own = {"handlers": ["default"], "level": level, "propagate": False}
    config["loggers"] |= {_REQUESTS: own, _PARSERS: {**own, "level": "INFO"}}
    if form == "json":
        lines = {"()": JsonLines}
        config["formatters"] = dict.fromkeys(config["formatters"], lines)
        config["root"] = {"handlers": ["default"], "level": "WARNING"}
    return config
