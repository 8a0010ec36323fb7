"""Greedy requests to an engine, and the expected tokens, from forwards without a cache."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.cpu_engine import enable_cpu_inference
from absorbed_mla.serving.engine import Engine
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.request_results import Result
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE
from absorbed_mla.serving.statistics import Statistics
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import TINY, config_for, model_options
from tests.support.models import VOCAB, gpt_model, whole_logits

enable_cpu_inference()

# A token of a prompt of 130 moves the log-probabilities after it by 0.3 (with Megatron's 0.02, by
# 1e-3, and the tokens generated are a function of the last one).
_INIT_STD = 0.2
# In fp32; measured errors were up to 2e-6.
_LOG_PROB_TOLERANCE = 5e-5
# Options of the engines under test, unless a test changes them.
_SIZES = {
    "max_sequence_length": 256,
    "max_requests": 8,
    "step_tokens": 192,
    "chunked_prefill": False,
    "prefix_caching": False,
}
CHUNKED = {"chunked_prefill": True, "step_tokens": 64}
LRU = {"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU}
# Blocks of requests that have ended stay in the prefix cache.
KEPT = {"prefix_caching": True, "inference_config": LRU}


@dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    num_tokens: int

    def sampling(self, *, log_probs: bool = False) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.num_tokens,
            temperature=0,
            logprobs=0 if log_probs else None,
        )


@dataclass(frozen=True)
class Run:
    """Results of requests, and the statistics of the engine."""

    results: list[Result]
    statistics: Statistics

    @property
    def tokens(self) -> list[list[int]]:
        return [result.tokens for result in self.results]


def engine_of(model: GPTModel, *, blocks: int = 30, paused_blocks: int = 0, **options) -> Engine:
    """An engine with a cache of ``blocks`` blocks; ``options`` are fields of ``EngineOptions``."""
    cache = {
        "cache_tokens": blocks * BLOCK_SIZE,
        "paused_cache_tokens": paused_blocks * BLOCK_SIZE,
    }
    return Engine(model, EngineOptions(**{**_SIZES, **cache, **options}))


def generate(engine: Engine, requests: Sequence[Request], *, log_probs: bool = False) -> Run:
    """Run requests together; every block of the cache must be free afterwards."""
    results = engine.generate(
        [request.prompt for request in requests],
        [request.sampling(log_probs=log_probs) for request in requests],
    )
    engine.require_no_leak()
    return Run(results, engine.statistics)


def add(engine: Engine, requests: Iterable[Request], *, log_probs: bool = False) -> list[int]:
    """Queue requests of a started engine; returns their numbers."""
    return [engine.add_request(one.prompt, one.sampling(log_probs=log_probs)) for one in requests]


def step_to_the_end(engine: Engine) -> list[Result]:
    """Step until all requests have ended; their results by number."""
    while engine.is_busy():
        engine.step()
    return [engine.results[number] for number in sorted(engine.results)]


def generating_model(
    options: AbsorbedMLAOptions | None = None,
    *,
    mla: OracleMLA = TINY,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config_changes,
) -> GPTModel:
    """A model that caches latents; with ``mtp_num_layers`` it has layers that draft tokens."""
    fields = {
        "num_layers": 2,
        "init_method_std": _INIT_STD,
        "cache_mla_latents": True,
        "tensor_model_parallel_size": world.tp_size(),
    }
    fields |= config_changes
    config = config_for(mla, dtype, **fields)
    options = options or AbsorbedMLAOptions(**model_options(mla))
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=options)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_absorbed_mla_mtp_block_spec(config, backend="local", options=options)
    return gpt_model(mla=mla, dtype=dtype, seed=seed, spec=spec, mtp_block_spec=mtp, **fields)


def prompt(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """Random tokens; the first ``shared`` of them do not depend on the seed."""
    return [*_random(shared, seed=-1), *_random(length - shared, seed)]


def _random(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(VOCAB, (length,), generator=generator, device="cpu").tolist()


@torch.no_grad()
def by_whole_forwards(model: GPTModel, requests: Sequence[Request]) -> list[Result]:
    """Greedy generation without a cache: for every token, one forward of all texts, padded."""
    was_active, was_training = InferenceMode.is_active(), model.training
    InferenceMode.unset_active()
    model.eval()
    found = [Result([], log_probs=[]) for _ in requests]
    for step in range(max(request.num_tokens for request in requests)):
        rows = [row for row, request in enumerate(requests) if step < request.num_tokens]
        texts = [[*requests[row].prompt, *found[row].tokens] for row in rows]
        best = _last_logits(model, texts).float().log_softmax(-1).max(-1)
        for row, token, log_prob in zip(rows, best.indices.tolist(), best.values.tolist()):
            found[row].tokens.append(token)
            found[row].log_probs.append(log_prob)
    model.train(was_training)
    if was_active:
        InferenceMode.set_active()
    return found


def _last_logits(model: GPTModel, texts: list[list[int]]) -> Tensor:
    """Of the last token of each text, [B, V]; causal attention does not see the padding."""
    # Sequence parallelism needs a number of tokens that divides by TP.
    length = -(-max(map(len, texts)) // world.tp_size()) * world.tp_size()
    ids = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
    ends = [len(text) - 1 for text in texts]
    return whole_logits(model, ids.to(world.device()))[range(len(texts)), ends]


def whole_forwards(
    model: GPTModel, known: Sequence[Request]
) -> Callable[[Sequence[Request]], list[Result]]:
    """:func:`by_whole_forwards` of any of some requests, each computed once."""
    found = dict(zip(map(id, known), by_whole_forwards(model, known)))
    return lambda requests: [found[id(request)] for request in requests]


def check_generates(
    model: GPTModel, requests: Sequence[Request], atol: float = _LOG_PROB_TOLERANCE, **options
) -> Run:
    """Requests to an engine with these options have the tokens of whole forwards."""
    run = generate(engine_of(model, **options), requests, log_probs=True)
    assert_generates(run, by_whole_forwards(model, requests), atol)
    return run


def assert_generates(run: Run, expected: list[Result], atol: float = _LOG_PROB_TOLERANCE) -> None:
    """All requests have the expected tokens and, if recorded, log-probabilities."""
    assert len(run.results) == len(expected)
    for number, (got, want) in enumerate(zip(run.results, expected)):
        assert not got.error, f"request {number}: {got}"
        assert got.tokens == want.tokens, f"request {number}: {got.tokens}, not {want.tokens}"
        if got.log_probs:
            worst = max(abs(a - b) for a, b in zip(got.log_probs, want.log_probs, strict=True))
            assert worst < atol, f"request {number}: log-probs are off by {worst}"
