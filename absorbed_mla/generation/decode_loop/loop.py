"""Runs the decode steps of an engine without Megatron's scheduler."""

from __future__ import annotations

import time
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.models.gpt import GPTModel

from absorbed_mla.generation.decode_loop.conditions import is_decode_step, may_admit
from absorbed_mla.generation.decode_loop.context_rows import ContextRows
from absorbed_mla.generation.decode_loop.draws import Draws, Kind
from absorbed_mla.generation.decode_loop.graphs import StepGraphs
from absorbed_mla.generation.decode_loop.members import Members
from absorbed_mla.generation.requests import Progress
from absorbed_mla.generation.sampler import RequestSampler


class DecodeLoop:
    """Decode steps between two events: a request ends, is admitted, is paused, is aborted.

    A step is :meth:`forward`, then either :meth:`go_on` or, if that finds such an event,
    :meth:`finish`, in which Megatron's own functions do their part. After each of them Megatron's
    context and requests are those that its own step would have left.

    Args:
        host: Megatron's engine.
        model: Generates.
        sampler: Of the engine.
        graphs: Whether steps that are padded for CUDA graphs are captured, each as a whole.
        together: Whether ranks with requests of their own compute each step together. What depends
            on a rank's requests, drawing among it, then stays out of the graphs, and nothing is
            launched ahead.

    Attributes:
        graphs: Of whole steps; None if they are not captured.
        together: As given.
        launches_ahead: Whether a step is launched before the tokens of the one before it are
            handed out, where neither depends on the other.
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
        self.graphs = StepGraphs(model) if graphs else None
        context, controller = host.context, host.controller
        # Context-parallel ranks go on with the tokens of the first of them.
        own = parallel_state.get_context_parallel_world_size() > 1
        self._draws = Draws(context.max_requests, controller.vocab_size, own=own)
        self._tokens = torch.zeros(context.max_requests, dtype=torch.int64, pin_memory=True)
        self._arrived = torch.cuda.Event()
        # Rows and requests, while steps follow each other; what they were made from.
        self._rows: ContextRows | None = None
        self._members: Members | None = None
        self._state: tuple[int, ...] = ()
        # The first request that waits, after the scheduler could not admit it.
        self._waiting: int | None = None
        # Whether the next step runs on the device already.
        self._ahead = False
        self.launches_ahead = self.graphs is not None and not together
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
        """Megatron's own step comes next; a step that was launched ahead counts for nothing.

        What it has written to the cache will be written again.
        """
        if self._ahead:
            # It reads tables that Megatron is about to change.
            self._arrived.synchronize()
        self._rows = self._members = self._waiting = None
        self._ahead = False

    def applies(self) -> bool:
        """Whether the next step only decodes, and admits no request."""
        host = self._host
        if not is_decode_step(host):
            return False
        if not host.waiting_request_ids:
            return True
        first = host.waiting_request_ids[0]
        if first != self._waiting:
            if may_admit(host):
                return False
            self._waiting = first
        return True

    def is_new(self) -> bool:
        """Whether Megatron has to prepare the next step, because its requests are others."""
        return self._rows is None or self._read_state() != self._state

    @torch.inference_mode()
    def forward(self, new: bool) -> None:
        """Run the model and draw the tokens, unless that was launched ahead; wait for them.

        Args:
            new: Whether Megatron prepares the step: :meth:`is_new`, of any rank that computes it.
        """
        if new:
            self.interrupt()
            self._enter()
            self._start()
        elif not self._ahead:
            self._rows.publish()
            self._start()
        assert self._rows is not None
        # The device is busy meanwhile.
        self._draws.prepare([position + 1 for position in self._rows.positions()])
        start = time.perf_counter()
        self._arrived.synchronize()
        self.waited += time.perf_counter() - start
        self._ahead = False

    @torch.inference_mode()
    def go_on(self) -> list[Progress] | None:
        """Add the tokens to the requests, and make the context ready for the next step.

        Returns:
            Progress of all requests; None, before anything is changed, if it takes Megatron to do
            so.
        """
        rows, members = self._rows, self._members
        assert rows is not None and members is not None
        tokens = self._tokens[: rows.count].numpy().copy()
        listed = tokens.tolist()
        full = rows.full()
        if (
            self._host.stop_word_finished_request_ids
            or rows.has_ended(tokens).any()
            or members.stops(listed)
            or not rows.has_blocks(full)
            or self._reports_more()
        ):
            return None
        log_probs = self._log_probs()
        moved = rows.extend(full)
        if moved is not None:
            former, places = moved
            tokens[places] = tokens[former]
            self._draws.move(former, places)
        rows.advance(tokens)
        self._count_step()
        self._state = self._read_state()
        if self.launches_ahead and self._draws.kind is not None:
            rows.publish()
            self._start()
            self._ahead = True
        # In the order of the rows that the tokens were drawn for.
        progress = members.append(listed, log_probs)
        if moved is not None:
            members.move(*moved)
        return progress

    @torch.inference_mode()
    def finish(self) -> dict:
        """Let Megatron end, pause and evict requests; returns what its ``step_modern`` does."""
        host, controller, context = self._host, self._host.controller, self._host.context
        self.interrupt()
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

    def _enter(self) -> None:
        """Let Megatron prepare the step, and read what its requests are."""
        host, controller, state = self._host, self._host.controller, self._read_state()
        if self.graphs is not None:
            self.graphs.keep_for(host.context)
        controller._dynamic_step_context_init()
        self._rows = ContextRows(host.context)
        self._members = Members(host, self._sampler, self._rows.numbers())
        self._begin_draws()
        self._state = state

    def _begin_draws(self) -> None:
        assert self._rows is not None and self._members is not None
        self._draws.begin(self._members.sampled, self._rows.positions())

    def _start(self) -> None:
        """Send the device a step whose rows it has, and let it return the tokens."""
        rows, draws, controller = self._rows, self._draws, self._host.controller
        assert rows is not None
        if draws.changes:
            self._begin_draws()
        draws.publish()
        self._launch(rows.count, draws.kind)
        if draws.kind is None:
            controller._dynamic_step_sample_logits()
        sampled = controller._sampled_tokens_cuda[: rows.count]
        self._tokens[: rows.count].copy_(sampled, non_blocking=True)
        self._arrived.record()

    def _launch(self, count: int, kind: Kind | None) -> None:
        """Run the model and draw, by a graph where there is one of this size."""
        context = self._host.context
        if self.graphs is None or not context.using_cuda_graph_this_step():
            self._run(count, kind)
            return
        sizes, padded = context.padded_batch_dimensions, context.padded_active_request_count
        captured = None if self.together else kind
        self.graphs.run((sizes, captured), partial(self._run, padded, captured))
        if captured is not kind:
            self._draw(count, kind)

    def _run(self, count: int, kind: Kind | None) -> None:
        """Run the model; draw the tokens of the first ``count`` rows unless the sampler has to."""
        controller, context = self._host.controller, self._host.context
        controller._dynamic_step_forward_logits(*context.current_input_and_position_ids())
        self._draw(count, kind)

    def _draw(self, count: int, kind: Kind | None) -> None:
        if kind is not None:
            controller = self._host.controller
            logits = controller._all_logits_cuda[0, :count]
            controller._sampled_tokens_cuda[:count].copy_(self._draws.draw(logits, kind))

    def _log_probs(self) -> list[float] | None:
        """Log-probabilities of the tokens, of all requests if one of them asks for its own."""
        assert self._rows is not None
        if not self._rows.wants("return_log_probs").any():
            return None
        found, _ = self._host.controller._dynamic_step_calculate_log_probs()
        return [value for [value] in found]

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
