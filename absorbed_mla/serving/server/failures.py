"""Requests at which the model fails."""

from __future__ import annotations

from collections.abc import Iterable

from absorbed_mla.serving.server.service import Update


class ModelFailed(RuntimeError):
    """The model has failed at a request, whose client is not to blame; others go on."""


def require_no_failure(updates: Iterable[Update]) -> None:
    """Check that no output has ended because the model failed.

    Raises:
        ModelFailed: If one has.
    """
    for update in updates:
        # Outputs may have grown since the update.
        for output, then in zip(update.request.outputs, update.outputs):
            if then.finish_reason == "error":
                raise ModelFailed(output.error)
