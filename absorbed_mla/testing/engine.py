"""Generate with Megatron's ``DynamicInferenceEngine``, on a GPU or, in tests, on a CPU.

    with dynamic_engine(model, blocks=64, max_sequence_length=512) as engine:
        run = generate(engine, [Request(prompt, num_tokens=20) for prompt in prompts])
        require_no_leak(engine)
    run.results[0].tokens

Scheduler, allocator, prefix cache and sampling are the host's. On a CPU,
:func:`absorbed_mla.testing.cpu_host.enable_cpu_host` comes first; CUDA graphs are then only as good
as their bookkeeping: ``num_cuda_graphs`` pads every step as a graph's, which runs without one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel

from absorbed_mla.inference.host_buffers import drop_inference_buffers
from absorbed_mla.testing.request import Request, Result, Run

# FlashMLA's, which the host demands of a cache of latents.
BLOCK_SIZE = 64
# Steps in a row in which nothing ran, after which the host's scheduler waits for ever.
_PATIENCE = 3


class IntegerTokenizer:
    """Stands in for a tokenizer: text is numbers with spaces between them.

    Args:
        vocab_size: One more than the largest number.
    """

    bos = eod = -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """``"1 22"`` as [1, 22]."""
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int], **_) -> str:
        """The inverse of :meth:`tokenize`."""
        return " ".join(map(str, tokens))


@contextlib.contextmanager
def dynamic_engine(
    model: GPTModel, *, blocks: int, paused_blocks: int = 0, **inference_config
) -> Iterator[DynamicInferenceEngine]:
    """An engine around ``model``, which is in evaluation mode meanwhile.

    What Megatron keeps process-wide, that an engine is active and the buffers of its steps, is
    forgotten at the end, so that the model can be trained again.

    Args:
        model: With ``cache_mla_latents`` in its config.
        blocks: Of the cache, ``BLOCK_SIZE`` tokens each, the host's dummy block not counted.
        paused_blocks: Of these, those that only paused requests use.
        inference_config: More fields of Megatron's ``InferenceConfig``.
    """
    was_training, was_active = model.training, InferenceMode.is_active()
    fields = {
        "block_size_tokens": BLOCK_SIZE,
        "buffer_size_gb": (blocks + 1) * _block_bytes(model) / 2**30,
        "paused_buffer_size_gb": paused_blocks * _block_bytes(model) / 2**30,
        **inference_config,
    }
    model.eval()
    try:
        context = DynamicInferenceContext(model.config, InferenceConfig(**fields))
        wrapper = GPTInferenceWrapper(model, context)
        controller = TextGenerationController(wrapper, IntegerTokenizer(model.vocab_size))
        yield DynamicInferenceEngine(controller, context)
    finally:
        model.train(was_training)
        if not was_active:
            InferenceMode.unset_active()
        drop_inference_buffers()


def generate(
    engine: DynamicInferenceEngine, requests: Sequence[Request], *, log_probs: bool = False
) -> Run:
    """Run the requests together, to their ends; see :class:`EngineDriver`."""
    driver = EngineDriver(engine, log_probs=log_probs)
    for request in requests:
        driver.add(request)
    while driver.is_busy():
        driver.step()
    return driver.finish()


class EngineDriver:
    """Adds requests to an engine, steps it and cancels requests.

    Requests that the host cannot run are answered with an error, as those are that it refuses
    itself: an empty prompt, a token outside of the vocabulary or no tokens to generate raise within
    its step, and it takes no further one.

    Args:
        engine: Without requests.
        log_probs: Whether to record them.
    """

    def __init__(self, engine: DynamicInferenceEngine, *, log_probs: bool = False) -> None:
        self.engine, self.context = engine, engine.context
        self.log_probs = log_probs
        self.run = Run()
        self._vocab_size = engine.controller.vocab_size
        self._futures: dict[int, asyncio.Future] = {}
        self._to_cancel: set[int] = set()
        self._idle = 0
        self._evicted_before = engine.evicted_request_count
        self._matched_before = engine._prefix_cache_blocks_matched

    def add(self, request: Request) -> int:
        """Queue a request; returns its number, from 0."""
        number = len(self.run.results)
        error = self._why_not(request)
        self.run.results.append(Result([], [], error) if error else None)
        if not error:
            sampling = SamplingParams(
                num_tokens_to_generate=request.num_tokens,
                termination_id=request.stop_token,
                top_k=1,
                return_log_probs=self.log_probs,
                skip_prompt_log_probs=True,
            )
            prompt = list(request.prompt)
            self._futures[number] = self.engine.add_request(number, prompt, sampling)
        return number

    def cancel(self, number: int) -> None:
        """End a request before the next step in which that is possible; it keeps its tokens.

        Megatron has no way of its own, and cancelling its future makes its step raise.
        """
        if number in self._futures and not self._futures[number].done():
            self._to_cancel.add(number)

    def is_busy(self) -> bool:
        """Whether a request waits or runs."""
        return self.engine.has_unfinished_requests()

    def step(self) -> None:
        """One forward of what the host schedules.

        Raises:
            RuntimeError: If requests wait, but nothing has been scheduled for some steps.
        """
        self._cancel()
        ended = self.engine.step_modern()["finished_request_records"]
        # A request whose prompt is being read is not among the unfinished ones.
        reading = self.context.chunked_prefill_request_id >= 0
        if ended or reading or self.context.has_unfinished_requests():
            self._idle = 0
            self._note()
        else:
            self._idle += 1
        if self.is_busy() and self._idle >= _PATIENCE:
            raise RuntimeError(
                f"the engine schedules none of {len(self.engine.waiting_request_ids)} waiting "
                f"requests; blocks: {self.context.kv_block_allocator}"
            )

    def finish(self) -> Run:
        """What came of the requests so far."""
        if self.engine.failed_request_ids:
            self.engine.step_modern()
        self.run.evicted = self.engine.evicted_request_count - self._evicted_before
        self.run.prefix_blocks = self.engine._prefix_cache_blocks_matched - self._matched_before
        for number, future in self._futures.items():
            if future.done() and self.run.results[number] is None:
                request, cancelled = future.result().merge(), number in self._to_cancel
                self.run.results[number] = Result.of(request, cancelled=cancelled)
        return self.run

    def _why_not(self, request: Request) -> str:
        if not request.prompt:
            return "the prompt is empty"
        if request.num_tokens < 1:
            return f"num_tokens must be at least 1, got {request.num_tokens}"
        outside = [token for token in request.prompt if not 0 <= token < self._vocab_size]
        return f"tokens {outside[:3]} are not in the vocabulary" if outside else ""

    def _cancel(self) -> None:
        """Take waiting requests out of the queue; those that run end as at a stop word."""
        queue = self.engine.waiting_request_ids
        for number in self._to_cancel - {self.context.chunked_prefill_request_id}:
            if number in queue:
                queue.remove(number)
                self._to_cancel.remove(number)
                del self._futures[number]
                record = self.engine.requests.pop(number).record
                self.run.results[number] = Result.of(record.merge(), cancelled=True)
                # Where it was told to stop before it was evicted.
                self.engine.stop_word_finished_request_ids.discard(number)
            elif not self._futures[number].done():
                self.engine.stop_word_finished_request_ids.add(number)

    def _note(self) -> None:
        context, run = self.context, self.run
        rows = context.batch_dimensions
        run.steps += 1
        run.graph_steps += context.using_cuda_graph_this_step()
        run.mixed_steps += rows.decode_req_count > 0 and rows.prefill_req_count > 0
        run.most_rows = max(run.most_rows, rows.req_count)
        run.most_paused = max(run.most_paused, context.paused_request_count)
        run.chunks += context.chunked_prefill_request_id >= 0


def require_no_leak(engine: DynamicInferenceEngine) -> None:
    """Every block of an engine without requests is free, or in the prefix cache and unused.

    Raises:
        RuntimeError: Naming the blocks that are not.
    """
    allocator = engine.context.kv_block_allocator
    free = allocator.block_bag[: allocator.total_avail].tolist()
    usable = set(range(allocator.total_count)) - {allocator.dummy_block_idx}
    cached: set[int] = set()
    if allocator.enable_prefix_caching:
        cached = set(allocator.kv_hash_to_block_id.values())
        used = allocator.block_ref_counts.nonzero().flatten().tolist()
        if used:
            raise RuntimeError(f"blocks {used} are referred to, but there is no request")
    if len(set(free)) != len(free) or set(free) & cached or (set(free) | cached) != usable:
        raise RuntimeError(
            f"of blocks 0 to {allocator.total_count - 2}, {sorted(free)} are free and "
            f"{sorted(cached)} in the prefix cache"
        )


def _block_bytes(model: GPTModel) -> int:
    config = model.config
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    return len(model.decoder.layers) * BLOCK_SIZE * width * config.params_dtype.itemsize
