"""``LLM``: prompts in, texts out.

from absorbed_mla import LLM, SamplingParams

with LLM("DeepSeek-V2-Lite", tensor_parallel_size=2) as llm:
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
print(output.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.llm.completion import Completion, position_logprobs
from absorbed_mla.llm.options import LLMOptions
from absorbed_mla.llm.outputs import RequestOutput
from absorbed_mla.llm.tokenizers import Message, Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from absorbed_mla.generation.requests import Progress, Result, Statistics
    from absorbed_mla.llm.runner import Abort, Add, Runner

# Options that decide how a model is built.
_BUILT_WITH = {
    *("dtype", "device", "form", "latent_cache_dtype", "parity"),
    *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
    "data_parallel_attention",
}
# A text, or token ids.
Prompt = str | Sequence[int]


@dataclass
class _Request:
    """A prompt and its outputs."""

    output: RequestOutput
    params: SamplingParams
    completions: list[Completion] = field(default_factory=list)
    # Of the engine, by output.
    numbers: list[int] = field(default_factory=list)


class LLM:
    """Generates text with a model of multi-head latent attention.

    It is not thread-safe; ``absorbed_mla.llm.server`` serves many clients with one.

    In a script or a notebook, the model runs in processes of its own, one for each tensor-parallel
    rank of each pipeline stage. Under torchrun, and around a live model (:meth:`from_model`), it
    runs in this process:
    every rank makes the same calls with the same arguments and gets the same outputs.

    Args:
        model: Folder with a checkpoint: Hugging Face's, Megatron's (``torch_dist`` or per rank), or
            this package's. It is converted in memory, nothing is written.
        tokenizer: Folder, ``"bytes"`` (every byte is a token), a tokenizer of transformers, or None
            for the one that came with the model. Without one, prompts and outputs are token ids.
        options: Fields of :class:`absorbed_mla.llm.options.LLMOptions`.

    Raises:
        ValueError: If checkpoint, options and machine do not fit each other.
        EngineDeadError: From any method, after a process of the model has ended.
    """

    def __init__(
        self, model: str | Path, *, tokenizer: str | Path | Any | None = None, **options: Any
    ) -> None:
        from absorbed_mla.llm.front import Front, GatheringRunner
        from absorbed_mla.llm.load import end_tokens, open_model, require_model, tokenizer_folder
        from absorbed_mla.llm.ranks import started_by_torchrun
        from absorbed_mla.llm.runner import LocalRunner
        from absorbed_mla.llm.workers import ProcessRunner

        folder, given = Path(model), _options(options)
        checkpoint = open_model(folder)
        ranks = started_by_torchrun()
        world = int(os.environ.get("WORLD_SIZE", 1)) if ranks else None
        given = given.for_processes(world)
        require_model(checkpoint, given)
        ends = end_tokens(checkpoint)
        found = open_tokenizer(tokenizer, tokenizer_folder(checkpoint), ends)
        runner: Runner
        if world is not None:
            rank = int(os.environ["RANK"])
            kind = GatheringRunner if given.data_parallel_attention else LocalRunner
            runner = kind.of_checkpoint(folder, given, rank, world, None)
        else:
            runner = ProcessRunner(folder, given)
        if isinstance(runner, GatheringRunner | ProcessRunner) and given.data_parallel_attention:
            runner = Front(runner, given.num_processes)
        self._set_up(runner, found, ends, awake=True)

    def _set_up(
        self, runner: Runner, tokenizer: Tokenizer | None, ends: Sequence[int], *, awake: bool
    ) -> None:
        self._runner = runner
        self.tokenizer = tokenizer
        own = () if tokenizer is None else tokenizer.end_tokens
        self._end_tokens = tuple(dict.fromkeys([*ends, *own]))
        self._sizes = runner.options()
        self._names = itertools.count()
        self._awake = awake
        self._forget()

    @classmethod
    def from_model(
        cls, model: Any, *, tokenizer: str | Path | Any | None = None, **options: Any
    ) -> LLM:
        """Around a live model, such as a trainer's, whose weights are read where they are.

        It begins asleep. :meth:`generate`, :meth:`chat` and :meth:`stream` wake it for one call and
        leave the model ready to be trained; :meth:`wake` and :meth:`sleep` keep it awake between
        calls.

        Args:
            model: Megatron's ``GPTModel`` of this rank, also inside its wrappers (DDP,
                ``Float16Module``), with ``cache_mla_latents=True`` in its config. Tensor-parallel
                ranks and pipeline stages make the same calls; data-parallel ranks have prompts of
                their own, also where they share experts: then :meth:`sleep`, which ends
                :meth:`generate` and the like, waits until all of them sleep.
            tokenizer: As for the class.
            options: As for the class, but for those that decide how the model is built (``dtype``,
                ``device``, ``form``, ``latent_cache_dtype``, ``parity`` and parallel sizes): it has
                them already.
                ``max_model_len`` is needed if the model does not say how many positions it has.

        Raises:
            ValueError: If the model cannot generate, or an option is not for it.
        """
        from absorbed_mla.generation import cuda_graphs
        from absorbed_mla.generation.ranks import Replicas, require_layout, require_shared_cache
        from absorbed_mla.llm.runner import LocalRunner, fitting_tokens

        built = sorted(_BUILT_WITH & set(options))
        if built:
            raise ValueError(
                f"from_model has no option {', '.join(built)}: the model has it already"
            )
        given = _options(options)
        if isinstance(model, list | tuple):
            raise ValueError(
                f"model must be one GPTModel, got a {type(model).__name__} of {len(model)}: "
                "virtual pipeline stages cannot generate"
            )
        while not hasattr(model, "max_sequence_length") and hasattr(model, "module"):
            model = model.module
        if not getattr(model.config, "cache_mla_latents", False):
            raise ValueError("the model's config must have cache_mla_latents=True to generate")
        if given.cuda_graphs:
            cuda_graphs.require_model_fields(model.config)
        require_layout(model, Replicas(), cuda_graphs=given.cuda_graphs)
        if given.decode_context_parallel:
            require_shared_cache(model, given.num_speculative_tokens)
        layers = model.config.mtp_num_layers or 0
        if given.num_speculative_tokens and not layers:
            raise ValueError(
                f"num_speculative_tokens {given.num_speculative_tokens} needs a model with a "
                "multi-token-prediction (MTP) layer, and this one has none"
            )
        found = open_tokenizer(tokenizer, None)
        longest = max(model.max_sequence_length, given.max_model_len or 0)
        vocab_size = model.vocab_size
        if found is not None:
            vocab_size = min(vocab_size, found.vocab_size)
        fitting = fitting_tokens(model, given)
        sizes = given.engine_options(longest, vocab_size, fitting)
        llm = cls.__new__(cls)
        llm._set_up(LocalRunner(model, sizes), found, (), awake=False)
        return llm

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, or free the cache of a live model; may be called twice."""
        self._runner.close()
        self._awake = False

    # Whole calls.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for prompts together; returns when all outputs have ended.

        Args:
            prompts: One or several; each a text or token ids.
            sampling_params: For all prompts, or one for each; None: ``SamplingParams()``.
            use_tqdm: Show a progress bar on stderr.

        Returns:
            One for each prompt, in their order.

        Raises:
            ValueError: If a prompt cannot run, before any of them does.
        """
        final: dict[str, RequestOutput] = {}
        names: list[str] = []
        with _bar(use_tqdm) as bar:
            for output in self._run(prompts, sampling_params, names):
                bar.total = len(names)
                if output.finished:
                    final[output.request_id] = output
                    bar.update()
        return [final[name] for name in names]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next answer of one or several conversations.

        Args:
            messages: A conversation (``[{"role": "user", "content": "..."}]``), or several.
            sampling_params: As for :meth:`generate`.
            use_tqdm: As for :meth:`generate`.
            template_options: For the tokenizer's ``apply_chat_template``.

        Raises:
            ValueError: If there is no tokenizer with a chat template, or a prompt cannot run.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self._tokenizer().chat(one, **template_options) for one in several]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate for prompts together; yields a prompt's outputs each time that they have grown.

        The same ``RequestOutput`` is yielded again and again. A caller that stops early aborts what
        still runs.

        Args:
            prompts: As for :meth:`generate`.
            sampling_params: As for :meth:`generate`.

        Raises:
            ValueError: If a prompt cannot run, before any of them does.
        """
        return self._run(prompts, sampling_params, [])

    # Step by step.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, also while others run; :meth:`step` runs it.

        Args:
            prompt: Text or token ids.
            sampling_params: None: ``SamplingParams()``.
            request_id: Of no other request that runs; None makes one.

        Returns:
            The request's id.

        Raises:
            ValueError: If it cannot run.
            RuntimeError: If the model is asleep.
        """
        params = sampling_params or SamplingParams()
        return self._add(prompt, self._encode(prompt, params), params, request_id)

    def step(self) -> list[RequestOutput]:
        """One forward pass over what runs.

        Returns:
            The requests whose outputs have grown or ended.
        """
        unclaimed, self._unclaimed = self._unclaimed, {}
        return list(unclaimed.values()) or self._step()

    def _step(self) -> list[RequestOutput]:
        self._require_awake()
        commands, self._commands = self._commands, []
        grown: dict[str, RequestOutput] = {}
        for progress in self._runner.step(commands):
            request = self._advance(progress)
            if request is not None:
                grown[request.output.request_id] = request.output
        grown |= {output.request_id: output for output in self._aborted}
        self._aborted = []
        for output in grown.values():
            if output.finished:
                del self._requests[output.request_id]
        return list(grown.values())

    def abort(self, request_id: str) -> None:
        """End a request; its outputs keep what they have. Unknown ids are ignored: it has ended."""
        request = self._requests.get(request_id)
        if request is None or request.output.finished:
            return
        for completion, number in zip(request.completions, request.numbers):
            if not completion.finished:
                completion.abort()
                self._stop(number)
        request.output.finished = True
        self._aborted.append(request.output)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return bool(self._requests or self._running or self._unclaimed)

    # Around training.

    def sleep(self, *, free_cache: bool = True) -> None:
        """Abort all requests, forget what is cached, and let the model be trained.

        Args:
            free_cache: Whether to free the cache's memory. CUDA graphs go with it, and are captured
                again by :meth:`wake`.
        """
        if self._awake:
            self._runner.sleep(free_cache)
            self._awake = False
            self._forget()

    def wake(self) -> None:
        """Be ready to generate with the weights as they are now, and an empty cache."""
        if not self._awake:
            self._runner.wake()
            self._awake = True

    def statistics(self) -> Statistics:
        """Counters of the engine since it woke.

        Raises:
            RuntimeError: If the model is asleep.
        """
        self._require_awake()
        return self._runner.statistics()

    def check(self) -> None:
        """Check that the model can run.

        Raises:
            EngineDeadError: If one of its processes has ended.
        """
        self._runner.check()

    def require_no_leak(self) -> None:
        """Check, while nothing runs, that no block of the cache is lost.

        Raises:
            RuntimeError: Naming the blocks that are, or if the model is asleep.
        """
        self._require_awake()
        self._runner.require_no_leak()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and what is generated after it."""
        return self._sizes.max_sequence_length

    @property
    def num_running(self) -> int:
        """Number of outputs that run or wait."""
        return len(self._running)

    def _forget(self) -> None:
        self._requests: dict[str, _Request] = {}
        # By the engine's numbers: what is not over there.
        self._running: dict[int, tuple[_Request, Completion]] = {}
        self._commands: list[Add | Abort] = []
        self._aborted: list[RequestOutput] = []
        # Outputs that grew in a step of another caller, who waits for other ids.
        self._unclaimed: dict[str, RequestOutput] = {}
        self._num_added = 0

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        names: list[str],
    ) -> Iterator[RequestOutput]:
        """Run prompts to their ends; their ids are appended to ``names``."""
        several = _prompts(prompts)
        each = _each(sampling_params, len(several))
        # All of them, before any is queued.
        encoded = [
            self._encode(prompt, params, f"prompt {i}: ")
            for i, (prompt, params) in enumerate(zip(several, each))
        ]
        was_awake = self._awake
        self.wake()
        try:
            for prompt, tokens, params in zip(several, encoded, each):
                names.append(self._add(prompt, tokens, params, None))
            missing = set(names)
            while missing:
                for output in self._claim(missing):
                    missing -= {output.request_id} if output.finished else set()
                    yield output
        finally:
            if not was_awake:
                self.sleep(free_cache=False)
            else:
                for name in names:
                    self.abort(name)

    def _claim(self, names: set[str]) -> list[RequestOutput]:
        """Outputs of these requests that have grown; runs a step unless there are some already."""
        # In the order of their steps, which is that of all ranks.
        kept = [name for name in self._unclaimed if name in names]
        grown = [self._unclaimed.pop(name) for name in kept]
        if grown:
            return grown
        for output in self._step():
            if output.request_id in names:
                grown.append(output)
            else:
                self._unclaimed[output.request_id] = output
        return grown

    def _require_awake(self) -> None:
        if not self._awake:
            raise RuntimeError("the model is asleep; call wake()")

    def _encode(self, prompt: Prompt, params: SamplingParams, where: str = "") -> list[int]:
        """Token ids of a prompt that can run.

        Raises:
            ValueError: If it cannot.
        """
        if isinstance(prompt, str):
            tokens = self._tokenizer().encode(prompt)
        else:
            tokens = list(prompt)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{where}stop needs a tokenizer; stop_token_ids does not")
        vocab_size = self._sizes.vocab_size
        assert vocab_size is not None
        why_not = self._sizes.why_not(
            tokens, self._engine_params(params, 0), vocab_size, self._sizes.step_tokens
        )
        if why_not:
            raise ValueError(f"{where}{why_not}")
        return tokens

    def _add(
        self, prompt: Prompt, tokens: list[int], params: SamplingParams, name: str | None
    ) -> str:
        from absorbed_mla.llm.runner import Add

        self._require_awake()
        name = str(next(self._names)) if name is None else name
        if name in self._requests:
            raise ValueError(f"request_id {name!r} is that of a request that runs")
        text = prompt if isinstance(prompt, str) else None
        request = _Request(RequestOutput(name, text, tokens, []), params)
        for index in range(params.n):
            completion = Completion(index, tokens, params, self._ends(params), self.tokenizer)
            number = self._num_added
            self._num_added += 1
            self._commands.append(Add(tokens, self._engine_params(params, index)))
            self._running[number] = request, completion
            request.completions.append(completion)
            request.output.outputs.append(completion.output)
            request.numbers.append(number)
        self._requests[name] = request
        return name

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        return () if params.ignore_eos else self._end_tokens

    def _engine_params(self, params: SamplingParams, index: int) -> SamplingParams:
        """What the engine gets for one of a prompt's outputs."""
        seed = params.seed
        if seed is not None and index:
            from absorbed_mla.generation.sampler import derive_seed

            seed = derive_seed(seed, index)
        stop = dict.fromkeys([*self._ends(params), *params.stop_token_ids])
        return params.replace(n=1, seed=seed, stop=(), stop_token_ids=tuple(stop))

    def _advance(self, progress: Progress) -> _Request | None:
        """The request of an engine's progress, if its outputs have grown."""
        request, completion = self._running[progress.number]
        if progress.result is not None:
            del self._running[progress.number]
            self._add_prompt_logprobs(request, progress.result)
            if progress.result.error:
                raise RuntimeError(f"the engine refused a request: {progress.result.error}")
        if completion.finished:
            return None
        completion.advance(progress)
        if completion.finished and progress.result is None:
            self._stop(progress.number)
        request.output.finished = all(one.finished for one in request.completions)
        return request

    def _add_prompt_logprobs(self, request: _Request, result: Result) -> None:
        count, output = request.params.prompt_logprobs, request.output
        if count is None or output.prompt_logprobs is not None or not result.prompt_log_probs:
            return
        tops = result.prompt_top_log_probs or [{}] * len(result.prompt_log_probs)
        output.prompt_logprobs = [None]
        for token, log_prob, top in zip(
            output.prompt_token_ids[1:], result.prompt_log_probs, tops, strict=True
        ):
            output.prompt_logprobs.append(
                position_logprobs(token, log_prob, top, count, self.tokenizer)
            )

    def _stop(self, number: int) -> None:
        """Have the engine end an output that has ended here."""
        from absorbed_mla.llm.runner import Abort

        self._commands.append(Abort(number))

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(
                "the model came without a tokenizer: give prompts as token ids, or "
                "LLM(..., tokenizer=FOLDER or 'bytes')"
            )
        return self.tokenizer


def _options(given: dict[str, Any]) -> LLMOptions:
    """Options by name.

    Raises:
        ValueError: If there is no such option, or a value is out of range.
    """
    names = [option.name for option in dataclasses.fields(LLMOptions)]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"LLM has no option {', '.join(unknown)}; it has {', '.join(names)}")
    return LLMOptions(**given)


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


def _each(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"there are {count} prompts and {len(given)} sampling_params")
    return list(given)


def _bar(shown: bool) -> Any:
    """A progress bar over prompts; only the first rank shows one."""
    from tqdm import tqdm

    hidden = not shown or os.environ.get("RANK", "0") != "0"
    return tqdm(total=0, desc="prompts", disable=hidden, dynamic_ncols=True)
