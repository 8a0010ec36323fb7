"""Why requests of the server end without an answer."""

from __future__ import annotations


class ServiceStopped(RuntimeError):
    """The model has stopped: its processes have ended, or the server is shutting down.

    Attributes:
        finish_reason: Of the outputs that ran.
    """

    finish_reason = "error"


class ShuttingDown(ServiceStopped):
    """The server is shutting down."""

    finish_reason = "abort"

    def __str__(self) -> str:
        return "the server is shutting down"


class ServerBusy(ServiceStopped):
    """Too many large requests wait already."""

    def __str__(self) -> str:
        return "too many large requests wait; try again later"


class NotReady(ServiceStopped):
    """The model is asleep, or lacks weights; it takes no requests until that has changed."""


class ModelFailed(RuntimeError):
    """The model has failed at a request, whose client is not to blame; others go on."""


def as_refusal(error: Exception) -> ValueError:
    """What is wrong with a prompt at which tokenizer or template fail."""
    if isinstance(error, ValueError):
        return error
    return ValueError(f"the prompt cannot be tokenized: {type(error).__name__}: {error}")
