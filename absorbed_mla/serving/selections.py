"""The keys that sparse attention chooses for the requests of an engine, to be replayed in training.

    with record_request_selections(engine) as recorder:
        results = engine.generate(prompts, sampling)
    requests = [recorder.take(number) for number in range(len(prompts))]

:func:`absorbed_mla.dsa.request_selections.training_selections` lays them out for training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.inference.utils import InferenceMode
from torch import Tensor, nn

from absorbed_mla.dsa.core_attention import SparseCoreAttention
from absorbed_mla.dsa.index_sharing import Selected
from absorbed_mla.dsa.replay import recordable_layers
from absorbed_mla.dsa.request_selections import RequestSelections, all_keys
from absorbed_mla.inference.caches.dynamic import of_active_requests
from absorbed_mla.serving.engine import Engine


class _Piece(NamedTuple):
    """What one step chose for a request.

    Attributes:
        start: Position of the step's first token of the request.
        count: Tokens of the request in the step.
        chosen: int32 [layers, count, topk]; None where no token had a choice.
    """

    start: int
    count: int
    chosen: Tensor | None


class RequestRecorder:
    """Collects selections by the number of a request; see :func:`record_request_selections`.

    Args:
        layers: Those with an indexer, by name.
    """

    def __init__(self, engine: Engine, layers: Mapping[str, SparseCoreAttention]) -> None:
        self._engine, self._names = engine, tuple(layers)
        self._topk = next(iter(layers.values())).dsa.topk
        self._results = engine.results
        self._pieces: dict[int, list[_Piece]] = defaultdict(list)
        self._step: dict[str, Tensor | None] = {}

    def take(self, number: int) -> RequestSelections:
        """The selections of a request that has ended, which the recorder then forgets.

        Args:
            number: As ``Engine.add_request`` returned it, or the index of the prompt in
                ``Engine.generate``.

        Raises:
            ValueError: If no step had tokens of the request, or it has not ended.
        """
        self._forget_former_requests()
        if number in self._pieces and number not in self._engine.results:
            raise ValueError(f"request {number} has not ended; take its selections after that")
        if number not in self._pieces:
            raise ValueError(
                f"request {number} has no selections: recorded are {sorted(self._pieces)}"
            )
        pieces = self._pieces.pop(number)
        end = 0
        for piece in pieces:
            # An evicted request begins again; no token is left out.
            assert piece.start <= end, f"no selections for tokens {end} to {piece.start}"
            end = max(end, piece.start + piece.count)
        if end <= self._topk:
            return RequestSelections(end, self._topk, dict.fromkeys(self._names))
        chosen = {name: all_keys(end, self._topk) for name in self._names}
        for start, count, found in pieces:
            if found is not None:
                for rows, new in zip(chosen.values(), found):
                    rows[start : start + count] = new
        return RequestSelections(end, self._topk, dict(chosen))

    def record(self, name: str, selected: Selected) -> None:
        """Keep the selection of a layer until the step ends."""
        chosen = selected.chosen
        self._step[name] = None if chosen is None else chosen.cpu()

    def end_step(self) -> None:
        """Share the step's selections out among its requests."""
        step, self._step = self._step, {}
        # A stopped engine may hold requests while the model is trained.
        if not InferenceMode.is_active() or not self._engine.host.context.total_request_count:
            return
        self._forget_former_requests()
        found = [one for one in (step[name] for name in self._names) if one is not None]
        # Lengths decide whether there is a choice: it is the same for all layers.
        assert len(found) in (0, len(self._names))
        first = 0
        for number, start, count in _rows(self._engine.host.context):
            part = [one[first : first + count] for one in found]
            chosen = torch.stack(part) if part else None
            self._pieces[number].append(_Piece(start, count, chosen))
            first += count

    def _forget_former_requests(self) -> None:
        """Numbers begin anew where the engine's results do."""
        if self._engine.results is not self._results:
            self._results = self._engine.results
            self._pieces.clear()


@contextmanager
def record_request_selections(engine: Engine) -> Iterator[RequestRecorder]:
    """Record what is chosen for every token of the engine's requests inside of the ``with`` block.

    Prefill chunks and decode steps are put together. Of a request that was evicted and prefilled
    again, the later selections count: they belong to the keys that later tokens saw. Copying to the
    host waits for the device in every layer with an indexer.

    Tensor-parallel ranks record the same; a pipeline stage records its layers. As with
    ``Engine.results``, records begin anew with ``Engine.start`` and every ``Engine.generate``.
    Collective where ``Engine.is_busy`` is: data-parallel ranks that share experts.

    Raises:
        ValueError: If the model has no layer with an indexer, its steps may be in CUDA graphs, or
            the engine has a prefix cache or drafts tokens.
        RuntimeError: If the engine has requests already.
    """
    layers = recordable_layers(engine.model)
    _require_every_token(engine)
    if engine.is_busy():
        raise RuntimeError("record_request_selections needs an engine without requests")
    recorder = RequestRecorder(engine, layers)

    def after_forward(model: nn.Module, inputs: tuple, output: Any) -> None:
        recorder.end_step()

    with ExitStack() as stack:
        for name, layer in layers.items():
            layer.selection.recorder = lambda selected, name=name: recorder.record(name, selected)
            stack.callback(setattr, layer.selection, "recorder", None)
        stack.callback(engine.model.register_forward_hook(after_forward).remove)
        yield recorder


def _require_every_token(engine: Engine) -> None:
    """Refuse engines in which tokens of requests are no tokens of steps, or the reverse."""
    options, config = engine.options, engine.model.config
    cached = engine.host.context.enable_prefix_caching
    drafts, graphs = options.num_speculative_tokens, options.num_cuda_graphs
    needs = {
        "EngineOptions(prefix_caching=False)": (cached, "its tokens choose no keys"),
        "EngineOptions(num_cuda_graphs=None)": (graphs, "the host takes no part in a graph"),
        "EngineOptions(num_speculative_tokens=0)": (drafts, "rejected tokens choose keys, too"),
        "a model with mtp_num_layers=None": (
            config.mtp_num_layers,
            "these layers have an indexer, and do not run without drafts",
        ),
    }
    for needed, (got, why) in needs.items():
        if got:
            raise ValueError(f"record_request_selections needs {needed}, got {got}: {why}")


def _rows(context: Any) -> list[tuple[int, int, int]]:
    """Number, first position and tokens of every request in the step, in the order of tokens."""
    names = "request_ids", "request_kv_length_offsets", "request_query_lengths"
    return list(zip(*of_active_requests(context, *names)))
