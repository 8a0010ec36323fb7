"""What a step does on the device: it runs the model and draws a token for every request."""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from torch import Tensor

from absorbed_mla.serving.sampling.device_sampler import Draws, Kind
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.full_cuda_graphs import StepGraphs


class DeviceStep:
    """Launches the step that a context is prepared for.

    Args:
        controller: Of Megatron's engine; its buffers get logits and tokens.
        context: Of the engine.
        draws: Draws by numbers.
        sampler: Draws where ``draws`` cannot.

    Attributes:
        drawn: The tokens of the last step by row, int64; -1 where the logits have none, for which
            the model reads token 0.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        draws: Draws,
        sampler: RequestSampler,
    ) -> None:
        self._controller, self._context, self._draws = controller, context, draws
        self._sampler = sampler
        self.drawn = torch.zeros_like(controller._sampled_tokens_cuda)

    def launch(self, count: int, graphs: StepGraphs | None, *, with_draws: bool) -> None:
        """Run the model and draw, by a graph where one holds a decode step of this size.

        Args:
            count: Number of requests.
            graphs: Of whole decode steps; None: they are not captured.
            with_draws: Whether drawing is in the graph.
        """
        context, kind = self._context, self._draws.kind
        reads = context.num_prefill_requests > 0
        if graphs is None or reads or not context.using_cuda_graph_this_step():
            self._run(count, kind)
        else:
            sizes, padded = context.padded_batch_dimensions, context.padded_active_request_count
            captured = kind if with_draws else None
            graphs.run((sizes, captured), partial(self._run, padded, captured))
            if captured is not kind:
                self._draw(count, kind)
        if kind is None:
            self._controller._dynamic_step_sample_logits()
            self.drawn.copy_(self._controller._sampled_tokens_cuda)
            self.drawn[:count].masked_fill_(self._sampler.take_missing(), -1)

    def log_probs(self, count: int) -> Tensor:
        """Log-probabilities of the tokens of all requests, float32 [count], as Megatron's."""
        controller = self._controller
        found, _ = self._context.calculate_log_probs_tensors(
            controller._all_logits_cuda[:, :count],
            controller._sampled_tokens_cuda[:count],
            only_last_token_logits=True,
            sampling=controller._sampling,
        )
        return found

    def _run(self, count: int, kind: Kind | None) -> None:
        """Run the model; draw the tokens of the first ``count`` rows unless the sampler has to."""
        inputs = self._context.current_input_and_position_ids()
        self._controller._dynamic_step_forward_logits(*inputs)
        self._draw(count, kind)

    def _draw(self, count: int, kind: Kind | None) -> None:
        if kind is not None:
            logits = self._controller._all_logits_cuda[0, :count]
            tokens = self._draws.draw(logits, kind)
            self.drawn[:count].copy_(tokens)
            torch.clamp(tokens, min=0, out=self._controller._sampled_tokens_cuda[:count])
