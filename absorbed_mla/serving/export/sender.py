"""``LiveWeights`` and ``WeightSender``: weights of a live model for engines in other processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from absorbed_mla.serving.export.agreement import on_all_ranks
from absorbed_mla.serving.export.iteration import started
from absorbed_mla.serving.export.weights import ExportPlan, export_plan
from absorbed_mla.serving.weights.transfer import BUCKET_BYTES, Sender


class LiveWeights:
    """The weights of a live model as they are whenever they are iterated over; collective.

    Every rank makes one with the same arguments, and iterates over it when the others do.

    Args:
        model, options: As for :func:`hf_weights`.

    Attributes:
        shapes: As :func:`hf_weight_shapes` gives them.
        device: Of the model.

    Raises:
        ValueError: As :func:`hf_weights`.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], **options: Any) -> None:
        self._model, self._options = model, options
        self._plan: ExportPlan | None = export_plan(model, **options)
        self.shapes, self.device = self._plan.shapes, self._plan.device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        plan, self._plan = self._plan, None
        _, fits = on_all_ranks(lambda: (True, plan is not None and plan.fits(self._model)))
        if plan is None or not all(fits):
            plan = export_plan(self._model, **self._options)
        self._plan = plan
        return started(plan.parts, plan.device)


class WeightSender:
    """Sends the weights of a live model to ``LLM.update_weights`` in other programs.

    Every rank of the training makes one and calls :meth:`send`; rank 0 sends. Whoever can reach the
    address can take part: have it in a network that you trust.

    Args:
        address: ``tcp://HOST:PORT``, where rank 0 listens.
        num_receivers: Processes of all ``LLM`` that receive: the sum of their tensor-parallel times
            pipeline sizes.
        backend: ``"process_group"``: NCCL between GPUs, Gloo between CPUs. ``"shared_memory"``:
            CUDA IPC, or memory of this machine, also for processes that share a GPU.
        bucket_bytes: Bytes that are sent together. Rank 0 holds two buckets and a tensor, a
            receiver one bucket and two tensors; a tensor that is larger than a bucket is one.
        timeout: Seconds that rank 0 waits for a receiver.

    Attributes:
        address: With the port, also if it was 0.

    Raises:
        ValueError: On every rank, if an argument is wrong, or nothing can listen there.
    """

    def __init__(
        self,
        address: str,
        num_receivers: int,
        *,
        backend: str = "process_group",
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
    ) -> None:
        options = {"backend": backend, "bucket_bytes": bucket_bytes, "timeout": timeout}
        self._sender: Sender | None = None
        error: Exception | None = None
        try:
            if dist.get_rank() == 0:
                self._sender = Sender(address, num_receivers, **options)
        except ValueError as refusal:
            error = refusal
        self.address: str = _of_rank_0(self._sender and self._sender.address, error)

    def send(self, weights: LiveWeights) -> None:
        """Send the weights as they are now, once every receiver has called ``update_weights``.

        Raises:
            ValueError: On every rank, if an ``LLM`` refuses them; none has changed.
            RuntimeError: On every rank, if the transfer fails. An ``LLM`` that has got a part of
                the weights generates again after an update that does not fail.
        """
        if self._sender is None:
            _of_rank_0(None)
            for _ in weights:
                pass
            return
        accepted = False

        def pairs() -> Iterable[tuple[str, Tensor]]:
            nonlocal accepted
            accepted = True
            _of_rank_0(None)
            return weights

        try:
            self._sender.send(weights.shapes, pairs, weights.device)
        except Exception as error:
            if not accepted:
                _of_rank_0(None, error)
            raise


def weight_buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in their order, in lists of at most so many bytes that loaders take one by one.

    The tensors of a layer's attention are in one list, whatever their size: SGLang joins
    ``q_a_proj`` and ``kv_a_proj_with_mqa``, and ignores one that comes without the other.

    Args:
        weights: As :func:`hf_weights` gives them, or :class:`LiveWeights`.
        bucket_bytes: Of a list, unless one tensor, or one attention, has more.
    """
    bucket: list[tuple[str, Tensor]] = []
    for _, together in itertools.groupby(weights, lambda pair: pair[0].split(".self_attn.")[0]):
        unit = list(together)
        if bucket and sum(x.nbytes for _, x in (*bucket, *unit)) > bucket_bytes:
            yield bucket
            bucket = []
        bucket += unit
    if bucket:
        yield bucket


def _of_rank_0(value: Any, error: Exception | None = None) -> Any:
    """Rank 0's value on every rank, or its error, on others one with its text; collective."""
    told = [value, isinstance(error, ValueError), None if error is None else str(error)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, 0)
    if error is not None:
        raise error
    value, refused, message = told
    if message is not None:
        raise (ValueError if refused else RuntimeError)(f"rank 0: {message}")
    return value
