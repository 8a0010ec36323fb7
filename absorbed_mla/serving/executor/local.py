"""Runs the steps of an engine in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from absorbed_mla.batch_invariant import enable_batch_invariant_mode
from absorbed_mla.serving.engine import Engine
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.executor.commands import Command
from absorbed_mla.serving.executor.engine_options import engine_options
from absorbed_mla.serving.executor.process_groups import join
from absorbed_mla.serving.executor.weight_updates import LoadedWeights, UpdateFailure
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.request_results import Progress
from absorbed_mla.serving.scheduler.cuda_graphs import delete_graphs
from absorbed_mla.serving.statistics import Statistics
from absorbed_mla.serving.weights.checkpoint import open_model, require_model
from absorbed_mla.serving.weights.load import load_model


class Runner(Protocol):
    """What ``LLM`` drives; every method is collective over the ranks."""

    def step(self, commands: Sequence[Command]) -> list[Progress]:
        """Carry out commands, then one step if there is anything to do."""
        ...

    def sleep(self, level: int) -> None:
        """End all requests, forget what is cached, and let the model be trained; frees memory."""
        ...

    def wake(self) -> None:
        """Be ready for requests, numbered from 0; the weights may have changed."""
        ...

    def update_weights(
        self, weights: Any, keep_cache: bool, rank_offset: int, timeout: float
    ) -> UpdateFailure | None:
        """Set all weights of a loaded model, awake or asleep; says what prevented it."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Forget what is cached; with running requests only if they may begin again."""
        ...

    def options(self) -> EngineOptions:
        """Sizes of the engine."""
        ...

    def statistics(self) -> Statistics:
        """Counters since the last ``wake``."""
        ...

    def require_no_leak(self) -> None:
        """Check, without requests, that no block of the cache is lost."""
        ...

    def check(self) -> None:
        """Check that no process of the model has ended; not collective."""
        ...

    def silence(self) -> float:
        """Seconds without a sign of life of some process; not collective, also during a step."""
        ...

    def close(self) -> None:
        """Free everything; the runner cannot be used again."""
        ...


class LocalRunner:
    """A runner in this process; every rank has its own and makes the same calls.

    Args:
        model: Of this rank.
        options: Of the engine.
        weights: Of the model; None: they are those of a training.

    Attributes:
        step: ``Engine.execute``, while it is awake.
    """

    step: Callable[[Sequence[Command]], list[Progress]]

    def __init__(
        self,
        model: GPTModel,
        options: EngineOptions,
        weights: LoadedWeights | None = None,
    ) -> None:
        self._model, self._options, self._weights = model, options, weights
        self._engine: Engine | None = None

    @classmethod
    def of_checkpoint(
        cls, folder: Path, options: LLMOptions, rank: int, world: int, store: dist.Store | None
    ) -> LocalRunner:
        """Join the other ranks and load this rank's share of a checkpoint; awake.

        Raises:
            ValueError: If checkpoint, options and machine do not fit each other.
        """
        checkpoint = open_model(folder, follow_links=options.follow_links)
        require_model(checkpoint, options)
        device = join(options, rank, world, store)
        if options.parity:
            enable_batch_invariant_mode(device.type, options.tensor_parallel_parts)
        model = load_model(checkpoint, options, device)
        sizes = engine_options(
            model, options, model.max_sequence_length, checkpoint.config.vocab_size
        )
        drafts = options.num_speculative_tokens > 0
        runner = cls(model, sizes, LoadedWeights(model, checkpoint.config, drafts=drafts))
        runner._wake(capture=True)
        return runner

    def sleep(self, level: int = 1) -> None:
        """See :class:`Runner`."""
        if self._engine is not None:
            self._engine.finish()
            if not level:
                self._engine.stop()
                return
            self._free_cache(self._engine)
        if self._weights is not None:
            self._weights.free(discard=level > 1)
        gc.collect()
        torch.cuda.empty_cache()

    def _free_cache(self, engine: Engine) -> None:
        engine.close()
        self._engine = None
        del self.step
        if self._options.num_cuda_graphs:
            delete_graphs()

    def wake(self) -> None:
        """See :class:`Runner`; graphs of prompts are captured as they are needed."""
        if self._weights is not None:
            self._weights.allocate()
        self._wake(capture=False)

    def update_weights(
        self, weights: Any, keep_cache: bool, rank_offset: int, timeout: float
    ) -> UpdateFailure | None:
        """See :class:`Runner`."""
        assert self._weights is not None
        failure = self._weights.update(weights, rank_offset, timeout)
        if failure is None and self._engine is not None and not keep_cache:
            self._engine.forget_cache()
        return failure

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """See :class:`Runner`."""
        engine = self._awake()
        if engine.has_cached_requests() and not reset_running_requests:
            return False
        engine.forget_cache()
        return True

    def _wake(self, *, capture: bool) -> None:
        """See :meth:`wake`; with ``capture`` before there are requests."""
        try:
            if self._engine is None:
                self._engine = Engine(self._model, self._options)
                self.step = self._engine.execute
            self._engine.start()
            if capture:
                self._engine.capture()
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"cache_tokens: a cache of {self._options.cache_tokens} tokens does not fit into "
                "this GPU's memory with all else; fewer do, or a smaller max_num_seqs or "
                "prefill_graph_tokens"
            ) from error

    def options(self) -> EngineOptions:
        """See :class:`Runner`."""
        return self._options

    def statistics(self) -> Statistics:
        """See :class:`Runner`."""
        return self._awake().statistics

    def require_no_leak(self) -> None:
        """See :class:`Runner`."""
        self._awake().require_no_leak()

    def check(self) -> None:
        """See :class:`Runner`; this process runs."""

    def silence(self) -> float:
        """See :class:`Runner`; this process lives."""
        return 0.0

    def close(self) -> None:
        """See :class:`Runner`."""
        self.sleep()

    def _awake(self) -> Engine:
        assert self._engine is not None
        return self._engine
