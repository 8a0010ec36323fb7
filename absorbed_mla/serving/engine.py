"""Megatron's ``DynamicInferenceEngine`` around a live model that is trained before and after.

    engine = Engine(model, EngineOptions(max_sequence_length=4096, max_requests=16))
    results = engine.generate(prompts, SamplingParams(max_tokens=128))

    with engine:  # step by step
        number = engine.add_request(prompt, SamplingParams(max_tokens=128))
        while engine.is_busy():
            for progress in engine.step():
                print(progress.number, progress.tokens)
        engine.results[number]

Scheduler, block allocator and prefix cache are Megatron's; ``sampler.py`` draws the tokens. The
weights are the model's, read where they are. On a machine without a GPU,
:func:`absorbed_mla.cpu_host.enable_cpu_host` comes before the model is built; ``num_cuda_graphs``
then pads steps as for graphs, but captures none.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
)
from megatron.core.inference.sampling_params import SamplingParams as HostSamplingParams
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.log_once import log_once
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.megatron_engine import host_engine, inference_mode, require_inference_mode
from absorbed_mla.serving.model_ranks import Replicas, agree, require_layout, require_shared_cache
from absorbed_mla.serving.prefix_cache.stored import stored_prefixes
from absorbed_mla.serving.request_record import RequestRecord
from absorbed_mla.serving.request_results import (
    Progress,
    Result,
    count_tokens,
    progress_of,
    result_of,
)
from absorbed_mla.serving.sampling.non_finite_logits import Failures
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.sampling.sampler import RequestSampler, derive_seed
from absorbed_mla.serving.scheduler.block_pool import require_no_leak
from absorbed_mla.serving.scheduler.conditions import why_never
from absorbed_mla.serving.scheduler.overlap_scheduler import DecodeLoop
from absorbed_mla.serving.scheduler.prefill_graphs import prefill_graphs
from absorbed_mla.serving.statistics import StepCounter

logger = logging.getLogger(__name__)

# Steps in a row without a forward pass after which Megatron's scheduler will never run one.
_MAX_IDLE_STEPS = 3


class Engine:
    """Generates with the weights that a model has, and leaves the model ready to be trained.

    Collective over tensor-parallel and context-parallel ranks and pipeline stages: every rank makes
    the same calls with the same arguments. Data-parallel ranks have requests of their own. If they
    share experts, all of them call :meth:`step` until :meth:`is_busy`, which is collective then, is
    False on all.

    Between :meth:`start` and :meth:`stop`, which ``with`` calls, the model is in evaluation mode
    and must not be trained; :meth:`generate` calls both where needed.

    Args:
        model: This rank's pipeline stage, with ``cache_mla_latents`` in its config, not wrapped by
            DDP or ``Float16Module``.
        options: Sizes of the cache and of steps.

    Attributes:
        results: By number, the results of the requests that have ended.
        statistics: Counters of the steps. Like ``results``, they begin anew with :meth:`start` and
            with every :meth:`generate`.
        host: Megatron's engine.
        decode_loop: Runs steps that only decode; None if Megatron's scheduler runs all of them.

    Raises:
        ValueError: If the model does not cache latents, or is divided over ranks in a way in which
            it cannot generate, or its cache cannot be kept on disk, or an option asks for what
            cannot run with this version of Megatron.
    """

    def __init__(self, model: GPTModel, options: EngineOptions) -> None:
        if not getattr(model.config, "cache_mla_latents", False):
            raise ValueError("the model's config must have cache_mla_latents=True to generate")
        self._replicas = Replicas()
        require_layout(model, self._replicas, cuda_graphs=options.num_cuda_graphs is not None)
        if options.decode_context_parallel:
            require_shared_cache(model, options.num_speculative_tokens)
        self.model, self.options = model, options
        self.vocab_size = model.vocab_size if options.vocab_size is None else options.vocab_size
        self._active: contextlib.ExitStack | None = None
        self._sampler = RequestSampler(options.num_speculative_tokens, agree)
        self.reseed(options.seed)
        with inference_mode(model):
            self.host = host_engine(model, options, self._sampler)
        self._stored = stored_prefixes(model, options, self.host.context, self._replicas)
        drafts = options.num_speculative_tokens > 0
        self._counter = StepCounter(self.host, self._stored, drafts=drafts)
        self.decode_loop = self._decode_loop()
        self._prefill_graphs = prefill_graphs(
            self.host, model, self.decode_loop, options.prefill_graph_tokens
        )
        self._passes = 0
        self._forget_requests()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Put the model into evaluation mode, and forget all requests and cached latents.

        The weights may have changed since the last :meth:`stop`.

        Raises:
            RuntimeError: If the engine has been started or closed.
        """
        if self._active is not None or self.host is None:
            raise RuntimeError("the engine has been started or closed already")
        with contextlib.ExitStack() as stack:
            stack.enter_context(inference_mode(self.model))
            stack.enter_context(self.model.register_forward_hook(self._after_forward))
            if self.decode_loop is not None:
                self.decode_loop.begin()
            self.host.reset()
            if self._stored is not None:
                stack.enter_context(self._stored.opened())
            self._active = stack.pop_all()
        self._forget_requests()

    def capture(self) -> None:
        """Capture the CUDA graphs of steps that read prompts, and empty the prefix cache.

        Without it each is captured when a step of its size first runs. Collective.

        Raises:
            RuntimeError: If the engine has not been started, or has requests.
        """
        if self._active is None or self._has_requests():
            raise RuntimeError("capture needs a started engine without requests")
        if self._prefill_graphs is not None:
            self._prefill_graphs.capture()

    def finish(self) -> None:
        """Abort all requests; where replicas share experts, go on until none has any."""
        if self._active is None or not self._replicas.several:
            return
        for number in list(self._sampling):
            self.abort(number)
        while self.is_busy():
            self.step()

    def stop(self) -> None:
        """Put the model back into its former mode, ready to be trained; may be called twice."""
        if self._active is not None:
            if self.decode_loop is not None:
                self.decode_loop.interrupt()
            self._active.close()
            self._active = None

    def close(self) -> None:
        """Stop, and free the cache; the engine cannot be started again."""
        self.stop()
        if self.decode_loop is not None:
            self.decode_loop.close()
        self.host = self._stored = self._counter = None
        self.decode_loop = self._prefill_graphs = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Result]:
        """Run requests together, to their ends.

        A request that cannot run ends with an error; the others are not affected. An engine that
        was not started begins with an empty prefix cache, and is stopped at the end.

        Args:
            prompts: Token ids.
            sampling: For all prompts, or one for each.
            on_progress: Called after every step for each request with new tokens or an end.

        Returns:
            Results in the order of the prompts.

        Raises:
            ValueError: If the numbers of prompts and sampling parameters differ.
            RuntimeError: If there are requests already.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(each)} samplings")
        started: contextlib.AbstractContextManager = (
            contextlib.nullcontext() if self._active else self
        )
        with started:
            if self.is_busy():
                raise RuntimeError("generate needs an engine without requests")
            self._forget_requests()
            for prompt, params in zip(prompts, each):
                self.add_request(prompt, params)
            while self.is_busy():
                for progress in self.step():
                    if on_progress is not None:
                        on_progress(progress)
        return [self.results[number] for number in range(len(prompts))]

    def add_request(self, prompt: Sequence[int], sampling: SamplingParams) -> int:
        """Queue a request of a started engine; returns its number, counted from 0.

        A request that cannot run gets a result with an error, which the next step reports.
        """
        number = self._num_requests
        self._num_requests += 1
        max_tokens = self.host.context.max_tokens
        error = self.options.why_not(prompt, sampling, self.model.vocab_size, max_tokens)
        if error:
            self._end(number, Result(error=error))
        else:
            self._sampling[number] = sampling
            seed = sampling.seed
            if seed is None:
                seed = derive_seed(self._seed, self._num_seeds)
                self._num_seeds += 1
            self._sampler.add(number, sampling, seed, prompt)
            room = self.options.room(len(prompt))
            drafts = self.options.num_speculative_tokens > 0
            self._queue(number, prompt, sampling.to_host(room, drafts=drafts))
            if sampling.prompt_logprobs is not None and number in self.host.requests:
                # Blocks found in the prefix cache have no logits.
                self.host.requests[number].record[-1].precomputed_block_hashes = []
        return number

    def _queue(self, number: int, prompt: Sequence[int], sampling: HostSamplingParams) -> None:
        """Add a request to Megatron's queue, as its ``add_request`` does.

        That puts the prompt on the device, from where the scheduler reads it again: both wait for
        the step that runs there.
        """
        context = self.host.context
        request = DynamicInferenceRequest(
            request_id=number,
            # In a third of the time of torch.tensor: 0.4 ms less for 8,192 tokens.
            prompt_tokens=torch.frombuffer(array("q", prompt), dtype=torch.int64),
            block_size_tokens=context.block_size_tokens,
            enable_prefix_caching=context.enable_prefix_caching,
        )
        # It belongs to this request alone. Given above, Megatron would copy it, deeply and slowly.
        request.sampling_params = sampling
        self.host._add_request(request)
        entry = self.host.requests.get(number)
        if entry is not None:
            entry.record = RequestRecord.from_request(request)

    def abort(self, number: int) -> None:
        """End a request as soon as possible; it keeps its tokens."""
        if number in self._sampling:
            self._to_abort.add(number)

    def is_busy(self) -> bool:
        """Whether :meth:`step` has something to do or to report, here or where experts are."""
        return self._replicas.any(self._has_requests())

    def _has_requests(self) -> bool:
        ended = self._unreported or self.host.failed_request_ids
        return bool(ended) or self.host.has_unfinished_requests()

    def step(self) -> list[Progress]:
        """Run one forward pass, or report requests that ended without one.

        Where data-parallel ranks share experts, a rank without requests runs an empty pass.

        Returns:
            Of every request with new tokens or an end.

        Raises:
            RuntimeError: If requests wait, but Megatron's scheduler runs none of them.
        """
        require_inference_mode(self.model)
        self._abort()
        reported, self._unreported = self._unreported, []
        if reported and not self._replicas.several:
            return reported
        progress = self._step()
        if self.decode_loop is not None:
            self.decode_loop.start_next()
        return [*reported, *progress]

    def _step(self) -> list[Progress]:
        """:meth:`step` without what has ended before it."""
        self._passes = 0
        progress, step = self._run()
        self._failures.begin_step(self._sampler.failed())
        context = self.host.context
        if progress is not None:
            self._count_step()
            return [*self._without_failures(progress), *self._progress(self._records_of(step))]
        ended = step["finished_request_records"]
        # A request whose prompt is being read in chunks is not among the unfinished ones.
        reading = context.chunked_prefill_request_id >= 0
        if ended or reading or context.has_unfinished_requests():
            self._count_step()
        else:
            self._idle_steps = self._idle_steps + 1 if self._has_requests() else 0
        if self._replicas.several and not self._passes:
            self._run_empty_pass()
        if self._has_requests() and self._idle_steps >= _MAX_IDLE_STEPS:
            raise RuntimeError(
                f"the engine schedules none of {len(self.host.waiting_request_ids)} waiting "
                f"requests; blocks: {context.kv_block_allocator}"
            )
        running = [n for n in step["active_request_ids"] if n in self.host.requests]
        records = {number: (self.host.requests[number].record, False) for number in sorted(running)}
        return list(self._progress(records | self._records_of(step)))

    def _records_of(self, step: dict) -> dict[int, tuple[DynamicInferenceRequestRecord, bool]]:
        """By number, Megatron's records of the requests that a step has ended."""
        ended = step["finished_request_records"]
        return {record.request_id: (record, True) for record in ended}

    def _without_failures(self, progress: Sequence[Progress]) -> Sequence[Progress]:
        """Progress of the decode loop, whose tokens the sampler has, without those of failures."""
        if not self._failures.any_in_step:
            return progress
        cut = []
        for one in progress:
            before = len(self._sampler.request(one.number).generated) - len(one.tokens)
            cut.append(self._failures.cut(one, before))
        return [one for one in cut if one.tokens or one.result]

    def _count_step(self) -> None:
        """Bring the statistics up to date after a forward pass."""
        self._idle_steps = 0
        loop = self.decode_loop
        self._counter.count(None if loop is None else loop.last)

    def _run(self) -> tuple[list[Progress] | None, dict]:
        """A step: progress of what goes on, if the loop did all of it; what Megatron's returns."""
        loop = self.decode_loop
        if loop is None or self._replicas.any(not loop.applies()):
            if loop is not None:
                loop.interrupt()
            return None, self.host.step_modern()
        if not loop.forward(self._replicas.any(loop.is_new())):
            return None, self.host.step_modern()
        # A graph calls no hook.
        self._passes = 1
        done = loop.go_on()
        if done is None:
            return None, loop.finish()
        progress, ended = done
        return progress, {"finished_request_records": ended}

    def _decode_loop(self) -> DecodeLoop | None:
        """As the options ask for it; None, with the reason logged, if it cannot run."""
        asked, together = self.options.decode_loop, self._replicas.several
        if asked is False:
            return None
        why = why_never(self.host)
        if together and exchange_of(self.model) is None:
            # Each step then asks all replicas.
            why = why or "data-parallel ranks share experts"
        if why and asked:
            raise ValueError(f"decode_loop=True cannot run: {why}")
        if why:
            log_once(
                logger, f"all steps run by Megatron's scheduler, not by the decode loop: {why}"
            )
            return None
        config = self.model.config
        graphs = config.cuda_graph_impl == "local" and self.options.num_cuda_graphs is not None
        # Ranks that hold one model together run the same steps: they capture and replay together.
        # Context-parallel ones wait for the first of them to draw; stages have no graphs at all.
        one = parallel_state.get_context_parallel_world_size() == 1
        graphs = graphs and one and torch.cuda.is_available()
        return DecodeLoop(self.host, self.model, self._sampler, graphs=graphs, together=together)

    def reseed(self, seed: int) -> None:
        """Begin anew with the seeds of requests that have none; data-parallel ranks differ."""
        self._seed = derive_seed(seed, parallel_state.get_data_parallel_rank())
        self._num_seeds = 0

    def require_no_leak(self) -> None:
        """Check that an engine without requests has all of its blocks.

        Raises:
            RuntimeError: Naming the blocks that are neither free nor in the prefix cache.
        """
        require_no_leak(self.host.context)

    def _forget_requests(self) -> None:
        self.results: dict[int, Result] = {}
        self.statistics = self._counter.begin()
        self._num_requests = self._idle_steps = 0
        self._sampling: dict[int, SamplingParams] = {}
        self._sampler.clear()
        self._failures = Failures()
        self._unreported: list[Progress] = []
        self._to_abort: set[int] = set()

    def _abort(self) -> None:
        """Take waiting requests out of the queue, and end running ones as at a stop word.

        Megatron has no way to abort a request; its step raises if the request's future is
        cancelled. One whose prompt is being read in chunks is aborted after that.
        """
        self._to_abort |= self._failures.numbers
        host = self.host
        if not self._to_abort and not host.stop_word_finished_request_ids:
            return
        # Callers take results away, so these do not say what has ended.
        self._to_abort &= self._sampling.keys()
        host.stop_word_finished_request_ids |= self._to_abort
        for number in sorted(host.stop_word_finished_request_ids):
            if number == host.context.chunked_prefill_request_id:
                # Megatron would forget that it is to end.
                host.stop_word_finished_request_ids.discard(number)
            elif number in host.waiting_request_ids:
                self._end_waiting(number)

    def _end_waiting(self, number: int) -> None:
        """End a request that has not begun, or was evicted in the step in which it was to end."""
        host = self.host
        host.waiting_request_ids.remove(number)
        host.stop_word_finished_request_ids.discard(number)
        record = host.requests.pop(number).record
        aborted = number in self._to_abort
        result = result_of(record, self._sampling[number], aborted=aborted)
        ended = self._failures.cut(Progress(number, [], result=result), len(result.tokens))
        self._end(number, ended.result)

    def _end(self, number: int, result: Result) -> None:
        """Keep the result of a request that ends without a forward pass, for the next report."""
        self._keep(number, result)
        self._unreported.append(Progress(number, [], result=result))

    def _keep(self, number: int, result: Result) -> None:
        self.results[number] = result
        self._sampler.remove(number)
        self._sampling.pop(number, None)

    def _progress(
        self, records: Mapping[int, tuple[DynamicInferenceRequestRecord, bool]]
    ) -> Iterator[Progress]:
        """Progress by Megatron's record of every request, and whether the request has ended."""
        for number, (record, ended) in records.items():
            before = len(self._sampler.request(number).generated)
            new = count_tokens(record) - before
            result = None
            if ended:
                aborted = number in self._to_abort
                result = result_of(record, self._sampling[number], aborted=aborted)
            if new or ended:
                progress = progress_of(record, number, new, result)
                self._sampler.extend(number, progress.tokens)
                progress = self._failures.cut(progress, before)
                if progress.tokens or ended:
                    yield progress
                result = progress.result
            if result is not None:
                self._keep(number, result)

    def _run_empty_pass(self) -> None:
        """Take part in the experts' exchange of tokens without any."""
        # It forgets all requests of the context.
        assert not self.host.context.total_request_count
        self.host.controller.dummy_forward()

    def _after_forward(self, model: GPTModel, inputs: tuple, output: Tensor) -> Tensor:
        """Give rows of the embedding that are no tokens the probability 0."""
        self._passes += 1
        if model.post_process and self.vocab_size < model.vocab_size:
            output[..., self.vocab_size :] = -torch.inf
        return output
