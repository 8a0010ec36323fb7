"""Greedy generation without a context, over a static context, and over a dynamic one."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.inference.megatron_buffers import drop_inference_buffers
from absorbed_mla.serving.request_results import Result
from tests.support import world
from tests.support.engine import Request, by_whole_forwards, engine_of, generate, prompt
from tests.support.models import whole_logits

# Longer than every text.
_MAX_LENGTH = 256


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [prompt(length, seed) for seed, length in enumerate(lengths)]


def by_forwards(model: GPTModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Result]:
    """A forward of the whole text, without any context, for every token."""
    return by_whole_forwards(model, _requests(prompts, num_tokens))


@torch.inference_mode()
def by_static_context(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    prefill_size: int = _MAX_LENGTH,
) -> list[Result]:
    """A batch over a ``StaticInferenceContext``, as Megatron's engine runs it.

    Prompts are read together, up to the end of the shortest, at most ``prefill_size`` tokens in a
    forward; then every forward is one token of each text, its prompt's or its last.
    """
    context = StaticInferenceContext(len(prompts), _MAX_LENGTH)
    shortest, end = min(map(len, prompts)), max(map(len, prompts)) + num_tokens - 1
    texts = [list(prompt) for prompt in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    with without_sequence_parallelism(model):
        while (done := context.sequence_len_offset) < end:
            size = min(prefill_size, shortest - done) if done < shortest else 1
            step = torch.tensor([text[done : done + size] for text in texts]).to(world.device())
            logits = whole_logits(model, step, done, inference_context=context)[:, -1]
            context.sequence_len_offset += size
            for row, text in enumerate(texts):
                if len(text) == context.sequence_len_offset:
                    _choose(logits[row], text, log_probs[row])
    drop_inference_buffers()
    return [
        Result(text[len(prompt) :][:num_tokens], values[:num_tokens])
        for text, prompt, values in zip(texts, prompts, log_probs)
    ]


def by_dynamic_context(
    model: GPTModel, prompts: Sequence[Sequence[int]], num_tokens: int, **options
) -> list[Result]:
    """Requests of an engine; ``options`` as ``engine_of`` takes them."""
    engine = engine_of(model, **{"step_tokens": 128, "chunked_prefill": True, **options})
    return generate(engine, _requests(prompts, num_tokens), log_probs=True).results


@contextlib.contextmanager
def without_sequence_parallelism(model: GPTModel) -> Iterator[None]:
    """Switch sequence parallelism off inside the block: one token does not divide by TP.

    Megatron's engine does so for static batches, but remembers models by their ``id``, which a
    later model may have, too.
    """
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    holders = [model.config, *model.modules()]
    former = [(m, n, getattr(m, n)) for m in holders for n in names if getattr(m, n, None) is True]
    for holder, name, _ in former:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name, value in former:
            setattr(holder, name, value)


def _requests(prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    return [Request(prompt, num_tokens) for prompt in prompts]


def _choose(logits: Tensor, text: list[int], log_probs: list[float]) -> None:
    token = int(logits.argmax())
    text.append(token)
    log_probs.append(float(logits.float().log_softmax(-1)[token]))
