"""Results of requests, their progress after a step, and statistics of the steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status

from absorbed_mla.generation.sampling import SamplingParams


@dataclass
class Result:
    """Result of a request that has ended.

    Attributes:
        tokens: Generated token ids, the stop token included.
        log_probs: Log-probability of each token, if ``SamplingParams.log_probs`` asked for them.
        finish: Why it ended: ``"stop"`` (the stop token), ``"length"`` (``num_tokens``),
            ``"context"`` (the engine's ``max_sequence_length``), ``"abort"``, or ``""`` after an
            error.
        error: Why the request could not run, or ``""``.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""


@dataclass(frozen=True)
class Progress:
    """What one step did for one request.

    Attributes:
        number: The request's number, as ``Engine.add_request`` returned it.
        tokens: New token ids.
        result: The result if the request has ended, otherwise None.
    """

    number: int
    tokens: list[int]
    result: Result | None = None


@dataclass
class Statistics:
    """Counters of an engine's steps.

    Attributes:
        steps: Forward passes.
        graph_steps: Forward passes padded to the size of a CUDA graph.
        mixed_steps: Forward passes that decode some requests and prefill others.
        most_rows: Maximum number of requests in a forward pass.
        most_paused: Maximum number of requests that kept their blocks while they waited.
        evicted: How often a request lost its blocks, to be prefilled again later.
        prefix_blocks: Blocks that the prefix cache had already.
        chunks: Forward passes that ended in the middle of a prompt.
    """

    steps: int = 0
    graph_steps: int = 0
    mixed_steps: int = 0
    most_rows: int = 0
    most_paused: int = 0
    evicted: int = 0
    prefix_blocks: int = 0
    chunks: int = 0

    def count_step(self, context: DynamicInferenceContext) -> None:
        """Count the forward pass that has just run."""
        rows = context.batch_dimensions
        self.steps += 1
        self.graph_steps += context.using_cuda_graph_this_step()
        self.mixed_steps += rows.decode_req_count > 0 and rows.prefill_req_count > 0
        self.most_rows = max(self.most_rows, rows.req_count)
        self.most_paused = max(self.most_paused, context.paused_request_count)
        self.chunks += context.chunked_prefill_request_id >= 0


def count_tokens(record: DynamicInferenceRequestRecord) -> int:
    """Number of tokens generated so far; Megatron starts a new part at every eviction."""
    return sum(len(part.generated_tokens) for part in record.requests)


def last_tokens(record: DynamicInferenceRequestRecord, count: int) -> list[int]:
    """The last ``count`` generated tokens."""
    tokens: list[int] = []
    for part in reversed(record.requests):
        missing = count - len(tokens)
        if missing <= 0:
            break
        tokens = part.generated_tokens[-missing:] + tokens
    return tokens


def result_of(
    record: DynamicInferenceRequestRecord, sampling: SamplingParams, *, aborted: bool
) -> Result:
    """The result of a request that Megatron's engine is done with."""
    tokens = [token for part in record.requests for token in part.generated_tokens]
    log_probs = [x for part in record.requests for x in part.generated_log_probs or ()]
    last = record[-1]
    if last.status == Status.FAILED:
        errors = [type(e.payload).__name__ for e in last.events if e.payload is not None]
        return Result(tokens, log_probs, error=", ".join(errors) or "the engine failed")
    if tokens and tokens[-1] == sampling.stop_token:
        finish = "stop"
    elif len(tokens) == sampling.num_tokens:
        finish = "length"
    else:
        finish = "abort" if aborted else "context"
    return Result(tokens, log_probs, finish)
