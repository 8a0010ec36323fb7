"""Private attributes of Megatron's ``TextGenerationController``, under names of this package.

The getters are as those of ``engine.py``.
"""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import Any

from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from absorbed_mla.log_once import log_once
from absorbed_mla.serving.megatron_engine.names import CONTROLLER, DETOKENIZE, NO_TEXTS

logger = logging.getLogger(__name__)

# The sampler.
sampler_of = attrgetter("_sampling")
# Tokens that the last step has sampled, by row: int64 [max_requests] on the device.
sampled_tokens = attrgetter("_sampled_tokens_cuda")
# Logits of the last step, [1, T, vocabulary]; with ``materialize_only_last_token_logits`` T are the
# rows.
logits_of_step = attrgetter("_all_logits_cuda")
# (record_bookkeeping_done_event=True): prepare the tables of the next step, and send them to the
# device. Without the event, those who change them would wait for the device.
prepare_step = attrgetter("_dynamic_step_context_init")
# (input_ids, position_ids): run the model on a step's tokens [1, T]; keeps the logits.
run_model = attrgetter("_dynamic_step_forward_logits")
# (): sample a token for each row, by the sampler.
sample = attrgetter("_dynamic_step_sample_logits")
# (): end, pause and evict requests of the context after a step; returns what it reports.
update_context = attrgetter("_dynamic_step_context_bookkeeping")


def log_probs_of_step(controller: TextGenerationController) -> dict[str, Any]:
    """What Megatron reports of the step's log-probabilities: of its tokens, and the largest ones.

    Returns:
        By Megatron's names, each None if no request asks for it.
    """
    found: dict[str, Any] = {"log_probs": None, "top_n_logprobs": None}
    wanted, wanted_top = controller._dynamic_step_log_probs_bookkeeping()
    if wanted or wanted_top:
        found["log_probs"], scores = controller._dynamic_step_calculate_log_probs()
        if wanted_top:
            top = controller._dynamic_step_calculate_top_n_logprobs(scores)
            found["top_n_logprobs"] = top
    return found


def make_no_texts(controller: TextGenerationController) -> None:
    """Have Megatron make no text of a request that has ended: nobody reads it."""
    if missing := NO_TEXTS.missing({CONTROLLER: controller}):
        log_once(logger, "Megatron makes texts of requests that have ended", missing)
    else:
        DETOKENIZE.replace(controller, _no_text)


def _no_text(*_: Any, **__: Any) -> str:
    return ""
