"""``LLM``: prompts in, texts out.

from absorbed_mla import LLM, SamplingParams

with LLM("DeepSeek-V2-Lite", tensor_parallel_size=2) as llm:
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
print(output.outputs[0].text)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.llm.conversations import template_options_of, with_text
from absorbed_mla.llm.exclusive import FairLock, interrupts_deferred
from absorbed_mla.llm.options import LLMOptions
from absorbed_mla.llm.outputs import RequestOutput
from absorbed_mla.llm.prompts import Prompt, encode, params_of, prompts_of, required
from absorbed_mla.llm.requests import Requests
from absorbed_mla.llm.tokenizers import Message, Tokenizer, open_tokenizer
from absorbed_mla.own_packages import require_own_packages

if TYPE_CHECKING:
    from absorbed_mla.generation.statistics import Statistics
    from absorbed_mla.llm.runner import Runner


class LLM:
    """Generates text with a model of multi-head latent attention.

    Threads may call it at the same time: their requests run together, step by step. Under torchrun
    all calls come from one thread, so that all ranks make them in the same order.

    Ctrl-C ends a call after the step that runs, and aborts its requests; the model can be used on.
    A second Ctrl-C does not wait for the step, and ends the model.

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
        require_own_packages("checkpoint_conversion", "specs")
        from absorbed_mla.llm.front import Front, GatheringRunner
        from absorbed_mla.llm.load import end_tokens, open_model, require_model, tokenizer_folder
        from absorbed_mla.llm.ranks import started_by_torchrun
        from absorbed_mla.llm.runner import LocalRunner
        from absorbed_mla.llm.workers import ProcessRunner

        folder, given = Path(model), LLMOptions.of(options)
        checkpoint = open_model(folder, follow_links=given.follow_links)
        ranks = started_by_torchrun()
        world = int(os.environ.get("WORLD_SIZE", 1)) if ranks else None
        given = given.for_processes(world)
        require_model(checkpoint, given)
        ends = end_tokens(checkpoint)
        found = open_tokenizer(
            tokenizer,
            tokenizer_folder(checkpoint),
            ends,
            trust_remote_code=given.trust_remote_code,
        )
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
        self._requests = Requests(tokenizer)
        self._awake = awake
        self._lock = FairLock()
        # Whole calls that run, and whether one of them woke the model.
        self._num_calls, self._woken_by_call = 0, False

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
                ``device``, ``form``, ``latent_cache_dtype``, ``parity`` and parallel sizes) or read
                (``follow_links``): it has them already.
                ``max_model_len`` is needed if the model does not say how many positions it has.

        Raises:
            ValueError: If the model cannot generate, or an option is not for it.
        """
        require_own_packages("checkpoint_conversion", "specs")
        from absorbed_mla.llm.live_model import runner_of

        runner, found = runner_of(model, tokenizer, options)
        llm = cls.__new__(cls)
        llm._set_up(runner, found, (), awake=False)
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next answer of one or several conversations.

        Args:
            messages: A conversation (``[{"role": "user", "content": "..."}]``), or several. Content
                may be parts, ``{"type": "text", "text": "..."}`` each, whose texts are joined.
            sampling_params: As for :meth:`generate`.
            use_tqdm: As for :meth:`generate`.
            chat_template_kwargs: Variables of the chat template, as vLLM has them.
            template_options: For the tokenizer's ``apply_chat_template``, which gives those that
                it does not know to the template.

        Raises:
            ValueError: If there is no tokenizer with a chat template, a part of a message is no
                text, an option is one of vLLM's that ``LLM`` lacks, or a prompt cannot run.
        """
        several = [messages] if messages and isinstance(messages[0], dict) else messages
        options = template_options_of(template_options, chat_template_kwargs)
        with self._exclusively():
            tokenizer = required(self.tokenizer)
            prompts = [tokenizer.chat(list(map(with_text, one)), **options) for one in several]
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
        with self._exclusively():
            tokens = encode(prompt, params, self.tokenizer, self._sizes)
            return self._add(prompt, tokens, params, request_id)

    def step(self) -> list[RequestOutput]:
        """One forward pass over what runs.

        Returns:
            The requests whose outputs have grown or ended.
        """
        requests = self._requests
        with self._exclusively():
            if not requests.unclaimed:
                # After Ctrl-C they are there for the next call.
                requests.unclaimed = {one.request_id: one for one in self._step()}
        with self._lock:
            unclaimed, requests.unclaimed = requests.unclaimed, {}
        return list(unclaimed.values())

    def abort(self, request_id: str) -> None:
        """End a request; its outputs keep what they have. Unknown ids are ignored: it has ended."""
        with self._exclusively():
            self._requests.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to do or to report."""
        return self._requests.are_left()

    # Around training.

    def sleep(self, *, free_cache: bool = True) -> None:
        """Abort all requests, forget what is cached, and let the model be trained.

        Args:
            free_cache: Whether to free the cache's memory. CUDA graphs go with it; those of layers
                are captured again by :meth:`wake`, those of whole steps when one first runs.
        """
        with self._exclusively():
            if self._awake:
                self._runner.sleep(free_cache)
                self._awake = self._woken_by_call = False
                self._requests.forget()

    def wake(self) -> None:
        """Be ready to generate with the weights as they are now, and an empty cache."""
        with self._exclusively():
            if not self._awake:
                self._runner.wake()
                self._awake = True

    def statistics(self) -> Statistics:
        """Counters of the engine since it woke.

        Raises:
            RuntimeError: If the model is asleep.
        """
        with self._exclusively():
            self._require_awake()
            return self._runner.statistics()

    def check(self) -> None:
        """Check that the model can run.

        Raises:
            EngineDeadError: If one of its processes has ended.
        """
        with self._exclusively():
            self._runner.check()

    def require_no_leak(self) -> None:
        """Check, while nothing runs, that no block of the cache is lost.

        Raises:
            RuntimeError: Naming the blocks that are, or if the model is asleep.
        """
        with self._exclusively():
            self._require_awake()
            self._runner.require_no_leak()

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and what is generated after it."""
        return self._sizes.max_sequence_length

    @property
    def num_running(self) -> int:
        """Number of outputs that run or wait."""
        return self._requests.num_running

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """No other thread does anything meanwhile, and Ctrl-C waits."""
        with interrupts_deferred(), self._lock:
            yield

    def _step(self) -> list[RequestOutput]:
        self._require_awake()
        return self._requests.advance(self._runner.step(self._requests.commands()))

    def _run(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        names: list[str],
    ) -> Iterator[RequestOutput]:
        """Run prompts to their ends; their ids are appended to ``names``."""
        several = prompts_of(prompts)
        each = params_of(sampling_params, len(several))
        with self._exclusively():
            # All of them, before any is queued.
            encoded = [
                encode(prompt, params, self.tokenizer, self._sizes, f"prompt {i}: ")
                for i, (prompt, params) in enumerate(zip(several, each))
            ]
        with self._call(names):
            with self._exclusively():
                for prompt, tokens, params in zip(several, encoded, each):
                    names.append(self._add(prompt, tokens, params, None))
            missing = set(names)
            while missing:
                with self._exclusively():
                    grown = self._requests.claim(missing, self._step)
                for output in grown:
                    missing -= {output.request_id} if output.finished else set()
                    yield output

    @contextlib.contextmanager
    def _call(self, names: list[str]) -> Iterator[None]:
        """A whole call: the model is awake meanwhile, and none of its requests is left behind.

        Args:
            names: Of its requests, as they are when it ends.
        """
        began = False
        try:
            with self._exclusively():
                sleeps = not self._awake
                self.wake()
                self._woken_by_call |= sleeps
                self._num_calls += 1
                began = True
            yield
        finally:
            with self._exclusively():
                self._num_calls -= began
                for name in names:
                    self._requests.abort(name)
                if self._woken_by_call and not self._num_calls:
                    self.sleep(free_cache=False)

    def _require_awake(self) -> None:
        if not self._awake:
            raise RuntimeError("the model is asleep; call wake()")

    def _add(
        self, prompt: Prompt, tokens: list[int], params: SamplingParams, name: str | None
    ) -> str:
        self._require_awake()
        text = prompt if isinstance(prompt, str) else None
        ends = () if params.ignore_eos else self._end_tokens
        return self._requests.add(text, tokens, params, name, ends)


def _bar(shown: bool) -> Any:
    """A progress bar over prompts; only the first rank shows one."""
    from tqdm import tqdm

    hidden = not shown or os.environ.get("RANK", "0") != "0"
    return tqdm(total=0, desc="prompts", disable=hidden, dynamic_ncols=True)
