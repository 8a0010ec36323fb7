"""Comparison of MoE router settings: notes what differs in Megatron, raises where models differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from checkpoint_conversion.config_fields import MOST_EXPERTS, Fields, shown
from checkpoint_conversion.errors import raise_problems
from checkpoint_conversion.model import ModelConfig, read_function
from checkpoint_conversion.model_type import of_arguments
from checkpoint_conversion.rotary import LAYER_OPTIONS, read_rotary_args
from checkpoint_conversion.routing import (
    GROUP_SCORE,
    NORMALISED,
    ROUTER_OPTIONS,
    Routing,
    read_routing,
    read_routing_args,
    routing_args,
)


def routing_differences(routing: Routing, fields: Fields) -> list[str]:
    """Where the router of Megatron's arguments, ``fields``, differs from that of config.json."""
    found = Fields(read_routing_args(fields), [])
    model = of_arguments(str(found.raw("scoring_func")), interleaved=None)
    own = read_routing(found, model, fields.integer("num_experts", MOST_EXPERTS))
    ignored = {"topk_method"} | ({"group_score_topk"} if routing.n_group == 1 else set())
    names = [field.name for field in dataclasses.fields(Routing) if field.name not in ignored]
    differing = [
        f"{name} is {getattr(routing, name)}, in the model {getattr(own, name)}"
        for name in names
        if getattr(routing, name) != getattr(own, name)
    ]
    return [*fields.problems, *found.problems, *differing]


def refuse_another_function(config: ModelConfig, args: Mapping[str, object], summary: str) -> None:
    """Check that config.json describes the router, rotary options and scales that arguments do.

    Args:
        config: Of config.json.
        args: Megatron's; without ``moe_router_topk`` they say nothing of a router. Those of
            Megatron-LM's own training say nothing of absorbed MLA's rotary options.
        summary: First line of the error.

    Raises:
        CheckpointError: Listing what differs.
    """
    function, fields = read_function(config.fields, config), Fields(args, [], "args.")
    routing, found = function.routing, {**args, **vars(read_rotary_args(Fields(args, [])))}
    expected = {name: getattr(function.rotary, name) for name in LAYER_OPTIONS}
    differences = [
        f"{name} is {shown(value)}, in the model {shown(args[name])}"
        for name, value in (expected | function.mup).items()
        if name in args and found[name] != value
    ]
    experts = routing is not None and args.get("num_experts") == config.num_experts
    if experts and args.get("moe_router_topk") is not None:
        differences += routing_differences(routing, fields)
    raise_problems(summary, differences)


def routing_notes(routing: Routing) -> list[str]:
    """Where Megatron's own router differs with the same weights, one line each."""
    own, notes = routing_args(routing), []
    topk, groups = routing.num_experts_per_tok, routing.topk_group
    if own[GROUP_SCORE] is not None:
        notes.append(
            f"{routing.topk_method} chooses {groups} groups by the best {routing.group_score_topk} "
            f"of each group's experts; Megatron's router by the best {topk // groups} "
            f"(num_experts_per_tok {topk} // topk_group {groups}){_option(own, GROUP_SCORE)}"
        )
    if own[NORMALISED] is not None:
        does, not_ = ("does not", "does") if routing.norm_topk_prob else ("does", "does not")
        notes.append(
            f"norm_topk_prob is {str(routing.norm_topk_prob).lower()}: the model {not_} divide the "
            f"scores of a token's experts by their sum, Megatron's router {does} with "
            f"num_experts_per_tok {topk}{_option(own, NORMALISED)}"
        )
    return notes


def _option(own: dict[str, object], name: str) -> str:
    return f"; this package's layers need AbsorbedMLAOptions({name}={own[name]})"


def only_megatrons(config: ModelConfig) -> list[str]:
    """Why no Hugging Face model routes as a config.json made of Megatron's arguments says."""
    fields = config.fields
    return [
        f"{name} is {fields.raw(name)}: no model of Hugging Face's routes so"
        for name in ROUTER_OPTIONS
        if fields.given(name)
    ]
