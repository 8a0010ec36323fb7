"""Runs the steps of an engine, with nothing of Megatron's scheduler but its admission of requests.

Where a step depends on the tokens of the one before it by nothing but the tokens themselves, which
are on the device, it is launched before they are known here: the device never waits for the host.
A request that such a token turns out to end has a row in one more step, whose token is not taken.
Requests that wait may begin with such a step, beside those that go on, if any do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord
from megatron.core.models.gpt import GPTModel

from absorbed_mla.serving.request_results import Progress
from absorbed_mla.serving.sampling.device_sampler import Draws
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.scheduler.conditions import runs_here
from absorbed_mla.serving.scheduler.device_step import DeviceStep
from absorbed_mla.serving.scheduler.finished_requests import Endings, leave_none, leave_out
from absorbed_mla.serving.scheduler.full_cuda_graphs import StepGraphs
from absorbed_mla.serving.scheduler.in_flight_step import Flight, Landing
from absorbed_mla.serving.scheduler.input_batch import ContextRows
from absorbed_mla.serving.scheduler.running_requests import Members
from absorbed_mla.serving.scheduler.waiting_queue import Admissions


class DecodeLoop:
    """Steps between two events: a request is paused or read in chunks, the last of all ends.

    A step is :meth:`forward`, then either :meth:`go_on` or, if that finds such an event,
    :meth:`finish`, in which Megatron's own functions do their part. When nothing runs on the device
    after one of them, Megatron's context and requests are those that its own step would have left.

    Args:
        host: Megatron's engine.
        model: Generates.
        sampler: Of the engine.
        graphs: Whether steps that are padded for CUDA graphs are captured, each as a whole.
        together: Whether ranks with requests of their own compute each step together. What depends
            on a rank's requests, drawing among it, then stays out of the graphs; nothing is
            launched ahead, and Megatron admits and ends requests.

    Attributes:
        graphs: Of whole steps; None if they are not captured.
        together: As given.
        launches_ahead: Whether a step is launched before the tokens of the one before it are known.
        last: The step that :meth:`go_on` or :meth:`finish` took last; None after one of Megatron's.
        waited: Seconds that the host has waited for the device in :meth:`forward`.
    """

    def __init__(
        self,
        host: DynamicInferenceEngine,
        model: GPTModel,
        sampler: RequestSampler,
        *,
        graphs: bool,
        together: bool = False,
    ) -> None:
        self._host, self._sampler, self.together = host, sampler, together
        self._admissions = Admissions(host, possible=not together)
        self.graphs = StepGraphs(model) if graphs else None
        context, controller = host.context, host.controller
        # Context-parallel ranks go on with the tokens of the first of them.
        own = parallel_state.get_context_parallel_world_size() > 1
        self._draws = Draws(context.max_requests, controller.vocab_size, own=own)
        self._device_step = DeviceStep(controller, context, self._draws, sampler)
        self._landings = [Landing(context.max_requests) for _ in range(2)]
        # The device has read the numbers of the last step that was launched.
        self._read = torch.cuda.Event()
        # Rows and requests, while steps follow each other; what they were made from.
        self._rows: ContextRows | None = None
        self._members: Members | None = None
        self._state: tuple[int, ...] = ()
        # Steps on the device whose tokens have not been taken.
        self._flights: list[Flight] = []
        self._endings = Endings(host)
        self.launches_ahead = self.graphs is not None and not together
        self.last: Flight | None = None
        self.waited = 0.0

    def begin(self) -> None:
        """The engine starts; weights may have been replaced."""
        self.interrupt()
        if self.graphs is not None:
            self.graphs.keep_if_weights_stay()

    def close(self) -> None:
        """Delete the graphs."""
        if self.graphs is not None:
            self.graphs.clear()

    def interrupt(self) -> None:
        """Megatron's own step or its reset comes next; tokens on their way count for nothing."""
        for flight in self._flights:
            # It reads tables that Megatron is about to change.
            flight.landing.wait()
        self._flights.clear()
        self._endings.forget()
        self._rows = self._members = self.last = None
        self._admissions.look_again()

    def applies(self) -> bool:
        """Whether the next step is one of the loop's."""
        return bool(self._flights) or self._may_run()

    def is_new(self) -> bool:
        """Whether Megatron has to prepare the next step, because its requests are others."""
        if self._flights:
            return False
        return self._rows is None or self._read_state() != self._state or bool(self._due())

    @torch.inference_mode()
    def forward(self, new: bool) -> bool:
        """Run the model and draw the tokens, unless that was launched ahead; wait for them.

        Args:
            new: Whether Megatron prepares the step: :meth:`is_new`, of any rank that computes it.

        Returns:
            False, if there are no requests, because the scheduler has admitted none after all.
        """
        if new or not self._flights:
            self._prepare_and_start(new)
        if not self._flights:
            return False
        assert self._rows is not None
        flight = self._flights[0]
        # The device is busy meanwhile.
        self._draws.prepare(self._rows.positions())
        self._launch_ahead(flight)
        start = time.perf_counter()
        flight.landing.wait()
        self.waited += time.perf_counter() - start
        return True

    @torch.inference_mode()
    def go_on(self) -> tuple[list[Progress], list[DynamicInferenceRequestRecord]] | None:
        """Give the tokens to the requests, and make the context ready for the next step.

        Returns:
            Progress of the requests that go on, and Megatron's records of those that have ended, by
            row; None, before anything but the device's tokens is changed, if Megatron has to finish
            the step.
        """
        flight, members = self._flights[0], self._members
        assert members is not None and self._rows is not None
        ahead = len(self._flights) > 1
        tokens = flight.landing.tokens()
        if min(tokens) < 0:
            tokens = self._note_failures(flight, tokens)
        ends = self._endings.of(flight, tokens)
        ended = ends.rows
        over = not ahead and self._all_end(flight, ended)
        if not ahead and not over and not self._may_go_on(ended):
            leave_out(self._host.controller, self._rows, ends.gone)
            return None
        del self._flights[0]
        self._endings.note(flight, ends, members.numbers if ahead else ())
        self.last = flight
        log_probs = flight.log_probs(without=ends.gone)
        progress = self._append(flight.numbers, tokens, log_probs, without=ended)
        if not ahead and not over:
            self._follow(ended, tokens)
            if (ended or flight.reads) and not self._has_its_size():
                self._rows = None
        records = ends.end(members, flight, tokens, log_probs)
        if over and self._rows.count:
            self._count_step()
        if over or self._endings.are_all(members.numbers):
            self._clear()
        return progress, records

    @torch.inference_mode()
    def finish(self) -> dict:
        """Let Megatron end, pause and evict requests; returns what its ``step_modern`` does."""
        host, controller, context = self._host, self._host.controller, self._host.context
        flight = self._flights[0]
        self.interrupt()
        self.last = flight
        before = {
            "active_token_count": context.active_token_count,
            "step_count": context.step_count,
            "chunked_prefill_request_id": context.chunked_prefill_request_id,
            "kv_stats": None,
        }
        padded = context.padded_active_request_count
        done: dict[str, object] = {
            "accepted_tokens": None,
            "log_probs": None,
            "top_n_logprobs": None,
            "cuda_graph_request_count": padded if context.using_cuda_graph_this_step() else None,
        }
        log_probs, top_log_probs = controller._dynamic_step_log_probs_bookkeeping()
        if log_probs or top_log_probs:
            done["log_probs"], scores = controller._dynamic_step_calculate_log_probs()
            if top_log_probs:
                found = controller._dynamic_step_calculate_top_n_logprobs(scores)
                done["top_n_logprobs"] = found
        done.update(controller._dynamic_step_context_bookkeeping())
        self._count_step()
        return host._run_coroutine_sync(host.async_bookkeep(done, before, 0.0))

    @torch.inference_mode()
    def start_next(self) -> None:
        """Launch the next step, if it is the loop's: the device is busy until it is asked for."""
        if self.launches_ahead and not self._flights and self._may_run():
            self._prepare_and_start(self.is_new())

    def _note_failures(self, flight: Flight, tokens: Sequence[int]) -> list[int]:
        """Record whose logits had no token; returns what the model reads instead of -1."""
        for number, token in zip(flight.numbers, tokens):
            if token < 0:
                self._sampler.fail(number)
        return [max(token, 0) for token in tokens]

    def _may_run(self) -> bool:
        """Whether the context's next step is one of the loop's."""
        if not runs_here(self._host):
            return False
        due = self._due()
        return due is not None and bool(due or self._host.context.total_request_count)

    def _due(self) -> int | None:
        """Requests that may begin; where nothing is launched ahead, as Megatron has it."""
        return self._admissions.due(freely=self.launches_ahead)

    def _launch_ahead(self, flight: Flight) -> None:
        """Launch the step after this one, unless something but tokens may come between them."""
        rows, context = self._rows, self._host.context
        assert rows is not None
        ended = self._endings.foreseen(flight)
        if (
            not self.launches_ahead
            or self._draws.kind is None
            or not runs_here(self._host)
            or not self._may_go_on(ended)
        ):
            return
        due = self._admissions.due_ahead(len(ended), settled=not flight.reads)
        if due is None:
            return
        # What the device reads is changed where it is.
        self._read.synchronize()
        self._follow(ended, None)
        kept = rows.count
        self._admissions.admit(due)
        if not context.total_request_count:
            # All end and none begins: go_on finds a context that is empty already.
            return
        if due or ((ended or flight.reads) and not rows.has_size_for(kept)):
            self._enter()
        else:
            rows.publish()
        sampled = self._host.controller._sampled_tokens_cuda
        inputs = context.gpu_view.token_to_input_ids[:kept]
        inputs.copy_(sampled.index_select(0, inputs))
        self._start()

    def _all_end(self, flight: Flight, ended: set[int]) -> bool:
        """Whether these are all rows of the step, and their requests are ended here."""
        return len(ended) == len(flight.numbers) and not self.together and not self._reports_more()

    def _may_go_on(self, ended: set[int]) -> bool:
        """Whether the step after this one is prepared here, without the rows of these requests."""
        assert self._rows is not None
        if self._reports_more() or (self.together and ended):
            return False
        return self._rows.may_follow(ended)

    def _follow(self, ended: set[int], tokens: Sequence[int] | None) -> None:
        """Prepare the step after the last one; see ``ContextRows.follow``."""
        rows, members, draws = self._rows, self._members, self._draws
        assert rows is not None and members is not None
        order = rows.follow(ended, tokens)
        if order != list(range(len(members.numbers))):
            members.move(order)
            draws.move(order)
        self._count_step()
        self._state = self._read_state()
        if ended:
            self._admissions.look_again()

    def _has_its_size(self) -> bool:
        """Whether Megatron would pad the step that is prepared as the last one."""
        assert self._rows is not None
        return self._rows.has_size_for(self._rows.count)

    def _clear(self) -> None:
        """All requests of the last step have ended; the context may be empty already."""
        self._read.synchronize()
        if self._host.context.total_request_count:
            leave_none(self._host.context)
        self._flights.clear()
        self._endings.forget()
        self._rows = self._members = None

    def _append(
        self,
        numbers: Sequence[int],
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
        *,
        without: set[int],
    ) -> list[Progress]:
        """Give a step's tokens to the requests of all rows but some."""
        assert self._members is not None
        if without:
            rows = [row for row in range(len(numbers)) if row not in without]
            numbers, tokens = ([each[row] for row in rows] for each in (numbers, tokens))
            log_probs = None if log_probs is None else [log_probs[row] for row in rows]
        return self._members.append(numbers, tokens, log_probs)

    def _prepare_and_start(self, new: bool) -> None:
        """Launch a step after one whose tokens are known."""
        if new:
            due = self._due()
            self.interrupt()
            self._admissions.admit(due or 0)
            if not self._host.context.total_request_count:
                return
            self._enter()
        else:
            assert self._rows is not None
            self._rows.publish()
        self._start()

    def _enter(self) -> None:
        """Let Megatron prepare the step, and read what its requests are."""
        host, context = self._host, self._host.context
        if self.graphs is not None:
            self.graphs.keep_for(context)
        # Without this event it would wait for the device.
        host.controller._dynamic_step_context_init(record_bookkeeping_done_event=True)
        self._rows = ContextRows(context)
        if self._members is None:
            self._members = Members(host, self._sampler)
        self._members.join(self._rows.numbers())
        self._begin_draws()
        self._state = self._read_state()

    def _begin_draws(self) -> None:
        assert self._rows is not None and self._members is not None
        self._draws.begin(self._members.sampled(), self._rows.positions())

    def _start(self) -> None:
        """Send the device a step whose rows it has, and let it return the tokens."""
        rows, members, draws = self._rows, self._members, self._draws
        context = self._host.context
        assert rows is not None and members is not None
        if draws.changes:
            self._begin_draws()
        draws.publish()
        self._read.record()
        self._device_step.launch(rows.count, self.graphs, with_draws=not self.together)
        scores = rows.wants("return_log_probs").astype(bool).tolist()
        landing = self._landings[0]
        self._landings.reverse()
        landing.expect(
            self._device_step.drawn[: rows.count],
            self._device_step.log_probs(rows.count) if any(scores) else None,
        )
        self._flights.append(
            Flight(
                list(members.numbers),
                rows.at_their_ends(),
                rows.wants("termination_id").tolist(),
                scores,
                context.batch_dimensions,
                context.using_cuda_graph_this_step(),
                landing,
            )
        )

    def _reports_more(self) -> bool:
        """Whether requests want log-probabilities of other tokens than those drawn."""
        assert self._rows is not None
        wants = self._rows.wants
        if not wants("return_log_probs").any():
            return bool(wants("top_n_logprobs").any())
        return bool(wants("top_n_logprobs").any() or not wants("skip_prompt_log_probs").all())

    def _count_step(self) -> None:
        context = self._host.context
        context.step_count += 1
        context.prefix_cache_lru_clock += 1

    def _read_state(self) -> tuple[int, ...]:
        """What a step of others would change."""
        context = self._host.context
        return (
            context.step_count,
            context.total_request_count,
            context.memory_buffer.data_ptr(),
            context.gpu_view._buf.data_ptr(),
        )
