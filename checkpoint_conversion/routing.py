"""How tokens are given to experts, and where Megatron can only do it differently."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint_conversion.config_fields import Fields

MOST_EXPERTS = 2**16
# Per kind of model: scoring_func, and topk_method with its default first.
_SCORING = {
    "deepseek_v2": "softmax",
    "deepseek_v3": "sigmoid",
    "kimi_k2": "sigmoid",
    "glm4_moe_lite": "sigmoid",
    "mistral4": "softmax",
}
_METHODS = {
    "deepseek_v2": ("greedy", "group_limited_greedy"),
    "deepseek_v3": ("noaux_tc",),
    "kimi_k2": ("noaux_tc",),
    "glm4_moe_lite": ("noaux_tc",),
    "mistral4": ("greedy",),
}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Names are those of config.json.

    Attributes:
        n_group: Groups that experts are in; 1 if they are not limited to some of the groups.
        topk_group: Groups that a token's experts may come from.
    """

    scoring_func: str
    topk_method: str
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    @property
    def score_correction(self) -> bool:
        """Whether there is an ``e_score_correction_bias``."""
        return self.topk_method == "noaux_tc"


def read_routing(fields: Fields, model_type: str, num_experts: int) -> Routing:
    """Read the routing of a model with MoE layers from the fields of config.json."""
    scoring, methods = _SCORING[model_type], _METHODS[model_type]
    method = fields.choice("topk_method", methods, methods[0])
    groups = limit = 1
    if method != "greedy":
        groups = fields.integer_or_null("n_group", MOST_EXPERTS) or 1
        limit = fields.integer_or_null("topk_group", MOST_EXPERTS) or 1
    topk = fields.integer("num_experts_per_tok", MOST_EXPERTS)
    if not fields.problems:
        _check_sizes(fields, topk, groups, limit, num_experts)
    unlimited = limit == groups
    return Routing(
        scoring_func=fields.choice("scoring_func", (scoring,), scoring),
        topk_method=method,
        num_experts_per_tok=topk,
        n_group=1 if unlimited else groups,
        topk_group=1 if unlimited else limit,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=model_type != "deepseek_v2"),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
    )


def _check_sizes(fields: Fields, topk: int, groups: int, limit: int, num_experts: int) -> None:
    if topk > num_experts:
        fields.wrong("num_experts_per_tok", f"at most n_routed_experts {num_experts}")
    if num_experts % groups:
        fields.wrong("n_group", f"a divisor of n_routed_experts {num_experts}")
    if limit > groups:
        fields.wrong("topk_group", f"at most n_group {groups}")


def routing_differences(routing: Routing, model_type: str) -> list[str]:
    """What Megatron's router would do differently with the same weights, one line each."""
    topk, groups = routing.num_experts_per_tok, routing.topk_group
    notes = []
    if routing.n_group > 1:
        best = 1 if routing.topk_method == "group_limited_greedy" else 2
        # Megatron derives how many experts decide about a group.
        if topk // groups != best:
            notes.append(
                f"{routing.topk_method} chooses {groups} groups by the best {best} of each group's "
                f"experts; Megatron by the best {topk // groups} (num_experts_per_tok {topk} // "
                f"topk_group {groups})"
            )
    if routing.scoring_func == "sigmoid" and routing.norm_topk_prob == (topk == 1):
        does, not_ = ("does", "does not") if topk > 1 else ("does not", "does")
        notes.append(
            f"norm_topk_prob is {str(routing.norm_topk_prob).lower()}: the model {not_} normalise "
            f"the scores of a token's experts, Megatron {does} with num_experts_per_tok {topk}"
        )
    if model_type == "deepseek_v2" and routing.norm_topk_prob:
        notes.append(
            "norm_topk_prob is true: Megatron normalises the scores of a token's experts "
            "(moe_router_pre_softmax false), transformers ignores the field in DeepSeek-V2"
        )
    return notes
