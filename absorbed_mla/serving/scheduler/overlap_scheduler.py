"""The overlap scheduler: launches a step before the output of the step in flight is processed.

Each step is scheduled (Megatron's scheduler admits requests that wait), its input batch prepared,
model and sampler launched, and then the output of the step before it processed. Where a step
depends on the output of the one in flight by nothing but the sampled tokens, which are on the
device, it is launched before they are known here: the device never waits for the CPU. A request
that such a token turns out to finish has a row in one more step, whose token is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.engines.dynamic_engine import EngineState
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord
from megatron.core.models.gpt import GPTModel

from absorbed_mla.serving.megatron_engine.attributes import (
    device_tables,
    log_probs_of_step,
    prepare_step,
    run_coroutine,
    update_context,
)
from absorbed_mla.serving.request_results import Progress
from absorbed_mla.serving.sampling.device_sampler import DeviceSampler
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.cached_blocks import GeneratedBlocks
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from absorbed_mla.serving.scheduler.input_batch import InputBatch
from absorbed_mla.serving.scheduler.model_runner import InFlightStep, ModelRunner
from absorbed_mla.serving.scheduler.requests import RunningRequests, WaitingQueue


@dataclass(frozen=True)
class StepOutput:
    """What a step has done.

    Attributes:
        progress: Of the requests that go on.
        finished: Megatron's records of the requests that have finished, by row.
        failed: Numbers of requests whose logits had no token, each with how many of the step's
            tokens come before the missing one.
        megatron_step: What Megatron's ``step_modern`` returns, if Megatron has finished the step;
            there is no progress and no record then.
    """

    progress: Sequence[Progress] = ()
    finished: Sequence[DynamicInferenceRequestRecord] = ()
    failed: dict[int, int] = field(default_factory=dict)
    megatron_step: dict[str, Any] | None = None


class OverlapScheduler:
    """Runs the steps of an engine between two events: a request is paused, or computed in chunks.

    Megatron's own step follows such an event, or finishes the step in which it is found. When
    nothing is in flight after a step, Megatron's context and requests are those that its own step
    would have left.

    Args:
        graphs: Whether steps that are padded for CUDA graphs are captured, each as a whole.
        lockstep: Whether ranks with requests of their own run each step together. What depends on a
            rank's requests, sampling among it, then stays out of the graphs; nothing is launched
            ahead, and Megatron admits and finishes requests.

    Attributes:
        runner: Launches model and sampler.
        lockstep: As given.
        launches_ahead: Whether a step is launched before the output of the one in flight is known.
        generated: Gets requests that finish before their blocks are released, if not None.
        last: The step whose output was processed last; None after one of Megatron's.
        waited: Seconds that :meth:`step` has waited for the device.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        model: GPTModel,
        sampler: RequestSampler,
        *,
        graphs: bool,
        lockstep: bool = False,
    ) -> None:
        self._engine, self._sampler, self.lockstep = engine, sampler, lockstep
        context, controller = engine.context, engine.controller
        # Context-parallel ranks go on with the tokens of the first of them.
        own = parallel_state.get_context_parallel_world_size() > 1
        self._device_sampler = DeviceSampler(context.max_requests, controller.vocab_size, own=own)
        self.runner = ModelRunner(
            controller,
            context,
            self._device_sampler,
            sampler,
            FullCudaGraphs(model) if graphs else None,
            sampling_in_graphs=not lockstep,
        )
        self.launches_ahead = graphs and not lockstep
        self._waiting = WaitingQueue(engine, admits=not lockstep)
        # While steps follow each other: the batch and its requests, and what they were made from.
        self._batch: InputBatch | None = None
        self._running: RunningRequests | None = None
        self._made_from: tuple[int, ...] = ()
        self._in_flight: list[InFlightStep] = []
        # Requests that have finished, but have a row in the last step in flight.
        self._finished: set[int] = set()
        self.generated: GeneratedBlocks | None = None
        self.last: InFlightStep | None = None
        self.waited = 0.0

    def start(self) -> None:
        """The engine starts; weights may have been replaced."""
        self.reset()
        if self.runner.graphs is not None:
            self.runner.graphs.keep_if_weights_stay()

    def close(self) -> None:
        """Delete the graphs."""
        if self.runner.graphs is not None:
            self.runner.graphs.clear()

    def reset(self) -> None:
        """Megatron's own step or its reset comes next; steps in flight count for nothing."""
        for step in self._in_flight:
            # It reads tables that Megatron is about to change.
            step.output.wait()
        self._in_flight.clear()
        self._finished.clear()
        self._batch = self._running = self.last = None
        self._waiting.retry()

    def can_step(self) -> bool:
        """Whether the next step is one of the scheduler's."""
        if self._in_flight:
            return True
        if not self._all_run():
            return False
        admissible = self._admissible()
        return admissible is not None and bool(
            admissible or self._engine.context.total_request_count
        )

    def has_new_batch(self) -> bool:
        """Whether Megatron has to prepare the next step, because its requests are others."""
        if self._in_flight:
            return False
        return (
            self._batch is None or self._read_state() != self._made_from or bool(self._admissible())
        )

    @torch.inference_mode()
    def step(self, *, new: bool) -> StepOutput | None:
        """Schedule, prepare and launch a step, and process the output of the one before it.

        Args:
            new: Whether Megatron prepares the step: :meth:`has_new_batch`, of any rank that runs
                it.

        Returns:
            None, if there are no requests, because Megatron's scheduler has admitted none.
        """
        if (new or not self._in_flight) and (prepared := self._schedule(new)):
            self._in_flight.append(self.runner.launch(*prepared))
        if not self._in_flight:
            return None
        assert self._batch is not None
        step = self._in_flight[0]
        # The device is busy meanwhile.
        self._device_sampler.prepare(self._batch.positions())
        if prepared := self._schedule_ahead(step):
            self._in_flight.append(self.runner.launch(*prepared, ahead=True))
        start = time.perf_counter()
        step.output.wait()
        self.waited += time.perf_counter() - start
        return self._process_output(step)

    @torch.inference_mode()
    def launch_next(self) -> None:
        """Launch the next step, if it is the scheduler's: the device is busy until it is due."""
        may_launch = self.launches_ahead and not self._in_flight and self.can_step()
        if may_launch and (prepared := self._schedule(self.has_new_batch())):
            self._in_flight.append(self.runner.launch(*prepared))

    # Schedule, and prepare the input batch.

    def _schedule(self, new: bool) -> tuple[InputBatch, RunningRequests] | None:
        """Prepare a step after one whose tokens are known; None: there are no requests."""
        if not new:
            assert self._batch is not None and self._running is not None
            self._batch.copy_to_device()
            return self._batch, self._running
        admissible = self._admissible()
        self.reset()
        self._waiting.admit(admissible or 0)
        if not self._engine.context.total_request_count:
            return None
        return self._prepare_by_megatron()

    def _schedule_ahead(self, step: InFlightStep) -> tuple[InputBatch, RunningRequests] | None:
        """Prepare the step after ``step``; None: something but tokens may come between them."""
        batch, running, context = self._batch, self._running, self._engine.context
        assert batch is not None and running is not None
        finished = (
            step.rows_of(self._finished)
            | step.rows_of(self._engine.stop_word_finished_request_ids)
            | step.at_max_length
        )
        if (
            not self.launches_ahead
            or self._device_sampler.kind is None
            or not self._all_run()
            or not self._can_advance(finished)
        ):
            return None
        is_decode = not step.has_prefill
        admissible = self._waiting.admissible_ahead(len(finished), is_decode=is_decode)
        if admissible is None:
            return None
        self.runner.wait_for_inputs()
        self._advance(finished, None)
        kept = batch.count
        self._waiting.admit(admissible)
        if not context.total_request_count:
            # All finish and none begins: the context is empty before the output is processed.
            return None
        if admissible or ((finished or step.has_prefill) and not batch.has_size_for(kept)):
            batch, running = self._prepare_by_megatron()
        else:
            batch.copy_to_device()
        self.runner.feed_tokens(kept)
        return batch, running

    def _admissible(self) -> int | None:
        """Requests that may begin; where nothing is launched ahead, as Megatron has it."""
        return self._waiting.admissible(freely=self.launches_ahead)

    def _all_run(self) -> bool:
        """Whether all requests of the context run, each with its whole prompt, and none has failed.

        Requests that wait are not looked at.
        """
        engine, context = self._engine, self._engine.context
        return (
            context.paused_request_count == 0
            and context.chunked_prefill_request_id == -1
            and not engine.failed_request_ids
            and engine.state == EngineState.RUNNING
        )

    def _can_advance(self, finished: set[int]) -> bool:
        """Whether the step after this one is prepared here, without the rows of these requests."""
        assert self._batch is not None
        if self._batch.reports_more or (self.lockstep and finished):
            return False
        return self._batch.has_blocks(finished)

    def _advance(self, finished: set[int], tokens: Sequence[int] | None) -> None:
        """Prepare the step after the last one; see ``InputBatch.advance``."""
        batch, running = self._batch, self._running
        assert batch is not None and running is not None
        order = batch.advance(finished, tokens)
        if order != list(range(len(running.numbers))):
            running.reorder(order)
            self._device_sampler.reorder(order)
        self._count_step()
        self._made_from = self._read_state()
        if finished:
            self._waiting.retry()

    def _prepare_by_megatron(self) -> tuple[InputBatch, RunningRequests]:
        """Let Megatron prepare the step, and read what its requests are."""
        engine, context = self._engine, self._engine.context
        if self.runner.graphs is not None:
            self.runner.graphs.keep_for(context)
        # Without this event it would wait for the device.
        prepare_step(engine.controller)(record_bookkeeping_done_event=True)
        self._batch = InputBatch(context)
        if self._running is None:
            self._running = RunningRequests(engine, self._sampler)
        self._running.set_rows(self._batch.numbers())
        self._device_sampler.begin(self._running.sampled(), self._batch.positions())
        self._made_from = self._read_state()
        return self._batch, self._running

    # Process the output of the step in flight.

    def _process_output(self, step: InFlightStep) -> StepOutput:
        """Give the tokens to the requests, and make the context ready for the next step."""
        running, ahead = self._running, len(self._in_flight) > 1
        assert running is not None and self._batch is not None
        tokens = step.output.tokens()
        failed = {number: 0 for number, token in zip(step.numbers, tokens) if token < 0}
        tokens = [max(token, 0) for token in tokens] if failed else tokens
        stopped = self._engine.stop_word_finished_request_ids
        rows = step.finished_rows(tokens, before=self._finished, stopped=stopped)
        finished = rows.before | rows.now
        over = not ahead and self._all_finish(step, finished)
        if not ahead and not over and not self._can_advance(finished):
            if rows.before:
                self.runner.keep_rows(self._batch.remove(rows.before))
            return StepOutput(failed=failed, megatron_step=self._finish_by_megatron(step))
        del self._in_flight[0]
        self._finished -= {step.numbers[row] for row in rows.before}
        self._finished |= {step.numbers[row] for row in rows.now} & set(
            running.numbers if ahead else ()
        )
        self.last = step
        log_probs = step.log_probs(without=rows.before)
        progress = running.append_tokens(step.numbers, tokens, log_probs, without=finished)
        self.runner.sample()
        if not ahead and not over:
            self._advance(finished, tokens)
            size = self._batch.count
            if (finished or step.has_prefill) and not self._batch.has_size_for(size):
                self._batch = None
        records = []
        for row in sorted(rows.now):
            last = (tokens[row], log_probs and log_probs[row])
            last = (None, None) if row in rows.without_token else last
            number = step.numbers[row]
            records.append(running.finish(number, *last))
            held = over or number in self._finished
            if self.generated is not None and held and number not in failed:
                self.generated.keep(records[-1])
        if over and self._batch.count:
            self._count_step()
        if over or (self._finished and self._finished.issuperset(running.numbers)):
            self._clear()
        return StepOutput(progress, records, failed)

    def _finish_by_megatron(self, step: InFlightStep) -> dict[str, Any]:
        """Let Megatron finish, pause and evict requests; returns what its ``step_modern`` does."""
        engine, controller, context = self._engine, self._engine.controller, self._engine.context
        self.reset()
        self.last = step
        before = {
            "active_token_count": context.active_token_count,
            "step_count": context.step_count,
            "chunked_prefill_request_id": context.chunked_prefill_request_id,
            "kv_stats": None,
        }
        padded = context.padded_active_request_count
        done: dict[str, object] = {
            "accepted_tokens": None,
            "cuda_graph_request_count": padded if context.using_cuda_graph_this_step() else None,
        }
        done.update(log_probs_of_step(controller))
        done.update(update_context(controller)())
        self._count_step()
        return run_coroutine(engine)(engine.async_bookkeep(done, before, 0.0))

    def _all_finish(self, step: InFlightStep, finished: set[int]) -> bool:
        """Whether these are all rows of the step, and their requests are finished here."""
        assert self._batch is not None
        all_finish = len(finished) == len(step.numbers)
        return all_finish and not self.lockstep and not self._batch.reports_more

    def _clear(self) -> None:
        """All requests of the last step have finished; the context may be empty already."""
        self.runner.wait_for_inputs()
        context = self._engine.context
        if count := context.total_request_count:
            context.update_requests(
                torch.zeros(count, dtype=torch.uint8), torch.zeros(count).long()
            )
        if self.generated is not None:
            self.generated.forget_ended()
        self._in_flight.clear()
        self._finished.clear()
        self._batch = self._running = None

    def _count_step(self) -> None:
        context = self._engine.context
        context.step_count += 1
        context.prefix_cache_lru_clock += 1

    def _read_state(self) -> tuple[int, ...]:
        """What a step of Megatron's would change."""
        context = self._engine.context
        return (
            context.step_count,
            context.total_request_count,
            context.memory_buffer.data_ptr(),
            device_tables(context).data_ptr(),
        )
