"""The lightning indexer of DeepSeek Sparse Attention: its parameters and projections."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.dsa.hadamard import hadamard_transform
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.norm import mark_parameter
from absorbed_mla.rope import apply_rope


@dataclass
class IndexerSubmodules:
    """The layers of an :class:`Indexer`, named as in Megatron's.

    Each linear layer is whole on every tensor-parallel rank; ``k_norm`` is a LayerNorm.
    """

    linear_wq_b: ModuleSpec | type
    linear_wk: ModuleSpec | type
    k_norm: ModuleSpec | type
    linear_weights_proj: ModuleSpec | type


class Indexer(nn.Module):
    """Makes index queries, keys and head weights of the tokens it is given.

    It learns from its own loss alone: its input is detached, and its output has a gradient only
    there. It computes row by row and exchanges nothing: tensor- and context-parallel ranks give it
    all their tokens or some of them.

    Every tensor-parallel rank has all parameters, and Megatron's ``finalize_model_grads`` averages
    their gradients over those ranks, as for its own indexer.

    Args:
        config: Megatron's MLA config.
        submodules: The layers' specs.
        pg_collection: Process groups; ``tp`` is used.
        name: Name of the module instance, or None; the names of the layers begin with it.

    Raises:
        ValueError: If a ``dsa_indexer_*`` field is invalid.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: IndexerSubmodules,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.dsa = dsa = DSAConfig.from_config(config)
        self.rope_dim = config.qk_pos_emb_head_dim

        def linear(child: str, inputs: int, outputs: int) -> nn.Module:
            return build_module(
                getattr(submodules, child),
                inputs,
                outputs,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
                parallel_mode="duplicated",
                tp_group=pg_collection.tp,
                name=f"{name}.{child}" if name is not None else None,
            )

        query_inputs = config.q_lora_rank or config.hidden_size
        self.linear_wq_b = linear("linear_wq_b", query_inputs, dsa.num_heads * dsa.head_dim)
        self.linear_wk = linear("linear_wk", config.hidden_size, dsa.head_dim)
        norm_config = copy.copy(config)
        norm_config.normalization = "LayerNorm"
        self.k_norm = build_module(
            submodules.k_norm, config=norm_config, hidden_size=dsa.head_dim, eps=dsa.k_norm_eps
        )
        self.linear_weights_proj = linear("linear_weights_proj", config.hidden_size, dsa.num_heads)
        self._head_weights_dtype: torch.dtype | None = None
        for parameter in self.parameters():
            # Not summed over tensor-parallel ranks, also under sequence parallelism.
            mark_parameter(
                parameter, average_gradients_across_tp_domain=True, sequence_parallel=False
            )

    def hold_head_weights(self, dtype: torch.dtype) -> None:
        """Hold and apply ``linear_weights_proj`` in a dtype of its own, wider than the others'."""
        self.linear_weights_proj.to(dtype)
        self._head_weights_dtype = dtype

    def forward(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> IndexVectors:
        """Index vectors of every token.

        Args:
            x: Hidden states, [S, B, hidden_size].
            q_latent: The normalised latent of the query, [S, B, q_lora_rank]; without
                ``q_lora_rank``, ``x``.
            cos: fp32 [S, R / 2], row i for the position of token i.
            sin: Likewise.

        Returns:
            With S_q = S_k = S; query and key in the dtype of the parameters.
        """
        x, q_latent = x.detach(), q_latent.detach()
        query, _ = self.linear_wq_b(q_latent)
        query = query.unflatten(-1, (self.dsa.num_heads, self.dsa.head_dim))
        weights = self._head_weights(x)
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        weights = weights * (self.dsa.num_heads * self.dsa.head_dim) ** -0.5
        return IndexVectors(self._rotate(query, cos, sin), self.key(x, cos, sin), weights)

    def key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The index key of every token alone, [S, B, Di]; arguments as of :meth:`forward`."""
        key, _ = self.linear_wk(x.detach())
        return self._rotate(self.k_norm(key).unsqueeze(2), cos, sin).squeeze(2)

    def _head_weights(self, x: Tensor) -> Tensor:
        if self._head_weights_dtype is None:
            return self.linear_weights_proj(x)[0]
        # Not by the layer: TransformerEngine's multiplies fp32 in TF32.
        return F.linear(x.to(self._head_weights_dtype), self.linear_weights_proj.weight)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first channels of ``x`` [S, B, heads, Di], then transform all of them."""
        rotated, rest = x.split([self.rope_dim, x.shape[-1] - self.rope_dim], dim=-1)
        if not self.dsa.rope_interleaved:
            # Channel i beside channel i + R / 2, as apply_rope reads them; it writes halves.
            rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        x = torch.cat((apply_rope(rotated, cos, sin), rest), dim=-1)
        return hadamard_transform(x) if self.dsa.rotate_activation else x
