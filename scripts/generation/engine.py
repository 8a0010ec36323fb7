"""Megatron's ``DynamicInferenceEngine`` around a live model that is trained before and after.

    engine = GenerationEngine(model, max_sequence_length=4096, max_requests=16)
    results = engine.generate(prompts, Sampling(num_tokens=128), on_progress=print)

Scheduler, block allocator, prefix cache and samplers are Megatron's; the weights are the model's,
as they are when ``generate`` is called.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.inference.host_buffers import drop_inference_buffers
from absorbed_mla.testing.engine import BLOCK_SIZE, dynamic_engine
from generation.sampling import Sampling

# Steps in a row in which nothing ran, after which the scheduler waits for ever.
_PATIENCE = 3


@dataclass
class Generation:
    """What became of one request.

    Attributes:
        tokens: Generated, the stop token included.
        log_probs: Of these tokens, where they were asked for.
        finish: ``"stop"`` (the stop token), ``"length"`` (as many as asked for), ``"context"``
            (``max_sequence_length`` is reached), or ``""`` after an error.
        error: Why it could not be run, or ``""``.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""


# Of a request's number, its new tokens, and its end if it has come.
Progress = Callable[[int, list[int], Generation | None], None]


class GenerationEngine:
    """Generates with a model's live weights, and leaves the model ready to be trained.

    Collective over the tensor-parallel ranks: each makes it and calls it with the same arguments.

    Args:
        model: With ``cache_mla_latents`` in its config, not wrapped.
        max_sequence_length: Tokens of a prompt and what follows it.
        max_requests: That run at a time; more wait. Rounded up to what the ranks divide.
        cache_tokens: Tokens of all requests that the cache holds, in blocks of 64. If requests grow
            beyond, some wait and are computed again. None: room for ``max_requests`` whole ones.
        step_tokens: Tokens of a forward at most, at least ``max_requests``; a multiple of 64.
            Longer prompts are prefilled in chunks.
        vocab_size: Tokens that may be generated; None: all that the model has. The embedding may
            have more rows than the tokenizer tokens.
        seed: Of the sampling; data-parallel ranks draw different numbers.
        chunked_prefill: Whether prompts may be cut over forwards.
        prefix_caching: Whether requests of one call share the blocks of equal beginnings.
        inference_config: More fields of Megatron's ``InferenceConfig``.

    Raises:
        ValueError: Naming an argument that does not fit.
    """

    def __init__(
        self,
        model: GPTModel,
        *,
        max_sequence_length: int,
        max_requests: int,
        cache_tokens: int | None = None,
        step_tokens: int = 2048,
        vocab_size: int | None = None,
        seed: int = 0,
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        **inference_config,
    ) -> None:
        if not getattr(model.config, "cache_mla_latents", False):
            raise ValueError("the model's config must have cache_mla_latents=True to generate")
        if max_sequence_length < 2 or max_requests < 1:
            raise ValueError(
                "max_sequence_length must be at least 2 and max_requests at least 1, got "
                f"{max_sequence_length} and {max_requests}"
            )
        if cache_tokens is None:
            cache_tokens = max_requests * _round_up(max_sequence_length, BLOCK_SIZE)
        if cache_tokens < BLOCK_SIZE:
            raise ValueError(f"cache_tokens must be at least {BLOCK_SIZE}, got {cache_tokens}")
        tp = parallel_state.get_tensor_model_parallel_world_size()
        max_requests = _round_up(max_requests, tp)
        step_tokens = _round_up(max(step_tokens, max_requests), math.lcm(BLOCK_SIZE, tp))
        self.model = model
        self.blocks = cache_tokens // BLOCK_SIZE
        self.max_sequence_length = max_sequence_length
        self.step_tokens = step_tokens
        self.chunked_prefill = chunked_prefill
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        model.config.inference_sampling_seed = seed
        with dynamic_engine(
            model,
            blocks=self.blocks,
            max_sequence_length=max_sequence_length,
            max_requests=max_requests,
            max_tokens=step_tokens,
            enable_chunked_prefill=chunked_prefill,
            enable_prefix_caching=prefix_caching,
            **inference_config,
        ) as engine:
            self.host = engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        on_progress: Progress | None = None,
    ) -> list[Generation]:
        """Continue the prompts, together.

        A request that cannot run ends with an error of its own; the others are not touched.
        Nothing of an earlier call is used: the weights may have changed since.

        Args:
            prompts: Token ids.
            sampling: Of all, or of each.
            on_progress: Called after every step for each request that has new tokens or ends.

        Returns:
            In the order of the prompts.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(each)} samplings")
        report = on_progress or _ignore
        results = [Generation() for _ in prompts]
        with self._active():
            for number, (prompt, how) in enumerate(zip(prompts, each)):
                results[number].error = self._why_not(prompt, how)
                if results[number].error:
                    report(number, [], results[number])
                    continue
                room = self.max_sequence_length - len(prompt)
                self.host.add_request(number, list(prompt), how.to_host(min(how.num_tokens, room)))
            for number, new, record in self._steps():
                if record is not None:
                    results[number] = _generation(record, each[number])
                report(number, new, results[number] if record is not None else None)
        return results

    def reseed(self, seed: int) -> None:
        """Start the sampling anew, this rank's as every other's."""
        self.host.controller.sampling_rng.manual_seed(seed)

    def _why_not(self, prompt: Sequence[int], sampling: Sampling) -> str:
        """Why the request cannot run, or ``""``; the host raises for some of it, or says less."""
        length, longest = len(prompt), self.max_sequence_length
        outside = [token for token in prompt if not 0 <= token < self.model.vocab_size]
        total = min(length + sampling.num_tokens, longest)
        if not length:
            return "the prompt is empty"
        if outside:
            return f"token {outside[0]} is not in the vocabulary of {self.model.vocab_size}"
        if length >= longest:
            return f"the prompt has {length} tokens and must be shorter than {longest}"
        if not self.chunked_prefill and length > self.step_tokens:
            return f"the prompt has {length} tokens, a step without chunks {self.step_tokens}"
        if total > self.blocks * BLOCK_SIZE:
            return (
                f"the prompt's {length} tokens and {total - length} new ones do not fit into a "
                f"cache of {self.blocks * BLOCK_SIZE}"
            )
        if sampling.top_k >= self.model.vocab_size:
            return f"top_k must be below the vocabulary's {self.model.vocab_size}"
        return ""

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """The model is in evaluation mode, and Megatron's flag of the process is set."""
        was_training, was_active = self.model.training, InferenceMode.is_active()
        self.model.eval()
        InferenceMode.set_active()
        hook = self.model.register_forward_hook(self._hide_padding)
        try:
            self.host.reset()
            yield
        finally:
            hook.remove()
            self.model.train(was_training)
            if not was_active:
                InferenceMode.unset_active()
            drop_inference_buffers()

    def _hide_padding(self, model: GPTModel, inputs: tuple, logits: Tensor) -> Tensor:
        """Rows of the embedding that are no tokens are never sampled."""
        if self.vocab_size < logits.shape[-1]:
            logits[..., self.vocab_size :] = -torch.inf
        return logits

    def _steps(self) -> Iterator[tuple[int, list[int], DynamicInferenceRequestRecord | None]]:
        """Run; a request's number and new tokens, and its record when it has ended."""
        seen: dict[int, int] = {}
        idle = 0
        while self.host.has_unfinished_requests():
            before = self.host.context.step_count
            step = self.host.step_modern()
            idle = 0 if self.host.context.step_count > before else idle + 1
            if idle >= _PATIENCE:
                raise RuntimeError(
                    f"the engine schedules none of {len(self.host.waiting_request_ids)} requests"
                )
            running = [n for n in step["active_request_ids"] if n in self.host.requests]
            records = {n: (self.host.requests[n].record, False) for n in sorted(running)}
            records |= {r.request_id: (r, True) for r in step["finished_request_records"]}
            for number, (record, ended) in records.items():
                count = sum(len(request.generated_tokens) for request in record.requests)
                new = _last_tokens(record, count - seen.get(number, 0))
                seen[number] = count
                if new or ended:
                    yield number, new, record if ended else None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _ignore(number: int, new: list[int], end: Generation | None) -> None:
    """Nobody watches."""


def _last_tokens(record: DynamicInferenceRequestRecord, count: int) -> list[int]:
    """Generated; a request that was evicted has several parts."""
    tokens: list[int] = []
    for request in reversed(record.requests):
        missing = count - len(tokens)
        if missing:
            tokens = request.generated_tokens[-missing:] + tokens
    return tokens


def _generation(record: DynamicInferenceRequestRecord, sampling: Sampling) -> Generation:
    tokens = [token for request in record.requests for token in request.generated_tokens]
    log_probs = [x for request in record.requests for x in request.generated_log_probs or ()]
    if record[-1].status == Status.FAILED:
        errors = [type(e.payload).__name__ for e in record[-1].events if e.payload is not None]
        return Generation(tokens, log_probs, error=", ".join(errors) or "the engine failed")
    if tokens and tokens[-1] == sampling.stop_token:
        finish = "stop"
    else:
        finish = "length" if len(tokens) == sampling.num_tokens else "context"
    return Generation(tokens, log_probs, finish)
