"""Replay of routed experts: training sends each token to the experts that a rollout sent it to.

The choice is the rollout's, all else the router's: the probabilities of the chosen experts are
those of its logits, which get their gradients. Known as rollout routing replay (R3,
arXiv:2510.11370).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.dsa.checkpoint_scope import current_scope, scope_checkpoints
from absorbed_mla.megatron_names import REPLAYED_CHOICE, ROUTER, ROUTER_REPLAY, used_by
from absorbed_mla.packed_router import OWN_CHOICE, tokens_of_rank
from absorbed_mla.sequences import layout_of

# (scores, topk, what the router chooses): values of the chosen experts and their numbers, [T, K].
Choice = Callable[[Tensor, int, Callable[[], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]


@contextmanager
def replay_routed_experts(
    model: nn.Module | Sequence[nn.Module], routed_experts: Sequence[Tensor | None]
) -> Iterator[None]:
    """Send tokens to given experts in the forwards inside of the ``with`` block, in their order.

    Backward may follow after the block; recomputed layers get what their forward had. Losses that
    balance experts are Megatron's, of the experts that the router itself would choose.

    Args:
        model: Or its chunks, under a virtual pipeline; also inside of DDP.
        routed_experts: For every forward, as :func:`training_routed_experts` lays them out, on any
            device; None: the routers choose.

    Raises:
        ValueError: If the model has no experts or chooses them in a way that cannot be replayed,
            shapes do not fit, or the model is called more often.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    scope_checkpoints()
    with ExitStack() as stack:
        for chunk in chunks:
            routers = decoder_routers(chunk, "replay_routed_experts")
            columns = _columns(routers)
            if routers:
                _require_fitting(routed_experts, max(columns) + 1, routers[0].config)
            for router, column in zip(routers, columns):
                if router.config.cuda_graph_impl != "none":
                    raise ValueError(
                        "replay_routed_experts needs cuda_graph_impl='none', got "
                        f"{router.config.cuda_graph_impl!r}: a graph repeats what it has captured"
                    )
                replayed = _Replayed.of(router)
                replayed.column, replayed.forwards = column, iter(routed_experts)
                stack.callback(setattr, replayed, "forwards", None)
        yield


def _require_fitting(routed_experts: Sequence[Tensor | None], layers: int, config: Any) -> None:
    """Check all but the number of tokens, which a forward shows."""
    topk, most = config.moe_router_topk, config.num_moe_experts
    for given in routed_experts:
        if given is None:
            continue
        if given.ndim != 4 or given.shape[2] < layers or given.shape[3] != topk:
            raise ValueError(
                f"routed experts of a forward must be [tokens, batch, layers, {topk}] with at "
                f"least {layers} layers, got {list(given.shape)}"
            )
        if given.numel() and int(given.max()) >= most:
            raise ValueError(
                f"routed experts must be below num_moe_experts {most}, got {int(given.max())}"
            )


def training_routed_experts(
    microbatches: Sequence[Sequence[Any]],
    layouts: Sequence[PackedSeqParams | int],
    cp_group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """What :func:`replay_routed_experts` takes, for forwards over requests.

    A sequence begins with the tokens of its request that went through the model: the prompt and all
    generated tokens but the last. For tokens behind them, and padding, routers choose by themselves
    (-1), as for tokens whose numbers are -1 already.

    Args:
        microbatches: Of every forward, the ``routed_experts`` of its requests in the order of the
            sequences: integers [tokens, layers with experts, K], also as NumPy's arrays.
        layouts: Of every forward, Megatron's ``packed_seq_params`` of the whole pack (``thd``), or
            the number of tokens that the sequences of a batch (``sbhd``) are padded to.
        cp_group: The context-parallel ranks of the forwards; a rank gets its tokens. None for one.

    Returns:
        int16 [tokens of this rank, batch, layers, K] on the CPU, or int32 for larger numbers.

    Raises:
        ValueError: If numbers of forwards or sequences differ, a sequence is shorter than its
            request, or a token has an expert twice.
    """
    if len(microbatches) != len(layouts):
        raise ValueError(f"there are {len(microbatches)} microbatches and {len(layouts)} layouts")
    found = []
    for requests, given in zip(microbatches, layouts):
        each = [_checked(request) for request in requests]
        layout = layout_of(given, [len(one) for one in each])
        widths = {tuple(one.shape[1:]) for one in each}
        if len(widths) > 1:
            raise ValueError(
                f"routed experts must have one number of layers and K, got {sorted(widths)}"
            )
        batch = 1 if layout.packed else len(each)
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in each))
        whole = torch.full((layout.num_tokens, batch, *widths.pop()), -1, dtype=dtype)
        for i, one in enumerate(each):
            column, start = (0, layout.starts[i]) if layout.packed else (i, 0)
            whole[start : start + len(one), column] = one
        if cp_group is not None and cp_group.size() > 1:
            cut = ContextParallelLayout.of(layout, cp_group.size(), cp_group.rank())
            whole = whole[cut.tokens()]
        found.append(whole)
    return found


def _checked(request: Any) -> Tensor:
    """The experts of a request, as integers that -1 is among."""
    if request is None:
        raise ValueError("routed experts must be [tokens, layers, K], got None")
    found = torch.as_tensor(request.astype("int32") if hasattr(request, "astype") else request)
    if found.ndim != 3:
        raise ValueError(
            f"routed experts must be [tokens, layers, K], got a shape of {tuple(found.shape)}"
        )
    ordered = found.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        token, layer, _ = twice.nonzero()[0].tolist()
        raise ValueError(
            f"routed experts must be different ones, got {found[token, layer].tolist()} for token "
            f"{token} in layer {layer} of those with experts"
        )
    is_small = not found.numel() or int(found.max()) < 2**15
    return found.to(torch.int16 if is_small else torch.int32)


def decoder_routers(model: nn.Module, asked_by: str) -> list[TopKRouter]:
    """The routers of the decoder's layers on this rank, in their order.

    Args:
        model: Also inside of wrappers.
        asked_by: What an error begins with.

    Raises:
        ValueError: If one chooses experts in a way that cannot be seen or replaced.
    """
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    routers = [one for one in model.decoder.modules() if isinstance(one, TopKRouter)]
    ROUTER_REPLAY.require({ROUTER: used_by(TopKRouter)})
    for router in routers:
        kinds = router.routing_type
        kinds = set(kinds if isinstance(kinds, list) else [kinds])
        if router.config.moe_router_fusion:
            raise ValueError(
                f"{asked_by} needs moe_router_fusion False, got True: TransformerEngine's router "
                "does not say what it chose"
            )
        if kinds & OWN_CHOICE:
            raise ValueError(
                f"{asked_by} needs a moe_router_load_balancing_type that chooses by scores, got "
                f"{router.routing_type!r}"
            )
    return routers


def replace_choice(router: TopKRouter, choice: Choice) -> Callable[[], None]:
    """Have a router call ``choice`` in place of its top-k; returns what undoes it."""
    former = REPLAYED_CHOICE.of(router)
    REPLAYED_CHOICE.replace(router, _InPlaceOfReplay(choice, former))
    return lambda: REPLAYED_CHOICE.replace(router, former)


class _InPlaceOfReplay:
    """What Megatron's router asks for its choice, if it has one: as Megatron's ``RouterReplay``.

    Args:
        choice: Is asked.
        former: What was asked before, which makes the router's own choice; None: its top-k does.

    Attributes:
        choice: As given.
    """

    def __init__(self, choice: Choice, former: Any) -> None:
        self.choice, self._former = choice, former

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores of the chosen experts and their numbers, both [T, K]."""
        assert default_compute_topk is not None
        if self._former is None:
            own = functools.partial(default_compute_topk, scores, topk, num_groups, group_topk)
        else:
            own = functools.partial(
                self._former.get_replay_topk,
                *(scores, topk, num_groups, group_topk, default_compute_topk),
            )
        return self.choice(scores, topk, own)


class _Replayed:
    """The choices of one router, which it stays with: a recomputation may come at any time.

    Attributes:
        column: Of the router's layer among all with experts.
        forwards: Of :func:`replay_routed_experts`; None outside of its block.
    """

    def __init__(self, router: TopKRouter) -> None:
        self._router = router
        self.column = 0
        self.forwards: Iterator[Tensor | None] | None = None

    @classmethod
    def of(cls, router: TopKRouter) -> _Replayed:
        """That of a router, which gets it if it has none."""
        former = REPLAYED_CHOICE.of(router)
        found = getattr(former, "choice", None)
        if not isinstance(found, cls):
            found = cls(router)
            replace_choice(router, found)
        return found

    def __call__(
        self, scores: Tensor, topk: int, default: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        values, own = default()
        given = self._of_forward()
        if given is None:
            return values, own
        given = tokens_of_rank(self._router.config, given)[:, :, self.column]
        given = given.to(scores.device).flatten(0, 1).long()
        if given.shape != own.shape:
            raise ValueError(
                f"routed experts of a forward must be those of its {len(own)} tokens on this rank, "
                f"got {len(given)}"
            )
        chosen = torch.where(given < 0, own, given)
        return scores.gather(1, chosen), chosen

    def _of_forward(self) -> Tensor | None:
        """What the forward that runs, or is recomputed, was given."""
        scope = current_scope()
        if scope is not None and self in scope.seen:
            return scope.kept[self]
        try:
            given = None if self.forwards is None else next(self.forwards)
        except StopIteration:
            raise ValueError(
                "there are no routed experts left to replay: the model was called more often than "
                "there are forwards"
            ) from None
        if scope is not None:
            scope.seen.add(self)
            scope.kept[self] = given
        return given


def expert_layers(config: Any) -> list[int]:
    """Numbers, from 1, of the layers of a ``GPTModel`` that have experts."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [i % pattern == 0 for i in range(config.num_layers)]
    return [i + 1 for i, has_experts in enumerate(pattern) if has_experts]


def _columns(routers: Sequence[TopKRouter]) -> list[int]:
    """Places of routers' layers among all layers with experts, over all pipeline stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 or not routers:
        return list(range(len(routers)))
    places = {number: place for place, number in enumerate(expert_layers(routers[0].config))}
    return [places[router.layer_number] for router in routers]
