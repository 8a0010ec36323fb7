"""What the server writes to its log: lines for people, or JSON for machines."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from uvicorn.config import LOGGING_CONFIG

_logger = logging.getLogger(__name__)
# Says which parsers are taken.
_PARSERS = "absorbed_mla.serving.server.output_parsers"
# Characters of a client's id of a request.
_MOST_SHOWN = 200
_ACCESS = ("client", "method", "path", "http_version", "status")
_REQUEST = (
    "request %(request_id)a %(endpoint)s %(status)d: %(prompt_tokens)d prompt tokens "
    "(%(cached_tokens)d cached), %(completion_tokens)d generated, %(finish_reason)s; "
    "seconds: queue %(queue_seconds)s, ttft %(ttft_seconds)s, total %(total_seconds)s"
)


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


def log_request(state: Mapping[str, Any], path: str, status: int, model: str) -> None:
    """Write a line about a request that a model has answered, or was to; nothing of its texts.

    Args:
        state: Of its ASGI scope, with its ``request_id`` and ``stream``.
        path: That it was sent to.
        status: Of the answer.
        model: Its name.
    """
    stream, now = state["stream"], time.monotonic()
    updates = stream.latest.values()
    requests = [update.request for update in updates]
    outputs = [one for update in updates for one in update.outputs]
    left = "abort" if stream.error is None else getattr(stream.error, "finish_reason", "error")
    starts = [one.first_scheduled_time for one in requests if one.first_scheduled_time]
    # The clock of the steps counts from the epoch.
    queued = min(starts) - (time.time() - now) - stream.began if starts else None
    first = stream.first_token
    found = {
        "request_id": state["request_id"][:_MOST_SHOWN],
        "endpoint": path,
        "status": status,
        "model": model,
        "prompt_tokens": sum(len(one.prompt_token_ids) for one in requests),
        "cached_tokens": sum(one.num_cached_tokens or 0 for one in requests),
        "completion_tokens": sum(one.num_tokens for one in outputs),
        "queue_seconds": None if queued is None else round(max(queued, 0.0), 4),
        "ttft_seconds": None if first is None else round(first - stream.began, 4),
        "total_seconds": round(now - stream.began, 4),
        "finish_reason": ",".join(sorted({one.finish_reason or left for one in outputs})) or left,
    }
    shown = {name: "-" if value is None else value for name, value in found.items()}
    _logger.info(_REQUEST, shown, extra={"fields": found})


def log_config(form: str, *, requests: bool = True) -> dict[str, Any]:
    """Uvicorn's configuration of ``logging``.

    Args:
        form: ``"text"``, or ``"json"`` for :class:`JsonLines` of all loggers.
        requests: Whether there is a line of each request.
    """
    config = copy.deepcopy(LOGGING_CONFIG)
    level = "INFO" if requests else "WARNING"
    own = {"handlers": ["default"], "level": level, "propagate": False}
    config["loggers"] |= {_logger.name: own, _PARSERS: {**own, "level": "INFO"}}
    if form == "json":
        lines = {"()": JsonLines}
        config["formatters"] = dict.fromkeys(config["formatters"], lines)
        config["root"] = {"handlers": ["default"], "level": "WARNING"}
    return config
