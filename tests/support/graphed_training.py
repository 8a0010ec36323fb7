"""Training steps of a small GPT model, from the host or in Megatron's CUDA graphs."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from tests.support import world
from tests.support.models import VOCAB, gpt_model
from tests.support.numerics import relative_error

BATCH = 2
_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Step:
    """The loss of one step, and the gradients by the name of their parameter."""

    loss: float
    gradients: dict[str, Tensor]


@contextlib.contextmanager
def generators_for_graphs() -> Iterator[None]:
    """Random-number generators that Megatron captures with; the usual ones afterwards."""
    on_gpu = torch.cuda.is_available()
    tensor_parallel.model_parallel_cuda_manual_seed(
        0, use_cudagraphable_rng=on_gpu, inference_rng_tracker=not on_gpu, force_reset_rng=True
    )
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        cuda_graphs.delete_cuda_graphs()
        if on_gpu:
            # Megatron leaves the stream that it captured on.
            torch.cuda.set_stream(stream)
        tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def train(steps: int, tokens: int = 16, *, masked: bool = False, **fields) -> list[Step]:
    """Train the same model on the same tokens; ``fields`` are those of ``gpt_model``.

    With ``masked``, every step hides other keys.

    Graphs are made as Megatron's programs make them: ``local`` behind the first step,
    ``transformer_engine`` before it.
    """
    model = gpt_model(num_layers=2, **fields)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    with _side_stream():
        wrapped = DistributedDataParallel(model.config, ddp, model).train()
    impl = model.config.cuda_graph_impl
    if impl == "transformer_engine":
        _capture_by_transformer_engine(wrapped, tokens)
    done = []
    for step in range(steps):
        wrapped.zero_grad_buffer()
        loss = _loss(wrapped, tokens, step, masked)
        loss.backward()
        wrapped.finish_grad_sync()
        if impl == "local":
            cuda_graphs.create_cudagraphs()
        named = model.named_parameters()
        done.append(Step(loss.item(), {name: p.main_grad.clone() for name, p in named}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= _LEARNING_RATE * parameter.main_grad.to(parameter.dtype)
    return done


@contextlib.contextmanager
def _side_stream() -> Iterator[None]:
    """Not the default stream, on which no graph may wait for what DDP's hooks accumulate."""
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _loss(model: DistributedDataParallel, tokens: int, seed: int, masked: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCAB, (BATCH, tokens + 1), generator=generator).to(world.device())
    ids, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    positions = torch.arange(tokens, device=ids.device).expand_as(ids)
    mask = None
    if masked:
        mask = torch.rand(BATCH, 1, tokens, tokens, generator=generator).to(world.device()) < 0.2
    return model(ids, positions, mask, labels=labels).float().mean()


def _capture_by_transformer_engine(wrapped: DistributedDataParallel, tokens: int) -> None:
    # Kernels are compiled, and tables made, outside of the capture.
    _loss(wrapped, tokens, seed=0).backward()
    wrapped.finish_grad_sync()
    microbatches.unset_num_microbatches_calculator()
    microbatches.init_num_microbatches_calculator(0, None, BATCH, BATCH, 1)
    try:
        helper = cuda_graphs.TECudaGraphHelper([wrapped], wrapped.config, tokens, BATCH)
        helper.create_cudagraphs()
    finally:
        microbatches.unset_num_microbatches_calculator()


def first_difference(ours: list[Step], theirs: list[Step]) -> str | None:
    """The first step with other bits, and its gradients that differ; None if there is none."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        differing = [
            f"{name} {relative_error(gradient, other.gradients[name]):.1e}"
            for name, gradient in one.gradients.items()
            if not torch.equal(gradient, other.gradients[name])
        ]
        if differing or one.loss != other.loss:
            losses = f"step {number}: losses {one.loss!r} and {other.loss!r}"
            return f"{losses}; relative errors of gradients: {', '.join(differing)}"
    return None
