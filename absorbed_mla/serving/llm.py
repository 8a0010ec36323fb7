"""``LLM``: prompts in, texts out.

    from absorbed_mla import LLM, SamplingParams

    with LLM("DeepSeek-V2-Lite", tensor_parallel_size=2) as llm:
        for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

``llm_engine.py`` has what it does step by step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.own_packages import require_own_packages
from absorbed_mla.serving.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from absorbed_mla.serving.chat_messages import for_template, template_options_of
from absorbed_mla.serving.llm_engine import LLMEngine
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.prompts import Prompt, list_of, required
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import Message, Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from absorbed_mla.serving.executor.local import Runner

LoRAs = LoRARequest | Sequence[LoRARequest | None] | None


def _refused(name: str) -> Callable[..., NoReturn]:
    """A method of vLLM's for models that this package does not run."""

    def method(self: LLM, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(f"LLM.{name} needs a pooling model; this one generates: LLM.generate")

    method.__name__ = name
    method.__doc__ = "Not available: this is no pooling model."
    return method


class LLM(LLMEngine):
    """Generates text with a model of multi-head latent attention.

    Threads may call it at the same time: their requests run together, step by step, and each call
    gets the outputs of its own requests; :meth:`step` those of :meth:`add_request`. Under torchrun
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
        options: Fields of :class:`absorbed_mla.serving.llm_options.LLMOptions`.

    Raises:
        ValueError: If checkpoint, options and machine do not fit each other.
        EngineDeadError: From any method, after a process of the model has ended.
    """

    def __init__(
        self, model: str | Path, *, tokenizer: str | Path | Any | None = None, **options: Any
    ) -> None:
        require_own_packages("checkpoint_conversion", "specs")
        from absorbed_mla.serving.executor.multiprocess import ProcessRunner
        from absorbed_mla.serving.executor.process_groups import started_by_torchrun
        from absorbed_mla.serving.weights.checkpoint import (
            end_tokens,
            open_model,
            require_model,
            tokenizer_folder,
        )

        folder, given = Path(model), LLMOptions.of(options)
        checkpoint = open_model(folder, follow_links=given.follow_links)
        ranks = started_by_torchrun()
        world = int(os.environ.get("WORLD_SIZE", 1)) if ranks else None
        given = given.for_processes(world)
        require_model(checkpoint, given)
        ends = end_tokens(checkpoint)
        found: Tokenizer | None = None

        def open_its_tokenizer() -> None:
            nonlocal found
            own, trusted = tokenizer_folder(checkpoint), given.trust_remote_code
            found = open_tokenizer(tokenizer, own, ends, trust_remote_code=trusted)

        runner: Runner
        if world is None:
            runner = ProcessRunner(folder, given, open_its_tokenizer)
        else:
            open_its_tokenizer()
            from absorbed_mla.serving.executor.dp_load_balancer import GatheringRunner
            from absorbed_mla.serving.executor.local import LocalRunner

            rank = int(os.environ["RANK"])
            kind = GatheringRunner if given.data_parallel_attention else LocalRunner
            runner = kind.of_checkpoint(folder, given, rank, world, None)
        if given.data_parallel_attention:
            from absorbed_mla.serving.executor.dp_load_balancer import DPLoadBalancer

            runner = DPLoadBalancer(runner, given.num_processes)
        super().__init__(runner, found, ends, awake=True, enable_lora=given.enable_lora)

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
        from absorbed_mla.serving.executor.live_model import runner_of

        runner, found = runner_of(model, tokenizer, options)
        llm = cls.__new__(cls)
        LLMEngine.__init__(llm, runner, found, (), awake=False, live=True)
        return llm

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRAs = None,
        priority: Sequence[int] | None = None,
        prompt_token_ids: None = None,
    ) -> list[RequestOutput]:
        """Generate for prompts together; returns when all outputs have ended.

        Args:
            prompts: One or several; each a text, token ids (also an array or a tensor), or a dict
                with one of them: ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``. A dict may
                have a ``"cache_salt"``: prompts share cached blocks only with those of the same.
            sampling_params: For all prompts, or one for each; None: ``SamplingParams()``.
            use_tqdm: Show a progress bar on stderr; or a class of bars such as tqdm's.
            lora_request: Adapter of all prompts, or one or None for each; needs ``enable_lora``.
            priority: Of each prompt; smaller ones come earlier, with
                ``scheduling_policy="priority"``. None: all have 0.
            prompt_token_ids: vLLM's, which ``LLM`` lacks: None.

        Returns:
            One for each prompt, in their order.

        Raises:
            ValueError: If a prompt cannot run, before any of them does.
        """
        if prompts is None or prompt_token_ids is not None:
            raise ValueError(
                "generate takes token ids as prompts=[[1, 2, 3], ...], or a dict with "
                f"'prompt_token_ids' as one of them, got prompts={prompts!r:.100}"
            )
        final: dict[str, RequestOutput] = {}
        names: list[str] = []
        with _bar(use_tqdm) as bar:
            outputs = self._generate(prompts, sampling_params, names, lora_request, priority)
            for output in outputs:
                bar.total = len(names)
                if output.finished:
                    final[output.request_id] = output
                    bar.update()
        return [final[name] for name in names]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRAs = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next answer of one or several conversations.

        Args:
            messages: A conversation (``[{"role": "user", "content": "..."}]``), or several. Content
                may be parts, ``{"type": "text", "text": "..."}`` each, whose texts are joined.
            sampling_params: As for :meth:`generate`.
            use_tqdm: As for :meth:`generate`.
            lora_request: As for :meth:`generate`.
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
            prompts = [tokenizer.chat(list(map(for_template, one)), **options) for one in several]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[BeamSearchOutput]:
        """Look for the likeliest texts after prompts; the prefix cache has what they share.

        Args:
            prompts: As for :meth:`generate`.
            params: For all prompts.
            use_tqdm: As for :meth:`generate`.

        Returns:
            One for each prompt, in their order.

        Raises:
            ValueError: If a prompt cannot run, before any of them does.
            RuntimeError: If the model fails, or is put to sleep meanwhile.
        """
        ends = () if params.ignore_eos else self.prompt_encoder.end_tokens
        each = params.of_requests(len(ends), self.prompt_encoder.vocab_size)
        searches = []
        with self._exclusively():
            for i, prompt in enumerate(_prompts_of(prompts)):
                whole = each.replace(max_tokens=params.max_tokens)
                encoded = self.prompt_encoder.encode(prompt, whole, f"prompt {i}: ")
                most = min(params.max_tokens, self.max_model_len - len(encoded.tokens))
                search = BeamSearch(encoded.tokens, params, most, ends, encoded.cache_salt)
                searches.append(search)
        left = searches
        with self._whole_call(), _bar(use_tqdm) as bar:
            bar.total = len(searches)
            while left:
                texts = [
                    {"prompt_token_ids": beam.tokens, "cache_salt": search.cache_salt}
                    for search in left
                    for beam in search.running
                ]
                outputs = iter(self.generate(texts, each, False))
                for search in left:
                    search.advance([next(outputs) for _ in search.running])
                before, left = left, [search for search in left if search.running]
                bar.update(len(before) - len(left))
        if self.tokenizer is not None:
            for beam in (beam for search in searches for beam in search.ended):
                text = self.tokenizer.stream([], skip_special_tokens=False)
                beam.text = text.push(beam.tokens) + text.finish()
        return [BeamSearchOutput(search.ended) for search in searches]

    embed, encode = _refused("embed"), _refused("encode")
    classify, score = _refused("classify"), _refused("score")

    def get_tokenizer(self) -> Any:
        """The tokenizer: that of transformers, where there is one.

        Raises:
            ValueError: If the model came without a tokenizer.
        """
        tokenizer = required(self.tokenizer)
        return getattr(tokenizer, "of_transformers", tokenizer)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRAs = None,
    ) -> Iterator[RequestOutput]:
        """Generate for prompts together; yields a prompt's outputs each time that they have grown.

        The same ``RequestOutput`` is yielded again and again. A caller that stops early aborts what
        still runs.

        Args:
            prompts: As for :meth:`generate`.
            sampling_params: As for :meth:`generate`.
            lora_request: As for :meth:`generate`.

        Raises:
            ValueError: If a prompt cannot run, before any of them does.
        """
        return self._generate(prompts, sampling_params, [], lora_request)

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        names: list[str],
        lora_request: LoRAs = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Run prompts to their ends; their ids are appended to ``names``."""
        several = _prompts_of(prompts)
        params = SamplingParams() if sampling_params is None else sampling_params
        each = _of_each(params, not isinstance(params, SamplingParams), several, "sampling_params")
        one_each = isinstance(lora_request, list | tuple)
        loras = _of_each(lora_request, one_each, several, "lora_requests")
        self.prompt_encoder.check_lora(loras)
        if isinstance(priority, int):
            raise ValueError(f"priority must be a list of one number a prompt, got {priority}")
        numbers = 0 if priority is None else list_of(priority)
        priorities = _of_each(numbers, priority is not None, several, "priorities")
        with self._exclusively():
            # All of them, before any is queued.
            encoded = []
            for i, (prompt, own, *others) in enumerate(zip(several, each, loras, priorities)):
                made = self.prompt_encoder.encode(prompt, own, f"prompt {i}: ", *others)
                encoded.append((made, own))
        yield from self._run(encoded, names)


def _prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or several prompts as a list; the rows of a matrix are several."""
    if isinstance(given, str | Mapping):
        return [given]
    prompts = list_of(given)
    # Arrays in a list have an index, too, if they have one number.
    if prompts and hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0):
        return [prompts]
    return prompts


def _of_each(given: Any, one_each: bool, prompts: Sequence[Prompt], name: str) -> list:
    """What is given for all prompts, or one for each.

    Raises:
        ValueError: If there are not as many as prompts.
    """
    if not one_each:
        return [given] * len(prompts)
    if len(given) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(given)} {name}")
    return list(given)


def _bar(shown: bool | Callable[..., Any]) -> Any:
    """A progress bar over prompts, of a class if one is given; only the first rank shows one."""
    from tqdm import tqdm

    kind = shown if callable(shown) else tqdm
    hidden = not shown or os.environ.get("RANK", "0") != "0"
    return kind(total=0, desc="prompts", disable=hidden, dynamic_ncols=True)
