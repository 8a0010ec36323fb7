"""What the package does to Megatron's ``TextGenerationController`` beyond its documented calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron.core.inference.sampling import Sampling
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from torch import Tensor

from absorbed_mla.log_once import log_once
from absorbed_mla.serving.megatron_engine.names import (
    CONTROLLER,
    DETOKENIZE,
    NO_TEXTS,
    PREPARE_STEP,
    RUN_MODEL,
    SAMPLER,
)

logger = logging.getLogger(__name__)


def replace_sampler(controller: TextGenerationController, sampler: Sampling) -> None:
    """Have the controller draw by another sampler: it chooses one of its own, by name."""
    SAMPLER.replace(controller, sampler)


def sampler_of(controller: TextGenerationController) -> Sampling:
    """The sampler that draws the controller's tokens."""
    return controller._sampling


def make_no_texts(controller: TextGenerationController) -> None:
    """Have Megatron make no text of a request that has ended: nobody reads it."""
    if missing := NO_TEXTS.missing({CONTROLLER: controller}):
        log_once(logger, "Megatron makes texts of requests that have ended", missing)
    else:
        DETOKENIZE.replace(controller, _no_text)


def _no_text(*_: Any, **__: Any) -> str:
    return ""


def sampled_tokens(controller: TextGenerationController) -> Tensor:
    """The tokens that the last step has drawn, by row; int64 [max_requests] on the device."""
    return controller._sampled_tokens_cuda


def last_logits(controller: TextGenerationController, count: int) -> Tensor:
    """Logits of the last token of the step's first ``count`` rows, [count, vocabulary].

    It needs a context with ``materialize_only_last_token_logits``.
    """
    return controller._all_logits_cuda[0, :count]


def prepare_step(controller: TextGenerationController) -> None:
    """Have Megatron prepare the tables of the next step, and send them to the device.

    It records an event for those that would otherwise wait for the device.
    """
    controller._dynamic_step_context_init(record_bookkeeping_done_event=True)


def run_model(controller: TextGenerationController, input_ids: Tensor, positions: Tensor) -> None:
    """Run the model on a step's tokens [1, T]; the controller keeps the logits."""
    controller._dynamic_step_forward_logits(input_ids, positions)


def sample(controller: TextGenerationController) -> None:
    """Draw a token for each row by the controller's sampler."""
    controller._dynamic_step_sample_logits()


def log_probs_of_step(controller: TextGenerationController) -> tuple[Any, Any]:
    """What Megatron reports of log-probabilities for the step: of its tokens, and the largest ones.

    Returns:
        Each None if no request asks for it.
    """
    wanted, wanted_top = controller._dynamic_step_log_probs_bookkeeping()
    if not wanted and not wanted_top:
        return None, None
    found, scores = controller._dynamic_step_calculate_log_probs()
    if not wanted_top:
        return found, None
    return found, controller._dynamic_step_calculate_top_n_logprobs(scores)


def update_context(controller: TextGenerationController) -> dict:
    """Let Megatron's context end, pause and evict requests; returns what it reports of the step."""
    return controller._dynamic_step_context_bookkeeping()


def replace_prepare_and_run(
    controller: TextGenerationController,
    make: Callable[[Callable, Callable], tuple[Callable, Callable]],
) -> None:
    """Replace the two functions with which Megatron prepares a step and runs the model.

    Args:
        controller: Of Megatron's engine.
        make: Of both functions, those that take their places.
    """
    prepare, run = make(PREPARE_STEP.of(controller), RUN_MODEL.of(controller))
    PREPARE_STEP.replace(controller, prepare)
    RUN_MODEL.replace(controller, run)
