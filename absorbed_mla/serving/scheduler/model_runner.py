"""The model runner: launches model and sampler of a step, in flight until its output comes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from torch import Tensor

from absorbed_mla.serving.megatron_engine.attributes import (
    logits_of_step,
    run_model,
    sample,
    sampled_tokens,
    sampler_of,
)
from absorbed_mla.serving.sampling.device_sampler import DeviceSampler, Kind
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.cascade_attention import CascadeAttention
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from absorbed_mla.serving.scheduler.input_batch import InputBatch
from absorbed_mla.serving.scheduler.requests import RunningRequests


class PinnedOutput:
    """Pinned memory that a step's tokens are copied to; of two steps in a row, each has its own."""

    def __init__(self, max_rows: int) -> None:
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, pin_memory=True)
        self._log_probs = torch.zeros(max_rows, dtype=torch.float32, pin_memory=True)
        self._copied = torch.cuda.Event()
        self._count, self._has_log_probs = 0, False

    def copy_from(self, tokens: Tensor, log_probs: Tensor | None) -> None:
        """Queue the copies of these tensors [rows] behind what they are computed by."""
        self._count, self._has_log_probs = len(tokens), log_probs is not None
        self._tokens[: self._count].copy_(tokens, non_blocking=True)
        if log_probs is not None:
            self._log_probs[: self._count].copy_(log_probs, non_blocking=True)
        self._copied.record()

    def wait(self) -> None:
        """Return when the copies are there, and with them all that was queued before."""
        self._copied.synchronize()

    def tokens(self) -> list[int]:
        """By row; -1 where the logits have none."""
        return self._tokens[: self._count].tolist()

    def log_probs(self) -> list[float] | None:
        """By row; None: the step computed none."""
        return self._log_probs[: self._count].tolist() if self._has_log_probs else None


class FinishedRows(NamedTuple):
    """Rows of a step whose requests have no part in the next one.

    Attributes:
        before: Of requests that had finished before; their tokens are not taken.
        without_token: Of requests that finish without the token: aborted, or after a stop word.
        now: Of requests that finish with this step, with or without its token.
    """

    before: set[int]
    without_token: set[int]
    now: set[int]


@dataclass(frozen=True)
class InFlightStep:
    """A step that has been launched, and whose output has not been processed.

    Attributes:
        numbers: Of the requests, by row.
        at_max_length: Rows whose requests are as long as they may be with the token of this step.
        stop_tokens: By row, Megatron's token that ends the request.
        wants_log_prob: By row, whether the request wants the token's log-probability.
        sizes: Of the step, without padding.
        padded: Whether it has the size of a CUDA graph.
        output: Where its tokens are copied to.
    """

    numbers: Sequence[int]
    at_max_length: set[int]
    stop_tokens: Sequence[int]
    wants_log_prob: Sequence[bool]
    sizes: InferenceBatchDimensions
    padded: bool
    output: PinnedOutput

    @property
    def has_prefill(self) -> bool:
        """Whether it computes prompts."""
        return self.sizes.prefill_req_count > 0

    def log_probs(self, *, without: Collection[int]) -> list[float] | None:
        """By row, if a request wants its own that is not in one of the rows ``without``."""
        wanted = any(wants and row not in without for row, wants in enumerate(self.wants_log_prob))
        return self.output.log_probs() if wanted else None

    def rows_of(self, numbers: Collection[int]) -> set[int]:
        """Rows of those of these requests that take part."""
        if not numbers:
            return set()
        return {row for row, number in enumerate(self.numbers) if number in numbers}

    def finished_rows(
        self, tokens: Sequence[int], *, before: Collection[int], stopped: Collection[int]
    ) -> FinishedRows:
        """What the tokens of the step finish.

        Args:
            tokens: By row.
            before: Requests that had finished before.
            stopped: Requests that are to finish without another token.
        """
        former, without_token = self.rows_of(before), self.rows_of(stopped)
        by_token = {row for row, token in enumerate(tokens) if token == self.stop_tokens[row]}
        now = (without_token | by_token | self.at_max_length) - former
        return FinishedRows(former, without_token, now)


class ModelRunner:
    """Launches the step that Megatron's context is prepared for.

    Args:
        controller: Of Megatron's engine; its buffers get logits and tokens.
        device_sampler: Samples by parameters in a table on the device.
        sampler: Samples where ``device_sampler`` cannot.
        graphs: Of decode steps; None: they are not captured.
        sampling_in_graphs: Whether a graph holds the device sampler, too.

    Attributes:
        graphs: As given.
        device_sampler: As given.
        cascade: Finds prefixes that requests of a step share; None: each has its own.
    """

    def __init__(
        self,
        controller: TextGenerationController,
        context: DynamicInferenceContext,
        device_sampler: DeviceSampler,
        sampler: RequestSampler,
        graphs: FullCudaGraphs | None,
        *,
        sampling_in_graphs: bool,
    ) -> None:
        self._controller, self._context, self._sampler = controller, context, sampler
        self.device_sampler, self.graphs = device_sampler, graphs
        self.cascade: CascadeAttention | None = None
        self._sampling_in_graphs = sampling_in_graphs
        # Tokens of the last step by row, int64; -1 where the logits have none, for which the model
        # reads token 0.
        self._tokens = torch.zeros_like(sampled_tokens(controller))
        self._outputs = [PinnedOutput(context.max_requests) for _ in range(2)]
        # Of the last step: launches its sampler, if that has not been done.
        self._sampler_of_step: Callable[[], None] | None = None
        # The device has read the tables of the last step.
        self._inputs_read = torch.cuda.Event()

    def launch(
        self, batch: InputBatch, requests: RunningRequests, *, ahead: bool = False
    ) -> InFlightStep:
        """Run the model and sample, by a CUDA graph where one holds a decode step of this size.

        Args:
            batch: Its tables have been copied to the device.
            requests: In the rows of the batch.
            ahead: Whether the tokens of the step before are not known; where grammars need them,
                :meth:`sample` must be called when they are.
        """
        context, count, sampler = self._context, batch.count, self.device_sampler
        if sampler.changes:
            sampler.begin(requests.sampled(), batch.positions())
        sampler.publish()
        self._inputs_read.record()
        kind, in_graph, constrained = sampler.kind, None, bool(sampler.constrained)
        if (graphs := self._graphs_of_step()) is not None:
            in_graph = kind if self._sampling_in_graphs and not constrained else None
            rows = context.padded_active_request_count
            found = nullcontext(()) if self.cascade is None else self.cascade.in_graph()
            with found as more:
                key = context.padded_batch_dimensions, in_graph, *more
                graphs.run(key, partial(self._run_and_sample, rows, in_graph))
        else:
            inputs = context.current_input_and_position_ids()
            run_model(self._controller)(*inputs)
        wants_log_prob = batch.metadata("return_log_probs").astype(bool).tolist()
        output = self._outputs[0]
        self._outputs.reverse()

        def sample() -> None:
            if kind is None:
                self._sample_by_megatron(count)
            elif in_graph is None:
                self._sample(count, kind)
            output.copy_from(
                self._tokens[:count], self._log_probs(count) if any(wants_log_prob) else None
            )

        self._sampler_of_step = sample
        if not (ahead and constrained):
            self.sample()
        return InFlightStep(
            list(requests.numbers),
            batch.at_max_length(),
            batch.metadata("termination_id").tolist(),
            wants_log_prob,
            context.batch_dimensions,
            context.using_cuda_graph_this_step(),
            output,
        )

    def sample(self) -> None:
        """Sample the tokens of the last step, unless that has been launched with its model.

        The device computes the model meanwhile.
        """
        sample, self._sampler_of_step = self._sampler_of_step, None
        if sample is not None:
            sample()

    def wait_for_inputs(self) -> None:
        """Return when the device has read the tables of the last step, which may then change."""
        self._inputs_read.synchronize()

    def feed_tokens(self, count: int) -> None:
        """Give the next step the tokens of the last one, which only the device knows.

        Args:
            count: Of the first rows of the next step, whose inputs are the rows of the last one.
        """
        inputs = self._context.gpu_view.token_to_input_ids[:count]
        inputs.copy_(sampled_tokens(self._controller).index_select(0, inputs))

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Leave the tokens and logits of these rows only, for Megatron to finish the step."""
        tokens, logits = sampled_tokens(self._controller), logits_of_step(self._controller)[0]
        kept = torch.tensor(rows, device=tokens.device)
        tokens[: len(rows)] = tokens[kept]
        logits[: len(rows)] = logits[kept]

    def _graphs_of_step(self) -> FullCudaGraphs | None:
        """Where the step has a graph or is captured; None: it runs without."""
        context = self._context
        is_decode = context.num_prefill_requests == 0
        return self.graphs if is_decode and context.using_cuda_graph_this_step() else None

    def _run_and_sample(self, count: int, kind: Kind | None) -> None:
        """What a graph holds; ``kind`` None: the model alone."""
        inputs = self._context.current_input_and_position_ids()
        run_model(self._controller)(*inputs)
        if kind is not None:
            self._sample(count, kind)

    def _sample(self, count: int, kind: Kind) -> None:
        """Sample tokens of the first ``count`` rows by the device sampler."""
        logits = logits_of_step(self._controller)[0, :count]
        if self.device_sampler.constrained:
            logits = self.device_sampler.constrain(logits)
        tokens = self.device_sampler.draw(logits, kind)
        self._tokens[:count].copy_(tokens)
        torch.clamp(tokens, min=0, out=sampled_tokens(self._controller)[:count])

    def _sample_by_megatron(self, count: int) -> None:
        """Sample by Megatron's function, which calls the engine's sampler."""
        with self._sampler.missing_on_device() as missing:
            sample(self._controller)()
        self._tokens.copy_(sampled_tokens(self._controller))
        self._tokens[:count].masked_fill_(missing[0], -1)

    def _log_probs(self, count: int) -> Tensor:
        """Log-probabilities of the tokens of all requests, float32 [count], as Megatron's."""
        controller = self._controller
        found, _ = self._context.calculate_log_probs_tensors(
            logits_of_step(controller)[:, :count],
            sampled_tokens(controller)[:count],
            only_last_token_logits=True,
            sampling=sampler_of(controller),
        )
        return found
