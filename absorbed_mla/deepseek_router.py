"""Megatron's MoE router, choosing experts as DeepSeek-V2, V3 and their relatives do.

Megatron derives from ``moe_router_topk`` how many experts rank a group and whether the chosen
scores are normalised. Models say both in their config.json: DeepSeek-V2 (arXiv:2405.04434) ranks
groups by their best expert, DeepSeek-V3 (arXiv:2412.19437) by the sum of the best two, and
``norm_topk_prob`` may be true or false. :class:`DeepSeekRouter` takes the two as options; what it
does besides is Megatron's.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from absorbed_mla.megatron_names import CHOICE_OF_EXPERTS, CHOOSE_EXPERTS, ROUTING, used_by
from absorbed_mla.options import ROUTER_OPTIONS, AbsorbedMLAOptions
from absorbed_mla.packed_router import OWN_CHOICE, PackedRouter


class _ModelsChoice(TopKRouter):
    """The part of :class:`DeepSeekRouter` that stands between ``PackedRouter`` and Megatron's."""

    def routing(
        self, logits: Tensor, padding_mask: Tensor | None = None, **host: Any
    ) -> tuple[Tensor, Tensor]:
        return _routing_with(self.options)(self, logits, padding_mask, **host)


class DeepSeekRouter(PackedRouter, _ModelsChoice):
    """Megatron's router with a given ranking of groups and normalisation.

    Balancing losses, z-loss, expert bias, token dropping and router replay are Megatron's; padding
    of packs is handled as :class:`~absorbed_mla.packed_router.PackedRouter` does.

    Args:
        config: Of the model.
        options: ``moe_router_group_score_topk`` and ``moe_router_norm_topk_prob`` are read.
        host: The other arguments of Megatron's router.

    Raises:
        ValueError: If the config chooses experts in a way that does not go with these options.
    """

    # Megatron-FSDP asks for it: it knows Megatron's routers by the name of their class.
    tensor_model_parallel = False

    def __init__(self, config: Any, *, options: AbsorbedMLAOptions, **host: Any) -> None:
        require_choice(config, options)
        _routing_with(options)
        super().__init__(config, **host)
        self.options = options


def require_choice(config: Any, options: AbsorbedMLAOptions) -> None:
    """Check that a config's router can choose experts as the options say.

    Args:
        config: Of the model.
        options: As of :class:`DeepSeekRouter`.

    Raises:
        ValueError: Naming the field of the config that does not fit.
    """
    if not options.chooses_experts:
        return
    name = " and ".join(ROUTER_OPTIONS)
    if config.moe_router_fusion:
        raise ValueError(
            f"moe_router_fusion must be False with {name}, got True: the fused router of "
            "TransformerEngine computes Megatron's choice only"
        )
    kinds = config.moe_router_load_balancing_type
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind in OWN_CHOICE:
            raise ValueError(
                f"moe_router_load_balancing_type must not be {kind!r} with {name}: it chooses "
                "experts in its own way"
            )
    softmax = config.moe_router_score_function == "softmax"
    normalised = options.moe_router_norm_topk_prob
    if normalised is not None and softmax and not config.moe_router_pre_softmax:
        raise ValueError(
            "moe_router_norm_topk_prob with softmax scores needs moe_router_pre_softmax=True, got "
            "False, which is the softmax of the chosen experts alone"
        )
    if options.moe_router_group_score_topk is not None:
        _require_groups(config, options.moe_router_group_score_topk)


def _require_groups(config: Any, group_score_topk: int) -> None:
    groups = config.moe_router_num_groups
    if not (groups and config.moe_router_group_topk):
        raise ValueError(
            f"moe_router_group_score_topk={group_score_topk} needs moe_router_num_groups and "
            f"moe_router_group_topk, got {groups} and {config.moe_router_group_topk}"
        )
    size = config.num_moe_experts // groups
    if group_score_topk > size:
        raise ValueError(
            f"moe_router_group_score_topk must be at most the {size} experts of a group, got "
            f"{group_score_topk}"
        )
    reachable = size * config.moe_router_group_topk
    if config.moe_router_topk > reachable:
        raise ValueError(
            f"moe_router_topk must be at most the {reachable} experts of "
            f"moe_router_group_topk={config.moe_router_group_topk} groups, got "
            f"{config.moe_router_topk}"
        )


def _routing_with(options: AbsorbedMLAOptions) -> Callable:
    """Megatron's ``TopKRouter.routing`` that calls our choice instead of Megatron's.

    It is the same code with a copy of its globals, so that Megatron's own routers in the process,
    perhaps in other threads, keep theirs.

    Raises:
        ValueError: If there is no such call.
    """
    host = TopKRouter.routing
    CHOICE_OF_EXPERTS.require({ROUTING: used_by(host)})
    choice = functools.partial(
        topk_routing,
        group_score_topk=options.moe_router_group_score_topk,
        norm_topk_prob=options.moe_router_norm_topk_prob,
    )
    names = {**host.__globals__, CHOOSE_EXPERTS.name: choice}
    routing = types.FunctionType(
        host.__code__, names, host.__name__, host.__defaults__, host.__closure__
    )
    routing.__kwdefaults__ = host.__kwdefaults__
    return routing


def topk_routing(
    logits: Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
    dense_output: bool = False,
    group_score_topk: int | None = None,
    norm_topk_prob: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Megatron's ``topk_routing_with_score_function`` with two more options.

    Scores are in fp32, as Megatron's are. Without the options it returns Megatron's bits.

    Args:
        logits: [T, E].
        topk: K, the experts of a token.
        use_pre_softmax: Whether softmax scores are those of all experts, not of the chosen ones.
        num_groups: Of experts, equally many in each.
        group_topk: Groups that a token's experts may come from; None: all.
        scaling_factor: What the chosen scores are multiplied by; None: 1.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        expert_bias: [E], added to scores for the choice alone; not with softmax.
        fused: False.
        router_replay: Megatron's record of choices, or None.
        dense_output: Whether to return the chosen experts only.
        group_score_topk: ``moe_router_group_score_topk`` of ``AbsorbedMLAOptions``.
        norm_topk_prob: Its ``moe_router_norm_topk_prob``.

    Returns:
        Probabilities and the bool routing map, both [T, E]; or the probabilities and numbers of the
        chosen experts, both [T, K]. Probabilities have the dtype of ``logits``.
    """
    assert not fused, "refused at construction"
    after = score_function == "softmax" and not use_pre_softmax
    scores = logits if after else _SCORES[score_function](logits)
    ranking = scores if expert_bias is None else scores + expert_bias.float()

    def best(scores, topk, num_groups=None, group_topk=None) -> tuple[Tensor, Tensor]:
        """Scores of the chosen experts and their numbers, as Megatron's replay asks for them."""
        if group_topk:
            of_group = group_score_topk or topk // group_topk
            scores = _of_best_groups(scores, num_groups, group_topk, of_group)
            return scores.topk(topk, dim=-1)
        # In Megatron's order.
        return scores.topk(topk, dim=-1, sorted=torch.is_grad_enabled())

    if router_replay is None:
        _, chosen = best(ranking, topk, num_groups, group_topk)
    else:
        _, chosen = router_replay.get_replay_topk(ranking, topk, num_groups, group_topk, best)
    probs = scores.gather(1, chosen)
    if after:
        probs = probs.softmax(-1, dtype=torch.float32)
    elif normalises(score_function, topk, norm_topk_prob):
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    if scaling_factor:
        probs = probs * scaling_factor
    probs = probs.type_as(logits)
    if dense_output:
        return probs, chosen
    chosen_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return torch.zeros_like(logits).scatter(1, chosen, probs), chosen_map


def normalises(score_function: str, topk: int, norm_topk_prob: bool | None) -> bool:
    """Whether scores of all experts are divided by the sum of the chosen ones.

    Args:
        score_function: ``moe_router_score_function``.
        topk: Experts of a token.
        norm_topk_prob: The option; None takes Megatron's rule.
    """
    if norm_topk_prob is not None:
        return norm_topk_prob
    return score_function != "softmax" and topk > 1


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1, dtype=torch.float32),
    "sigmoid": lambda logits: logits.float().sigmoid(),
    "sqrtsoftplus": lambda logits: F.softplus(logits.float()).sqrt(),
}


def _of_best_groups(scores: Tensor, groups: int, group_topk: int, of_group: int) -> Tensor:
    """Scores [T, E], -inf outside of each token's ``group_topk`` best groups."""
    by_group = scores.unflatten(-1, (groups, -1))
    best = by_group.topk(of_group).values.sum(-1).topk(group_topk).indices
    others = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return by_group.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)
