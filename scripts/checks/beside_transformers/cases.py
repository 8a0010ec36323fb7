"""Small models of the released architectures, and the ways in which ``LLM`` runs them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

# Experts, groups of experts, groups that a token may take, experts of a token.
ODD_SHAPES = (
    (8, 2, 1, 2),
    (8, 4, 2, 4),
    (8, 4, 3, 4),
    (8, 4, 4, 4),
    (4, 2, 2, 2),
    (4, 2, 2, 3),
    (4, 2, 2, 4),
    (6, 2, 1, 3),
    (48, 3, 2, 8),
    (256, 8, 4, 8),
)
_NAMES = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")


@dataclass(frozen=True)
class Model:
    """A model of transformers with random weights in bfloat16.

    Attributes:
        family: As tests/conversion/models.py names it.
        fields: Of the config, that differ from tests/support/wide_models.py.
        q_lora: Whether the query is compressed.
        experts: Whether there are any.
        every_way: Whether it is run with all combinations of TransformerEngine, CUDA graphs and
            the prefix cache, and in fp32; else with all of them, and with none.
    """

    family: str
    fields: dict[str, object] = field(default_factory=dict)
    q_lora: bool = True
    experts: bool = True
    every_way: bool = True

    def write(self, folder: Path) -> Path:
        """Make it, and save it as transformers does."""
        from tests.conversion.models import Architecture
        from tests.support.wide_models import wide_folder

        architecture = Architecture(self.family, self.q_lora, self.experts, "yarn")
        return wide_folder(folder, architecture, **self.fields)


_V3 = dict(zip(_NAMES, (32, 8, 4, 8)))
_INDEXER = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 64}
MODELS = {
    "dense": Model("v3", experts=False),
    "V2": Model(
        "v2",
        {
            **dict(zip(_NAMES, (32, 8, 3, 6))),
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
        },
    ),
    "V2-Lite": Model(
        "v2",
        {"n_routed_experts": 16, "num_experts_per_tok": 6, "routed_scaling_factor": 1.0},
        q_lora=False,
    ),
    "V3": Model("v3", _V3),
    "V3.2": Model("v32", {**_V3, **_INDEXER}),
    **{
        "V3, {} experts in {}, {} taken, {} of a token".format(*shape): Model(
            "v3", {**dict(zip(_NAMES, shape)), "num_hidden_layers": 2}, every_way=False
        )
        for shape in ODD_SHAPES
    },
}


@dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
        model: Name in :data:`MODELS`.
        dtype: ``"bfloat16"`` or ``"float32"``.
        transformer_engine: Whether TransformerEngine is there, which ``LLM`` then uses.
        graphs: Whether steps are CUDA graphs.
        prefix_cache: Whether equal beginnings are computed once.
    """

    model: str
    dtype: str
    transformer_engine: bool
    graphs: bool
    prefix_cache: bool

    @property
    def name(self) -> str:
        """As ``--case`` takes it."""
        return "/".join([self.model, self.dtype, *(way for way in WAYS if getattr(self, way))])

    @classmethod
    def of_name(cls, name: str) -> Case:
        """The inverse of :attr:`name`.

        Raises:
            ValueError: If there is no such case.
        """
        model, _, ways = name.partition("/")
        dtype, *options = ways.split("/")
        case = cls(model, dtype, *(way in options for way in WAYS))
        if model not in MODELS or dtype not in ("bfloat16", "float32") or case.name != name:
            raise ValueError(
                f"--case must be MODEL/DTYPE with any of {', '.join(f'/{way}' for way in WAYS)}, "
                f"got {name!r}; models: {'; '.join(MODELS)}"
            )
        return case


WAYS = ("transformer_engine", "graphs", "prefix_cache")


def cases_of(name: str, *, gpu: bool, transformer_engine: bool) -> list[Case]:
    """What is measured of a model, on a machine with or without a GPU and TransformerEngine."""
    either = (False, True)
    engines = either if gpu and transformer_engine else (False,)
    ways = list(itertools.product(engines, either if gpu else (False,), either))
    if not MODELS[name].every_way:
        ways = [ways[0], ways[-1]]
    found = [Case(name, "bfloat16", *way) for way in ways]
    if MODELS[name].every_way:
        found.append(Case(name, "float32", engines[-1], False, False))
    return found
