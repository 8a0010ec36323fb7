"""Config of models whose layers have latent attention of different sizes, such as dots3."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from megatron.core.transformer.transformer_config import MLATransformerConfig

# What may differ between layers.
LAYER_FIELDS = (
    *("num_attention_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("rope_type", "rotary_base", "rotary_scaling_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
)


@dataclass
class HeterogeneousMLAConfig(MLATransformerConfig):
    """Megatron's MLA config of a model in which some layers have an attention of other sizes.

    Megatron's ``TransformerBlock`` asks it for the config of each layer, as it does its own
    heterogeneous config. Layers of multi-token prediction have the config's own sizes.

    Attributes:
        per_layer_config: Number of a layer, from 1 over all pipeline stages -> the fields that
            differ there, of ``LAYER_FIELDS``.

    Raises:
        ValueError: On construction, naming the layer or field and what is accepted.
    """

    per_layer_config: dict[int, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heterogeneous_block_specs = True
        layers = range(1, self.num_layers + 1)
        for number, fields in self.per_layer_config.items():
            if number not in layers:
                raise ValueError(
                    f"per_layer_config must have numbers of layers, 1 to {self.num_layers}, got "
                    f"{number!r}"
                )
            unknown = [name for name in fields if name not in LAYER_FIELDS]
            if unknown:
                raise ValueError(
                    f"per_layer_config[{number}] must have fields of {', '.join(LAYER_FIELDS)}; "
                    f"got {', '.join(unknown)}"
                )
        if self.per_layer_config and self.cuda_graph_impl != "none":
            raise ValueError(
                "per_layer_config needs cuda_graph_impl='none', got "
                f"{self.cuda_graph_impl!r}: Megatron switches graphs in one config for all layers"
            )

    def get_config_for_layer(self, layer_number: int) -> MLATransformerConfig:
        """The config of a layer, numbered from 1: this one, or a copy with its own fields."""
        fields = self.per_layer_config.get(layer_number)
        if not fields:
            return self
        config = copy.copy(self)
        for name, value in fields.items():
            setattr(config, name, value)
        # MLA has no query groups; Megatron has made one of each head of the others.
        config.num_query_groups = config.num_attention_heads
        return config
