"""Megatron's ``DynamicInferenceEngine`` around a live model that is trained before and after.

    engine = Engine(model, EngineOptions(max_sequence_length=4096, max_requests=16))
    results = engine.generate(prompts, SamplingParams(max_tokens=128))

    with engine:  # step by step
        number = engine.add_request(prompt, SamplingParams(max_tokens=128))
        while engine.is_busy():
            for progress in engine.step():
                print(progress.number, progress.tokens)
        engine.results[number]

Block allocator and prefix cache are Megatron's; ``scheduler/`` runs the steps, and ``sampling/``
samples. The weights are the model's, read where they are. On a machine without a GPU,
:func:`absorbed_mla.cpu_host.enable_cpu_host` comes before the model is built; ``num_cuda_graphs``
then pads steps as for graphs, but captures none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.executor.commands import Abort, Add, Command
from absorbed_mla.serving.megatron_engine.build import host_engine, inference_mode
from absorbed_mla.serving.megatron_engine.names import STRUCTURED_OUTPUTS, owners_of
from absorbed_mla.serving.model_ranks import Replicas, agree, require_layout, require_shared_cache
from absorbed_mla.serving.prefix_cache.stored import stored_prefixes
from absorbed_mla.serving.request_adapters import AdapterRequest, RequestAdapters
from absorbed_mla.serving.request_results import EngineRequests, Progress, Result
from absorbed_mla.serving.returned_choices import ReturnedChoices
from absorbed_mla.serving.sampling.device_sampler import SampledRequest, derive_seed
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.sampling.sampler import RequestSampler
from absorbed_mla.serving.sampling.stop_tokens import end_with_grammar
from absorbed_mla.serving.scheduler.block_pool import require_no_leak
from absorbed_mla.serving.scheduler.cached_blocks import generated_blocks
from absorbed_mla.serving.scheduler.cascade_attention import cascade_attention
from absorbed_mla.serving.scheduler.conditions import overlap_scheduler
from absorbed_mla.serving.scheduler.overlap_scheduler import StepOutput
from absorbed_mla.serving.scheduler.prefill_graphs import prefill_graphs
from absorbed_mla.serving.scheduler.priorities import PriorityScheduling
from absorbed_mla.serving.scheduler.requests import enqueue, evict_all
from absorbed_mla.serving.statistics import MegatronCounters, Statistics
from absorbed_mla.serving.structured_output.request_grammar import RequestGrammars
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary

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
        host: Megatron's engine.
        scheduler: Overlap scheduler; None if Megatron's scheduler runs all steps.
        cascade: Finds prefixes that requests of a step share; None: each has its own.

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
        self._longest_request = options.longest_request
        self._active: contextlib.ExitStack | None = None
        self._sampler = RequestSampler(options.num_speculative_tokens, agree)
        self.reseed(options.seed)
        with inference_mode(model):
            self.host = host_engine(model, options, self._sampler)
        self._priorities: PriorityScheduling | None = None
        if options.scheduling_policy == "priority":
            self._priorities = PriorityScheduling(self.host)
        self._adapters = RequestAdapters(model, self.host.context)
        self._choices: ReturnedChoices | None = self.host.context.returned_choices
        self._stored = stored_prefixes(model, options, self.host.context, self._replicas)
        self._generated = generated_blocks(self.host)
        drafts = options.num_speculative_tokens > 0
        self._megatron_counters = MegatronCounters(self.host, self._stored, drafts=drafts)
        self.scheduler = overlap_scheduler(
            self.host, model, self._sampler, options, lockstep=self._replicas.several
        )
        if self.scheduler is not None:
            self.scheduler.generated = self._generated
        graphs = None if self.scheduler is None else self.scheduler.runner.graphs
        if graphs is not None:
            graphs.begin_step = self._adapters.begin_step
        together = graphs is not None and self._replicas.several
        self.cascade = cascade_attention(self.host.context, model, options, lockstep=together)
        if self.scheduler is not None:
            self.scheduler.runner.cascade = self.cascade
        self._prefill_graphs = prefill_graphs(
            self.host, model, graphs, options.prefill_graph_tokens
        )
        # Of requests with structured outputs, once their vocabulary is known.
        self._grammars: RequestGrammars | None = None
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
            stack.enter_context(self._adapters.applied())
            stack.enter_context(self.model.register_forward_hook(self._after_forward))
            if self.cascade is not None:
                self.cascade.forget()
                hook = self.cascade.before_forward
                stack.enter_context(self.model.register_forward_pre_hook(hook))
            if self._choices is not None:
                stack.enter_context(self._choices.recording())
            if self.scheduler is not None:
                self.scheduler.start()
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

    def forget_cache(self) -> None:
        """Forget all cached latents, as after an update of the weights.

        Requests that run are computed again, with the tokens that they have, before those that
        wait.
        """
        host, context = self.host, self.host.context
        if self.scheduler is not None:
            self.scheduler.reset()
        running = evict_all(host)
        if self._generated is not None:
            self._generated.forget_ended()
        context.reset(preserve_counters=True)
        if self._priorities is not None and running:
            self._priorities.sort(moved=True)
        if self._stored is not None:
            self._stored.open_again()

    def has_cached_requests(self) -> bool:
        """Whether requests have latents in the cache."""
        return self.host.context.total_request_count > 0

    def finish(self) -> None:
        """Abort all requests; where replicas share experts, go on until none has any."""
        if self._active is None or not self._replicas.several:
            return
        waiting = [request.number for request in self._adapters.waiting]
        for number in [*self._requests.params, *waiting]:
            self.abort(number)
        while self.is_busy():
            self.step()

    def stop(self) -> None:
        """Put the model back into its former mode, ready to be trained; may be called twice."""
        if self._active is not None:
            if self.scheduler is not None:
                self.scheduler.reset()
            self._active.close()
            self._active = None

    def close(self) -> None:
        """Stop, and free the cache; the engine cannot be started again."""
        self.stop()
        if self._grammars is not None:
            self._grammars.close()
        if self._megatron_counters is not None:
            self._megatron_counters.write_to(self._statistics)
        if self.scheduler is not None:
            self.scheduler.close()
        self.host = self._stored = self._generated = self._megatron_counters = None
        self._choices = None
        self.scheduler = self._prefill_graphs = self._priorities = self.cascade = None

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
        with self if self._active is None else contextlib.nullcontext():
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

    def add_request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> int:
        """Queue a request of a started engine; returns its number, counted from 0.

        A request that cannot run gets a result with an error, which the next step reports. Blocks
        of the prefix cache are shared among requests with the same ``cache_salt`` and adapter.
        ``priority`` needs ``scheduling_policy="priority"``.
        """
        max_tokens = self.host.context.max_tokens
        error = self.options.why_not(prompt, sampling, self.model.vocab_size, max_tokens, priority)
        if sampling.structured_outputs is not None and self._grammars is None:
            error = error or "structured_outputs needs set_vocabulary"
        if lora_request is not None and not self._adapters.enabled:
            error = error or "lora_request needs enable_lora=True, got False"
        return self._add(Add(prompt, sampling, cache_salt, lora_request, priority), error)

    def _add(self, one: Add, error: str = "") -> int:
        """:meth:`add_request` of a request that was checked; ``error`` is why it cannot run."""
        number = self._num_requests
        self._num_requests += 1
        prompt, salt, lora = one.prompt, one.cache_salt, one.lora_request
        if error:
            self._requests.end(number, Result(error=error))
        elif lora is None:
            self._enqueue(number, prompt, one.params, salt, one.priority)
        else:
            self._adapters.add(AdapterRequest(one.priority, number, prompt, one.params, salt, lora))
            self._enqueue_adapted()
        return number

    def _enqueue_adapted(self) -> None:
        """Queue the requests for whose adapters there is room now."""
        for one, salt, error in self._adapters.ready(self._requests.params.keys()):
            if error:
                self._requests.end(one.number, Result(finish="error", error=error))
            else:
                self._enqueue(one.number, one.prompt, one.sampling, salt, one.priority)

    def _enqueue(
        self,
        number: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        cache_salt: str | None,
        priority: int,
    ) -> None:
        """Queue a request that can run, here and in Megatron's engine."""
        seed = sampling.seed
        if seed is None:
            seed = derive_seed(self._seed, self._num_seeds)
            self._num_seeds += 1
        sampled = SampledRequest(sampling, seed, prompt, number=number)
        if sampling.structured_outputs is not None and self._grammars is not None:
            sampled.grammar = self._grammars.of(sampling)
        self._requests.begin(number, sampling, sampled)
        if self._choices is not None:
            self._choices.begin(number, len(prompt), sampling)
        drafts = self.options.num_speculative_tokens > 0
        of_host = sampling.to_host(self._longest_request - len(prompt), drafts=drafts)
        enqueue(self.host, number, prompt, of_host, cache_salt, priority)
        if self._priorities is not None:
            self._priorities.place_last()

    def set_vocabulary(self, vocabulary: TokenVocabulary) -> None:
        """Know the texts of tokens, without which there are no structured outputs.

        Grammars are not checked: ``LLM`` does that before it adds a request.

        Raises:
            ValueError: If this Megatron cannot end requests whose texts are complete.
        """
        if self._grammars is None:
            STRUCTURED_OUTPUTS.require(owners_of(self.host))
            end_with_grammar(self.host, self._sampler.requests)
        if self._grammars is None or self._grammars.vocabulary != vocabulary:
            self._grammars = RequestGrammars(vocabulary)

    def abort(self, number: int) -> None:
        """End a request as soon as possible; it keeps its tokens."""
        if self._adapters.discard(number):
            self._requests.end(number, Result(finish="abort"))
        elif number in self._requests.params:
            self._requests.to_abort.add(number)

    def is_busy(self) -> bool:
        """Whether :meth:`step` has something to do or to report, here or where experts are."""
        return self._on_any(self._has_requests())

    def execute(self, commands: Sequence[Command]) -> list[Progress]:
        """Carry out commands, then a step if there is anything to do.

        Requests are not checked again: ``PromptEncoder`` has found that they can run. Results are
        in the progress, and not kept: those of a server must not pile up.
        """
        for command in commands:
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                self.abort(command.number)
            else:
                self.set_vocabulary(command.vocabulary)
        progress = self.step() if self.is_busy() else []
        for one in progress:
            if one.result is not None:
                self.results.pop(one.number)
        return progress

    def step(self) -> list[Progress]:
        """Run one forward pass, or report requests that ended without one.

        Where data-parallel ranks share experts, a rank without requests runs an empty pass.

        Returns:
            Of every request with new tokens or an end.

        Raises:
            RuntimeError: If requests wait, but Megatron's scheduler runs none of them.
        """
        self._began = time.time()
        self._stay_in_inference_mode()
        self._abort()
        if self._adapters.waiting:
            self._enqueue_adapted()
        reported, self._requests.unreported = self._requests.unreported, []
        if reported and not self._replicas.several:
            return self._with_choices(reported)
        scheduler, self._passes = self.scheduler, 0
        output: StepOutput | None = None
        if scheduler is not None and self._on_any(not scheduler.can_step()):
            scheduler.reset()
        elif scheduler is not None:
            output = scheduler.step(new=self._on_any(scheduler.has_new_batch()))
        if output is None:
            step = self.host.step_modern()
            output = StepOutput(failed=self._sampler.failed(), megatron_step=step)
        else:
            self._passes = 1  # a graph calls no hook
        progress = self._process_output(output)
        if self._priorities is not None:
            self._priorities.sort()
        if self._requests.without_tokens:
            self._requests.tell_starts(progress, self.host.requests)
        if scheduler is not None:
            scheduler.launch_next()
        return self._with_choices([*reported, *progress])

    def _process_output(self, output: StepOutput) -> list[Progress]:
        """Progress of all requests of a step that has ended."""
        requests, step, progress = self._requests, output.megatron_step, output.progress
        if output.failed and self._generated is not None:
            self._generated.fail(output.failed)
        if output.failed or requests.failures.active:
            requests.failures.begin_step(output.failed)
            progress = requests.without_failures(progress)
        if step is None:
            self._count_step()
            records = {record.request_id: (record, True) for record in output.finished}
            return [*progress, *(requests.progress(records) if records else ())]
        context, ended = self.host.context, step["finished_request_records"]
        # A request whose prompt is being read in chunks is not among the unfinished ones.
        chunked = context.chunked_prefill_request_id >= 0
        if ended or chunked or context.has_unfinished_requests():
            self._count_step()
        else:
            self._idle_steps = self._idle_steps + 1 if self._has_requests() else 0
        if self._replicas.several and not self._passes:
            # The experts' exchange of tokens without any; it forgets all requests of the context.
            assert not context.total_request_count
            self.host.controller.dummy_forward()
        if self._has_requests() and self._idle_steps >= _MAX_IDLE_STEPS:
            raise RuntimeError(
                f"the engine schedules none of {len(self.host.waiting_request_ids)} waiting "
                f"requests; blocks: {context.kv_block_allocator}"
            )
        running = [n for n in step["active_request_ids"] if n in self.host.requests]
        records = {number: (self.host.requests[number].record, False) for number in sorted(running)}
        records |= {record.request_id: (record, True) for record in ended}
        return list(requests.progress(records))

    def _with_choices(self, progress: list[Progress]) -> list[Progress]:
        return progress if self._choices is None else self._choices.given_to(progress)

    def _on_any(self, value: bool) -> bool:
        """Whether it is true on a replica that shares experts with this one; collective then."""
        return self._replicas.any(value) if self._replicas.several else value

    def _has_requests(self) -> bool:
        ended = self._requests.unreported or self.host.failed_request_ids
        return bool(ended or self._adapters.waiting) or self.host.has_unfinished_requests()

    def _stay_in_inference_mode(self) -> None:
        """Enter both modes again, if something else in the process has left them in between.

        Another engine that stops does so, and programs that evaluate: Megatron would return the
        logits of all tokens in place of each request's last one, and dropout would be on.
        """
        if not InferenceMode.is_active():
            InferenceMode.set_active()
        if self.model.training:
            self.model.eval()

    @property
    def statistics(self) -> Statistics:
        """Counters of the steps; like ``results``, they begin anew with every :meth:`generate`."""
        if self._megatron_counters is not None:
            self._megatron_counters.write_to(self._statistics)
            self._statistics.waiting += len(self._adapters.waiting)
        return self._statistics

    def _count_step(self) -> None:
        """Count the scheduler's last step, or Megatron's."""
        self._idle_steps, context, found = 0, self.host.context, self._statistics
        step = None if self.scheduler is None else self.scheduler.last
        sizes, padded = context.batch_dimensions, context.using_cuda_graph_this_step()
        if step is not None:
            sizes, padded = step.sizes, step.padded
        found.steps += 1
        found.graph_steps += padded
        found.mixed_steps += sizes.decode_req_count > 0 and sizes.prefill_req_count > 0
        found.most_rows = max(found.most_rows, sizes.req_count)
        found.most_paused = max(found.most_paused, context.paused_request_count)
        if isinstance(context, OffloadingContext):
            found.streamed_blocks += context.tiers.num_streamed
        chunked = context.chunked_prefill_request_id
        if chunked >= 0:
            found.chunks += 1
            record = self.host.requests[chunked].record
            record.first_chunk = record.first_chunk or self._began

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
        self._sampler.clear()
        if self._generated is not None:
            self._generated.forget_ended()
        self._requests = EngineRequests(self._sampler.requests)
        self.results = self._requests.results
        self._statistics = Statistics()
        self._megatron_counters.begin()
        self._num_requests = self._idle_steps = 0
        self._adapters.clear()
        if self._choices is not None:
            self._choices.clear()

    def _abort(self) -> None:
        """Take waiting requests out of the queue, and end running ones as at a stop word.

        Megatron has no way to abort a request; its step raises if the request's future is
        cancelled. One whose prompt is being read in chunks is aborted after that.
        """
        host, requests = self.host, self._requests
        if requests.failures.numbers:
            requests.to_abort |= requests.failures.numbers
        if not requests.to_abort and not host.stop_word_finished_request_ids:
            return
        requests.end_aborted(host)

    def _after_forward(self, model: GPTModel, inputs: tuple, output: Tensor) -> Tensor:
        """Give rows of the embedding that are no tokens the probability 0."""
        self._passes += 1
        if model.post_process and self.vocab_size < model.vocab_size:
            output[..., self.vocab_size :] = -torch.inf
        return output
