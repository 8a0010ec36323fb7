"""How a model's router assigns tokens to experts: config.json, Megatron's arguments, and back.

Megatron derives from other arguments how many experts rank a group and whether chosen scores are
normalised. Where a model does otherwise, two arguments of ours say so, which have the names of
``AbsorbedMLAOptions``: ``moe_router_group_score_topk`` and ``moe_router_norm_topk_prob``. They are
None where Megatron's router computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint_conversion.config_fields import MOST_EXPERTS, Fields
from checkpoint_conversion.model_type import ModelType, find_model_type, model_fields

GROUP_SCORE = "moe_router_group_score_topk"
NORMALISED = "moe_router_norm_topk_prob"
ROUTER_OPTIONS = (GROUP_SCORE, NORMALISED)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router assigns tokens to experts; fields are named as in config.json.

    Attributes:
        n_group: Number of groups of experts; 1 if selection is not limited to some groups.
        topk_group: Number of groups that a token's experts may come from.
        norm_topk_prob: Whether the scores of a token's experts are divided by their sum.
        group_score_topk: Experts of a group whose scores' sum ranks it.
    """

    scoring_func: str
    topk_method: str
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    group_score_topk: int


def read_routing(fields: Fields, model: ModelType, num_experts: int) -> Routing:
    """Read the routing of a model with MoE layers from the fields of config.json.

    A config.json that was made of Megatron's arguments may also have our two.
    """
    method = fields.choice("topk_method", model.topk_methods, model.topk_methods[0])
    groups = limit = 1
    if method != "greedy":
        groups = fields.integer_or_null("n_group", MOST_EXPERTS) or 1
        limit = fields.integer_or_null("topk_group", MOST_EXPERTS) or 1
    topk = fields.integer("num_experts_per_tok", MOST_EXPERTS)
    best = fields.integer(GROUP_SCORE, MOST_EXPERTS, default=_best(method))
    # With negative infinity for the experts of other groups, all of them are still all.
    unlimited = limit == groups or (method == "noaux_tc" and topk == num_experts)
    if not fields.problems:
        _check_sizes(fields, topk, groups, limit, num_experts)
    if not fields.problems and not unlimited:
        _check_groups(fields, topk, limit, num_experts // groups, best)
    normalised = fields.boolean("norm_topk_prob", default=True)
    if model.ignores_norm_topk_prob:
        normalised = False
    return Routing(
        scoring_func=fields.choice("scoring_func", (model.scoring_func,), model.scoring_func),
        topk_method=method,
        num_experts_per_tok=topk,
        n_group=1 if unlimited else groups,
        topk_group=1 if unlimited else limit,
        norm_topk_prob=fields.boolean(NORMALISED, default=normalised),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
        group_score_topk=best,
    )


def _best(method: str) -> int:
    """Experts of a group whose scores' sum ranks it: DeepSeek-V3's two, or DeepSeek-V2's one."""
    return 2 if method == "noaux_tc" else 1


def _check_sizes(fields: Fields, topk: int, groups: int, limit: int, num_experts: int) -> None:
    if topk > num_experts:
        fields.wrong("num_experts_per_tok", f"at most n_routed_experts {num_experts}")
    if num_experts % groups:
        fields.wrong("n_group", f"a divisor of n_routed_experts {num_experts}")
    if limit > groups:
        fields.wrong("topk_group", f"at most n_group {groups}")


def _check_groups(fields: Fields, topk: int, limit: int, size: int, best: int) -> None:
    """Record sizes with which transformers fails, or takes any experts of other groups."""
    if topk > limit * size:
        fields.wrong(
            "num_experts_per_tok", f"at most the {limit * size} experts of topk_group {limit}"
        )
    if best > size:
        fields.wrong(
            "n_group", f"a number with at least {best} experts in a group, whose scores rank it"
        )


def routing_args(routing: Routing) -> dict[str, object]:
    """Megatron's arguments of a router, and our two."""
    limited, topk = routing.n_group > 1, routing.num_experts_per_tok
    softmax = routing.scoring_func == "softmax"
    # The softmax of the chosen experts alone is the same as dividing by their sum. With groups it
    # is not, because Megatron ranks them by logits then.
    of_chosen = softmax and routing.norm_topk_prob and not limited
    own: dict[str, object] = dict.fromkeys(ROUTER_OPTIONS)
    if limited and routing.group_score_topk != topk // routing.topk_group:
        own[GROUP_SCORE] = routing.group_score_topk
    if not of_chosen and routing.norm_topk_prob != (not softmax and topk > 1):
        own[NORMALISED] = routing.norm_topk_prob
    return {
        "moe_router_topk": topk,
        "moe_router_score_function": routing.scoring_func,
        "moe_router_pre_softmax": not of_chosen,
        "moe_router_enable_expert_bias": routing.topk_method == "noaux_tc",
        "moe_router_topk_scaling_factor": routing.routed_scaling_factor,
        "moe_router_num_groups": routing.n_group if limited else None,
        "moe_router_group_topk": routing.topk_group if limited else None,
        "moe_router_dtype": "fp32",
        **own,
    }


def options_of(config: Mapping[str, object]) -> dict[str, object]:
    """Our arguments of a model that Megatron's router does not route for, by its config.json.

    Args:
        config: Of a model type that can be converted; nothing else needs them.

    Returns:
        Those that are not None.

    Raises:
        CheckpointError: If its routing cannot be computed.
    """
    model = find_model_type(config.get("model_type"))
    if not isinstance(model, ModelType):
        return {}
    fields = model_fields(model, config)
    experts = fields.raw("n_routed_experts")
    if not isinstance(experts, int):
        return {}
    own = routing_args(read_routing(fields, model, experts))
    fields.raise_problems("config.json describes a routing that cannot be computed:")
    return {name: own[name] for name in ROUTER_OPTIONS if own[name] is not None}


def read_routing_args(fields: Fields) -> dict[str, object]:
    """Fields of config.json from Megatron's arguments, for DeepSeek-V2 (softmax) or V3 (sigmoid).

    Where those models route otherwise, our two arguments are among them.

    Args:
        fields: Of the arguments; what no model has is recorded as a problem.
    """
    scores = fields.choice("moe_router_score_function", ("softmax", "sigmoid"), "softmax")
    softmax = scores == "softmax"
    bias = fields.boolean("moe_router_enable_expert_bias", default=False)
    if bias == softmax:
        fields.wrong("moe_router_enable_expert_bias", f"{not bias} with {scores} scores")
    topk = fields.integer("moe_router_topk", MOST_EXPERTS)
    limited = fields.given("moe_router_group_topk")
    method = ("group_limited_greedy" if limited else "greedy") if softmax else "noaux_tc"
    normalised = _read_normalised(fields, softmax, limited, topk)
    found: dict[str, object] = {
        "scoring_func": scores,
        "topk_method": method,
        "num_experts_per_tok": topk,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": normalised,
        "routed_scaling_factor": fields.number(
            "moe_router_topk_scaling_factor", 1e-6, 1e6, default=1.0
        ),
    }
    if limited:
        limit = fields.integer("moe_router_group_topk", MOST_EXPERTS)
        found["n_group"] = fields.integer("moe_router_num_groups", MOST_EXPERTS)
        found["topk_group"] = limit
        best = fields.integer(GROUP_SCORE, MOST_EXPERTS, default=topk // limit)
        if not best:
            fields.wrong("moe_router_topk", f"at least moe_router_group_topk {limit}")
        if limit < found["n_group"] and best != _best(method):
            found[GROUP_SCORE] = best
    if softmax and normalised:
        found[NORMALISED] = True
    return found


def _read_normalised(fields: Fields, softmax: bool, limited: bool, topk: int) -> bool:
    """Whether scores are divided by their sum."""
    pre_softmax = fields.boolean("moe_router_pre_softmax", default=False)
    of_chosen = softmax and not pre_softmax
    if of_chosen and limited:
        fields.wrong("moe_router_pre_softmax", "True with moe_router_group_topk")
    if of_chosen and fields.given(NORMALISED):
        fields.wrong("moe_router_pre_softmax", f"True with {NORMALISED}")
    return fields.boolean(NORMALISED, default=of_chosen or (not softmax and topk > 1))
