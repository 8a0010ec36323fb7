"""Requests for an engine with and one without the overlap scheduler, compared after every step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.engine import Engine
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from absorbed_mla.serving.statistics import Statistics
from tests.support.cases import WIDE
from tests.support.engine import CHUNKED, KEPT, engine_of, generating_model, prompt

GREEDY = SamplingParams(max_tokens=12, temperature=0)
# One token, within a block, before its end, at it and beyond.
LENGTHS = (1, 17, 58, 63, 64, 65)
# Requests of one step beyond the block that all of them fill together.
CROSSING = (58,) * 8


@dataclass(frozen=True)
class Case:
    """Requests and what happens to them.

    Attributes:
        requests: Length of the prompt and parameters of each.
        options: Of the engines.
        later: Requests that are added before a step, by its number.
        aborts: Requests that are aborted before a step.
        shared: Tokens that all prompts begin with.
        happened: What the statistics must say.
        ahead: Whether some step's tokens are all that the next one depends on.
        joined: Whether a request begins with a step that is launched ahead.
        finished: Whether Megatron has to do the rest of every step.
    """

    requests: Sequence[tuple[int, SamplingParams]]
    options: Mapping[str, object] = field(default_factory=dict)
    later: Mapping[int, Sequence[tuple[int, SamplingParams]]] = field(default_factory=dict)
    aborts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    shared: int = 0
    happened: Callable[[Statistics], object] = lambda done: done.steps
    ahead: bool = True
    joined: bool = False
    finished: bool = False


def of(lengths: Sequence[int], *each: SamplingParams) -> list[tuple[int, SamplingParams]]:
    """Requests of these lengths, with parameters in turn."""
    return [(length, each[i % len(each)]) for i, length in enumerate(lengths)]


def sampled(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.5, "seed": 3, **fields})


CASES = {
    "greedy": Case(of(LENGTHS, GREEDY)),
    "different-ends": Case(of(LENGTHS, *(GREEDY.replace(max_tokens=n) for n in (1, 9, 2, 30, 5)))),
    "until-the-end-of-the-context": Case(
        of((50, 70), GREEDY.replace(max_tokens=None)), {"max_sequence_length": 80}
    ),
    # Half of the vocabulary of 64 stops; Megatron takes the first as its termination id.
    "stop-tokens": Case(
        of(LENGTHS, sampled(stop_token_ids=range(9)), sampled(stop_token_ids=[5], max_tokens=30))
    ),
    "sampled": Case(of(LENGTHS, sampled(), GREEDY, sampled(seed=None), sampled(min_p=0.2))),
    "filtered": Case(of(LENGTHS, sampled(top_k=5), sampled(top_p=0.6), sampled(), GREEDY)),
    "penalties": Case(of(LENGTHS, sampled(repetition_penalty=1.3), GREEDY), ahead=False),
    "biases": Case(
        of(
            LENGTHS,
            GREEDY.replace(logit_bias={3: 9.0}, bad_words=[[3, 3], [7]]),
            sampled(allowed_token_ids=range(20, 40)),
            GREEDY,
        ),
        ahead=False,
    ),
    "min-tokens": Case(of(LENGTHS, GREEDY, sampled(min_tokens=6, stop_token_ids=range(32)))),
    "log-probs": Case(of(LENGTHS, GREEDY.replace(logprobs=0), GREEDY, sampled(max_tokens=5))),
    "all-log-probs": Case(of(LENGTHS, sampled(logprobs=0))),
    "top-log-probs": Case(
        of(LENGTHS, GREEDY.replace(logprobs=3), sampled(logprobs=0)), ahead=False, finished=True
    ),
    # A part of a prompt has log-probabilities of a token that is not drawn.
    "top-log-probs-in-parts": Case(
        of((50, 60, 17), GREEDY.replace(logprobs=2)), CHUNKED, ahead=False, finished=True
    ),
    "prompt-log-probs": Case(
        of(LENGTHS, GREEDY.replace(prompt_logprobs=2), sampled(logprobs=0), GREEDY),
        {"prompt_logprobs": True},
        ahead=False,
        finished=True,
    ),
    "blocks": Case(of(CROSSING, GREEDY.replace(max_tokens=20))),
    "blocks-one-by-one": Case(of(range(50, 58), sampled(max_tokens=20))),
    "prefix": Case(
        of((100,) * 6, GREEDY, sampled(max_tokens=20)),
        {"prefix_caching": True},
        shared=70,
        happened=lambda done: done.prefix_blocks,
    ),
    # Blocks of requests that have ended are evicted when the free ones do not suffice.
    "prefix-lru": Case(
        of((100,) * 8, GREEDY, GREEDY.replace(max_tokens=40)),
        {**KEPT, "blocks": 14},
        later={20: of((70, 40), GREEDY)},
        shared=70,
        happened=lambda done: done.prefix_blocks,
    ),
    "evicted": Case(of(CROSSING, GREEDY), {"blocks": 11}, happened=lambda done: done.evicted),
    "paused": Case(
        of(CROSSING, GREEDY, GREEDY.replace(max_tokens=20)),
        {"blocks": 11, "paused_blocks": 5},
        happened=lambda done: done.most_paused,
    ),
    "chunked": Case(
        of((130, 20, 30), GREEDY.replace(max_tokens=30)),
        CHUNKED,
        later={8: of((150,), GREEDY)},
        happened=lambda done: done.chunks > 2 and done.mixed_steps,
    ),
    "waiting": Case(
        of((40,) * 20, GREEDY.replace(max_tokens=9), sampled(max_tokens=14)), joined=True
    ),
    "waiting-for-blocks": Case(of((60,) * 9, GREEDY), {"blocks": 7, **CHUNKED}),
    "waiting-for-rows-and-blocks": Case(
        of((60, 10, 30) * 4, GREEDY.replace(max_tokens=20), sampled(max_tokens=9)),
        {"blocks": 12},
        joined=True,
    ),
    "waiting-for-each-other": Case(
        of((100,) * 12, GREEDY, sampled(max_tokens=5)),
        {"prefix_caching": True},
        shared=70,
        happened=lambda done: done.prefix_blocks,
        joined=True,
    ),
    # Steps of 192 tokens hold four of these prompts with their beginnings, or one long one.
    "whole-prompts": Case(
        of((40, 45, 44, 43, 100) * 3, GREEDY.replace(max_tokens=9), sampled(max_tokens=14)),
        {"chunked_prefill": True},
        joined=True,
    ),
    "parts-of-prompts": Case(
        of((120,) * 9, GREEDY.replace(max_tokens=9), sampled(max_tokens=14)),
        {**CHUNKED, "step_tokens": 192},
        happened=lambda done: done.chunks,
    ),
    "added": Case(
        of((20, 30), GREEDY.replace(max_tokens=25)),
        later={4: of((40,), sampled()), 5: of((1, 64), GREEDY), 32: of((9,), GREEDY)},
        joined=True,
    ),
    "added-in-every-step": Case(
        of((20,), GREEDY.replace(max_tokens=25)),
        later={i: of((20 + i, i), sampled(max_tokens=i)) for i in range(2, 12)},
        joined=True,
    ),
    # Requests end by tokens that come after others have begun.
    "stopped-beside-prompts": Case(
        of((40,) * 16, sampled(stop_token_ids=range(12), max_tokens=20), sampled(max_tokens=4)),
        joined=True,
    ),
    "one-token": Case(of((40,) * 16, GREEDY.replace(max_tokens=1), GREEDY), joined=True),
    # All requests of a step end with it, and others begin with the next one.
    "one-token-each": Case(of((40,) * 16, GREEDY.replace(max_tokens=1)), joined=True),
    "ends-together": Case(
        of((40,) * 14, GREEDY.replace(max_tokens=5), sampled(max_tokens=5)),
        {"max_requests": 6},
        joined=True,
    ),
    "ends-together-for-blocks": Case(
        of((60,) * 9, sampled(max_tokens=3)), {"blocks": 5, "prefix_caching": True}, joined=True
    ),
    # Megatron finishes the step that reads its prompt.
    "top-log-probs-later": Case(
        of((40,) * 4, sampled(max_tokens=40, stop_token_ids=range(3)), sampled(logprobs=0)),
        later={n: of((30,), GREEDY.replace(logprobs=2, max_tokens=2)) for n in (4, 8, 12)},
        joined=True,
    ),
    "penalties-later": Case(
        of((40,) * 16, GREEDY.replace(max_tokens=9), sampled(max_tokens=5, frequency_penalty=1.0)),
        later={9: of((30, 31), sampled(repetition_penalty=1.5, max_tokens=4), GREEDY)},
    ),
    "counting-tokens-later": Case(
        of((40,) * 2, GREEDY.replace(max_tokens=40)),
        later={
            4: of((30,), sampled(repetition_penalty=1.5, max_tokens=4)),
            14: of((30,), sampled(min_tokens=4, stop_token_ids=range(32))),
        },
        joined=True,
    ),
    # A step that reads prompts has as many tokens, padding included, as the one behind it.
    "equal-sizes": Case(
        of((20, 30), GREEDY.replace(max_tokens=30)),
        {"max_requests": 64},
        later={4: of((40,), sampled()), 12: of((9,), GREEDY)},
        joined=True,
    ),
    "aborted": Case(
        of((20, 30, 58, 40), GREEDY.replace(max_tokens=20)), aborts={3: [1], 4: [0, 1], 12: [3]}
    ),
    "aborted-waiting": Case(
        of((40,) * 12, GREEDY.replace(max_tokens=20)), aborts={3: [8, 1], 5: [9, 10]}, joined=True
    ),
    "graphs": Case(
        of(LENGTHS, GREEDY, sampled(max_tokens=8), sampled(max_tokens=4, top_k=4)),
        {"num_cuda_graphs": 4},
        happened=lambda done: done.graph_steps,
    ),
    "everything": Case(
        [*of(CROSSING, GREEDY, sampled(logprobs=0, top_p=0.8)), *of((100,) * 4, sampled())],
        {"blocks": 13, "paused_blocks": 2, **CHUNKED, "prefix_caching": True, "num_cuda_graphs": 4},
        later={6: of((70, 100), GREEDY)},
        aborts={9: [2]},
        shared=70,
        happened=lambda done: done.prefix_blocks and done.chunks,
    ),
}


def parity_model(**fields: object) -> GPTModel:
    """In parity mode, whose kernels for GPUs need bf16 and widths that are powers of two."""
    if torch.cuda.is_available():
        fields = {"mla": WIDE, "dtype": torch.bfloat16, **fields}
    return generating_model(AbsorbedMLAOptions(batch_invariant=True), **fields)


def engines_of(
    case: Case,
    model: GPTModel,
    *,
    other: GPTModel | None = None,
    graphs: FullCudaGraphs | None = None,
    ahead: bool,
) -> tuple[Engine, Engine]:
    """An engine with the overlap scheduler, and one without.

    Args:
        case: Of ``CASES``.
        model: Of the engine with the overlap scheduler.
        other: Of the engine without, with the same weights; None: the same.
        graphs: Of the overlap scheduler; None: as the engine has them.
        ahead: Whether the scheduler launches steps ahead.
    """
    sizes = {"blocks": 40, **case.options}
    ours, theirs = engine_of(model, **sizes), engine_of(other or model, decode_loop=False, **sizes)
    ours.scheduler.launches_ahead = ahead
    if graphs is not None:
        ours.scheduler.runner.graphs = graphs
    return ours, theirs


def check(model: GPTModel, case: Case, **more) -> None:
    """Run a case in both of :func:`engines_of`, and compare them after every step."""
    ours, theirs = engines_of(case, model, **more, ahead=False)
    looped = count_calls(ours)
    with ours, theirs:
        for engine in (ours, theirs):  # blocks that are never written are compared, too
            engine.host.context.memory_buffer.zero_()
        number = add(case, case.requests, 0, ours, theirs)
        step, last = 0, max([*case.later, *case.aborts, 0])
        while ours.is_busy() or step <= last:
            number = come_and_go(case, step, number, ours, theirs)
            step += 1
            assert ours.is_busy() == theirs.is_busy()
            if not ours.is_busy():
                continue
            assert ours.step() == theirs.step(), f"step {step}"
            assert ours.statistics == theirs.statistics, f"step {step}"
            assert_same_state(ours, theirs)
        check_results(case, ours, theirs, number)
        assert looped, "the scheduler ran no step"
        assert case.finished or not all(looped), "Megatron finished every step"


def check_ahead(model: GPTModel, case: Case, **more) -> None:
    """As :func:`check`, ours launching each step before the tokens of the last one are known.

    A request that waits may then begin a step later, in other company: what is compared are
    results, and each request's reports. In parity mode, where company does not matter.
    """
    ours, theirs = engines_of(case, model, **more, ahead=True)
    most, joined = count_in_flight(ours)
    with ours, theirs:
        reports = [run(case, engine) for engine in (ours, theirs)]
        assert reports[0].keys() == reports[1].keys()
        assert reports[0] == reports[1]
        check_results(case, ours, theirs, len(reports[0]))
        assert max(most) == 1 + case.ahead
        assert bool(joined) >= case.joined


def run(case: Case, engine: Engine) -> dict[int, list]:
    """Run a case to its end; by request, what steps have reported of it."""
    reports: dict[int, list] = {}
    number = add(case, case.requests, 0, engine)
    step, last = 0, max([*case.later, *case.aborts, 0])
    while engine.is_busy() or step <= last:
        number = come_and_go(case, step, number, engine)
        step += 1
        for progress in engine.step() if engine.is_busy() else ():
            ended = progress.result is not None
            reports.setdefault(progress.number, []).append((progress.tokens, ended))
    return dict(sorted(reports.items()))


def come_and_go(case: Case, step: int, number: int, *engines: Engine) -> int:
    """Add and abort the requests of a step; returns how many have been added."""
    number = add(case, case.later.get(step, ()), number, *engines)
    for aborted in case.aborts.get(step, ()):
        for engine in engines:
            engine.abort(aborted)
    return number


def check_results(case: Case, ours: Engine, theirs: Engine, number: int) -> None:
    """Compare what both say at the end."""
    assert ours.results == theirs.results and len(ours.results) == number
    assert not any(result.error for result in ours.results.values())
    for result in ours.results.values():
        assert len(result.top_log_probs) in (0, len(result.tokens))
    assert case.happened(ours.statistics), ours.statistics
    assert not ours.host.stop_word_finished_request_ids, "it would end every step"
    ours.require_no_leak()


def add(case: Case, requests, number: int, *engines: Engine) -> int:
    for length, params in requests:
        text = prompt(length, number, min(case.shared, length))
        assert {engine.add_request(text, params) for engine in engines} == {number}
        number += 1
    return number


def count_calls(engine: Engine) -> list:
    """Gets an entry for every step of the scheduler: whether Megatron has finished it."""
    found, process = [], engine.scheduler._process_output

    def counted(step):
        output = process(step)
        found.append(output.megatron_step is not None)
        return output

    engine.scheduler._process_output = counted
    return found


def count_in_flight(engine: Engine) -> tuple[list[int], list[int]]:
    """Follow the steps that are in flight when the output of the first of them is processed.

    Returns:
        How many there were, in every step of the scheduler; of those launched ahead, how many
        prompts they compute, if any.
    """
    scheduler, found, prompts = engine.scheduler, [0], []
    process = scheduler._process_output

    def counted(step):
        steps = scheduler._in_flight
        found.append(len(steps))
        prompts.extend(one.sizes.prefill_req_count for one in steps[1:] if one.has_prefill)
        return process(step)

    scheduler._process_output = counted
    return found, prompts


# Of the context, of requests and tokens; the rest is for the step in between.
_COUNTS = (
    "total_request_count",
    "paused_request_count",
    "active_token_count",
    "num_prefill_requests",
    "chunked_prefill_request_id",
    "step_count",
    "prefix_cache_lru_clock",
    "lifetime_prefill_token_count",
)
_PARTS = (
    "prompt_tokens",
    "generated_tokens",
    "generated_log_probs",
    "prompt_log_probs",
    "generated_top_n_logprobs",
    "prompt_top_n_logprobs",
    "status",
    "tpot",
)


def assert_same_state(ours: Engine, theirs: Engine) -> None:
    """Compare what the next step begins with."""
    one, other = state_of(ours), state_of(theirs)
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, other[name]), f"{name}: {value}, not {other[name]}"


def state_of(engine: Engine) -> dict[str, object]:
    host, context = engine.host, engine.host.context
    allocator = context.kv_block_allocator
    rows, tokens = slice(0, context.total_request_count), slice(0, context.active_token_count)
    tensors = {name: x for name, x in vars(context).items() if isinstance(x, torch.Tensor)}
    found = {name: getattr(context, name) for name in _COUNTS}
    found |= {n: x[rows] for n, x in tensors.items() if n.startswith("request_")}
    found |= {n: x[tokens] for n, x in tensors.items() if n.startswith("token_to_")}
    found |= {f"metadata {n}": x[rows] for n, x in context.request_metadata.items()}
    if context.paused_request_count:
        found["paused"] = context.paused_tokens
    # All blocks but the one for padding.
    assert allocator.dummy_block_idx == allocator.total_count - 1
    found["latents"] = context.memory_buffer[:, :-1].contiguous().view(torch.uint8)
    found["free"] = allocator.block_bag[: allocator.total_avail]
    if allocator.enable_prefix_caching:
        found["hashes"] = dict(allocator.kv_hash_to_block_id)
        for name in ("block_hashes", "block_ref_counts", "block_timestamps"):
            if hasattr(allocator, name):
                found[name] = getattr(allocator, name)
    found["waiting"] = list(host.waiting_request_ids)
    found["stopping"] = set(host.stop_word_finished_request_ids)
    for number, entry in host.requests.items():
        for i, part in enumerate(entry.record.requests):
            for name in _PARTS:
                found[f"request {number}, part {i}, {name}"] = getattr(part, name)
    return found
