"""What an engine returns of its layers' choices for tokens: experts, and keys of sparse attention.

By the name of the field of a result; ``enable_return_`` and the name is the option that asks for
it, the name and ``_prompt_start`` a sampling parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel

from absorbed_mla.serving import indexer_topk, routed_experts
from absorbed_mla.serving.request_results import Progress
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.token_records import TokenRecords

_KINDS = {"routed_experts": routed_experts, "indexer_topk": indexer_topk}


def asked_choices(options: Any) -> list[str]:
    """Names of what options of an engine or of ``LLM`` ask for."""
    return [name for name in _KINDS if getattr(options, f"enable_return_{name}")]


def bytes_per_token(model: GPTModel, options: Any) -> int:
    """Bytes that the records of one token take on this rank."""
    return sum(_KINDS[name].bytes_per_token(model) for name in asked_choices(options))


class ReturnedChoices:
    """The choices for tokens of requests, which a result has when its request ends.

    Args:
        records: By name, of every kind that is asked for.
    """

    def __init__(self, records: dict[str, TokenRecords]) -> None:
        self._records = records
        # By number of a request that has not ended, length of the prompt and parameters.
        self._requests: dict[int, tuple[int, SamplingParams]] = {}

    @classmethod
    def of(
        cls, model: GPTModel, context: DynamicInferenceContext, options: Any
    ) -> ReturnedChoices | None:
        """Those that options ask for; None if there are none.

        Raises:
            ValueError: If the model makes no such choices.
        """
        asked = asked_choices(options)
        records = {name: _KINDS[name].records_of(model, context) for name in asked}
        return cls(records) if records else None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forwards of the context inside the block."""
        with contextlib.ExitStack() as stack:
            for records in self._records.values():
                stack.enter_context(records.recording())
            yield

    def clear(self) -> None:
        """Numbers of requests begin anew."""
        self._requests.clear()
        for records in self._records.values():
            records.clear()

    def begin(self, number: int, prompt_length: int, sampling: SamplingParams) -> None:
        """A request is queued."""
        self._requests[number] = prompt_length, sampling

    def given_to(self, progress: list[Progress]) -> list[Progress]:
        """Give results what was chosen for all tokens but the last, which no step has read."""
        for one in progress:
            result = one.result
            known = None if result is None else self._requests.pop(one.number, None)
            if result is None or known is None:
                continue
            length, sampling = known
            end = length + len(result.tokens) - 1 if result.tokens else 0
            for name, records in self._records.items():
                start = getattr(sampling, f"{name}_prompt_start")
                setattr(result, name, records.take(one.number, start, end))
        return progress
