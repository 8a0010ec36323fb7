"""Numbers that layers find for every token, kept in the blocks of the latent cache.

Where a step writes the latents of a token, it writes the token's numbers, too: in a tensor beside
the cache, at the same block and place. So they are there for tokens that the prefix cache had,
drafts that were rejected are overwritten, and a CUDA graph writes them like anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from absorbed_mla.inference.prefill_context_parallel import TokenShares, gather
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.megatron_engine.allocator import pool_of
from absorbed_mla.serving.megatron_engine.names import RELEASE_REQUESTS

# What :meth:`TokenRecords.recording` gives a layer, and what ends it.
Record = Callable[[Tensor], None]
Follow = Callable[[nn.Module, Record], Callable[[], None]]


class TokenRecords:
    """A row of numbers for each token and layer, by the token's place in the latent cache.

    Collective over the ranks that hold a model together, which have the same requests; each
    pipeline stage has its layers, and a request's numbers are joined when it ends.

    Args:
        model: Of this rank.
        context: Whose blocks hold the latents.
        layers: Modules that find the numbers, one for each layer of this rank.
        width: Numbers of a token in one layer.
        dtype: Of the numbers.
        follow: Has a module call a function with its numbers [tokens, width] of every forward, and
            returns what stops it.
        exchange: Of ranks that all compute the numbers of the tokens of all; None: each of its own.
    """

    def __init__(
        self,
        model: GPTModel,
        context: DynamicInferenceContext,
        layers: Sequence[nn.Module],
        width: int,
        dtype: torch.dtype,
        follow: Follow,
        exchange: TokenExchange | None = None,
    ) -> None:
        self._model, self._context, self._layers, self._follow = model, context, layers, follow
        self._exchange = exchange
        device = context.memory_buffer.device
        shape = len(layers), width
        tokens = context.round_up_tokens(context.max_tokens)
        # Of the step that runs, on this rank; graphs of layers write here.
        self._step = torch.zeros((tokens, *shape), dtype=dtype, device=device)
        blocks, _ = pool_of(context.kv_block_allocator)
        size = blocks, context.block_size_tokens
        self._cache = torch.zeros((*size, *shape), dtype=dtype, device=device)
        self._layers_of_stages = _counts(len(layers), device)
        self._rows = 0
        self._runs = False
        self._shares: TokenShares | None = None
        # By number, what requests had when their blocks were released; numbers of those that have
        # ended, and whose blocks will be.
        self._released: dict[int, _Copy] = {}
        self._ended: set[int] = set()
        release = RELEASE_REQUESTS.of(context)

        def keep_and_release(rows: Tensor) -> None:
            for row in rows.tolist():
                number = int(context.request_ids[row])
                if number not in self._ended:
                    self._released[number] = self._copy(row)
                self._ended.discard(number)
            release(rows)

        RELEASE_REQUESTS.replace(context, keep_and_release)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forwards of the context inside the block."""
        with contextlib.ExitStack() as stack:
            hooks = [
                self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
                # Later than the hook that divides prompts over context-parallel ranks.
                self._model.decoder.register_forward_pre_hook(self._find_shares),
                self._model.register_forward_hook(self._write),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            for column, layer in enumerate(self._layers):
                stack.callback(self._follow(layer, self._recorder(column)))
            yield

    def clear(self) -> None:
        """Numbers of requests begin anew."""
        self._released.clear()
        self._ended.clear()

    def take(self, number: int, start: int, end: int) -> Any:
        """A request's numbers, which are then forgotten; collective over pipeline stages.

        Args:
            number: Of the request, which has just ended.
            start: First token.
            end: Token behind the last one; 0: nothing is wanted.

        Returns:
            NumPy's array [end - start, layers of all stages, width]; int16 as uint16. None if
            nothing is wanted.
        """
        copy = self._released.pop(number, None)
        context = self._context
        rows = context.request_ids[: context.total_request_count].tolist()
        if number in rows:
            # It has ended by a token, and has a row in the step that was launched before.
            copy = self._copy(rows.index(number))
            self._ended.add(number)
        if not end:
            return None
        assert copy is not None, f"request {number} had no blocks"
        found = self._of_all_stages(copy.wait()[start:end]).numpy()
        return found.view("uint16") if found.dtype == "int16" else found

    def _recorder(self, column: int) -> Record:
        """What gets the numbers of a layer in every forward."""

        def record(found: Tensor) -> None:
            if not self._runs:
                return
            if self._exchange is not None:
                tokens, rank = self._exchange.tokens, self._exchange.rank
                found = found[sum(tokens[:rank]) :][: tokens[rank]]
            self._rows = len(found)
            self._step[: self._rows, column].copy_(found)

        return record

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        # Not a forward of somebody who evaluates meanwhile.
        self._runs = kwargs.get("inference_context") is self._context
        self._rows, self._shares = self._context.padded_active_token_count, None

    def _find_shares(self, decoder: nn.Module, args: tuple) -> None:
        self._shares = getattr(self._context, "token_shares", None)

    def _write(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Write the step's numbers where its latents are."""
        runs, self._runs = self._runs, False
        if not runs or not self._layers:
            return
        context, found = self._context, self._step[: self._rows]
        count, shares = context.padded_active_token_count, self._shares
        if self._rows < count // (shares.size if shares else 1):
            found = _joined(found, parallel_state.get_tensor_model_parallel_group())
        if shares is not None:
            found = shares.gather(found.view(torch.uint8)).view(found.dtype)
        view, tokens = context.gpu_view, slice(count)
        places = view.token_to_local_position_within_kv_block[tokens].long()
        self._cache[view.token_to_block_idx[tokens].long(), places] = found[tokens]

    def _copy(self, row: int) -> _Copy:
        """Queue a copy of what the blocks of a row hold, behind the steps launched so far."""
        blocks = self._context.request_to_kv_block_ids[row]
        blocks = blocks[blocks >= 0].long().to(self._cache.device, non_blocking=True)
        return _Copy(self._cache[blocks].flatten(0, 1))

    def _of_all_stages(self, found: Tensor) -> Tensor:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return found
        own, parts = found.to(self._cache.device).contiguous(), []
        for stage, layers in enumerate(self._layers_of_stages):
            is_own = stage == group.rank()
            part = own if is_own else own.new_empty(len(own), layers, own.shape[2])
            if part.numel():
                source = dist.get_global_rank(group, stage)
                dist.broadcast(part.view(torch.uint8), source, group=group)
            parts.append(part)
        return torch.cat(parts, dim=1).cpu()


class _Copy:
    """A tensor on its way to the CPU."""

    def __init__(self, of: Tensor) -> None:
        # Into pinned memory, for which the host does not wait.
        self._copied = of.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Tensor:
        """The copy, once it is there."""
        self._event.synchronize()
        return self._copied


def _joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of all ranks, one after the other; all backends exchange bytes."""
    return gather(x.view(torch.uint8), group).view(x.dtype)


def _counts(own: int, device: torch.device) -> list[int]:
    """Layers of every pipeline stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return [own]
    return gather(torch.tensor([own], device=device), group).tolist()
