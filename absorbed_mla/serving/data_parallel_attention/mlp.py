"""MLPs and experts that are sharded over data-parallel attention ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from absorbed_mla.moe_layer import NormedMoE
from absorbed_mla.serving.data_parallel_attention.dispatcher import LocalDispatcher
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.experts.dispatcher import GroupedDispatcher
from absorbed_mla.serving.experts.experts import GroupedExperts


class ShardedMLP(MLP):
    """Megatron's MLP: gathers the tokens of all ranks, and gives each the sum for its own.

    Args:
        pg_collection: Process groups of Megatron, for all but the weights.
        host: The other arguments of Megatron's ``as_mlp_submodule``.
    """

    exchange: TokenExchange

    @classmethod
    def build(
        cls, exchange: TokenExchange, *, pg_collection: ProcessGroupCollection, **host: Any
    ) -> MLP:
        """See the class. Megatron passes a layer's MLP more than its constructor takes."""
        groups = with_groups(pg_collection, tp=exchange.group)
        mlp = cls.as_mlp_submodule(pg_collection=groups, **host)
        assert isinstance(mlp, ShardedMLP)
        mlp.exchange = exchange
        leave_partial(mlp)
        return mlp

    def forward(self, hidden_states: Tensor, **host: Any) -> tuple[Tensor, Tensor | None]:
        """Of this rank's tokens, [S, B, H]; the second output is Megatron's bias, or None."""
        return _computed_together(self.exchange, super().forward, hidden_states, **host)


class ShardedMoE(NormedMoE):
    """Megatron's mixture of experts: a rank runs its experts, or its part of each, for all tokens.

    A rank sends its tokens to all others and gets a sum back; which experts it has, and whether
    whole or in parts, are Megatron's expert groups, whose ranks are those of ``exchange``. All
    ranks compute the routing of all tokens.

    Args:
        host: The other arguments of Megatron's layer.

    Raises:
        ValueError: If the config overlaps the shared experts with the routed ones' exchange, or
            computes them in another class than Megatron's ``SharedExpertMLP``.
    """

    def __init__(
        self,
        config: Any,
        *,
        exchange: TokenExchange,
        pg_collection: ProcessGroupCollection,
        **host: Any,
    ) -> None:
        if config.moe_shared_expert_overlap:
            raise ValueError(
                "moe_shared_expert_overlap must be False with data-parallel attention, got True: "
                "shared and routed experts get their tokens together"
            )
        alone = pg_collection.tp
        assert alone.size() == 1
        super().__init__(
            config, pg_collection=with_groups(pg_collection, tp=exchange.group), **host
        )
        self.exchange = exchange
        grouped = isinstance(self.experts, GroupedExperts)
        # It finds this rank's experts among all tokens, which are here already.
        self.token_dispatcher = (GroupedDispatcher if grouped else LocalDispatcher)(
            self.num_local_experts,
            self.local_expert_indices,
            config=config,
            pg_collection=with_groups(
                pg_collection, tp=alone, ep=alone, expt_tp=alone, tp_ep=alone
            ),
        )
        if self.shared_experts is not None:
            if type(self.shared_experts) is not SharedExpertMLP:
                raise ValueError(
                    "use_grouped_gemm_for_shared_expert must be False with data-parallel "
                    f"attention, got {type(self.shared_experts).__name__}"
                )
            leave_partial(self.shared_experts)

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """Of this rank's tokens, [S, B, H]; the second output is None."""
        assert intermediate_tensors is None and padding_mask is None, "for training"
        out, bias = _computed_together(self.exchange, super().forward, hidden_states)
        return super().normed(out), bias

    def normed(self, output: Tensor) -> Tensor:
        """A rank's part of the sum as it is: :meth:`forward` norms the whole."""
        return output


def leave_partial(mlp: MLP) -> None:
    """Have an MLP return what its part of the weights gives, for somebody else to sum up.

    As Megatron does with shared experts that it overlaps.
    """
    last = mlp.linear_fc2
    if hasattr(last, "parallel_mode"):
        last.parallel_mode = None
    else:
        last.explicit_expert_comm = True


def _computed_together(
    exchange: TokenExchange, forward: Any, hidden_states: Tensor, **host: Any
) -> tuple[Tensor, Tensor | None]:
    tokens = exchange.gather(hidden_states.flatten(0, 1), exchange.tokens)
    out, bias = forward(tokens.unsqueeze(1), **host)
    return exchange.sum_own(out.squeeze(1), exchange.tokens).view_as(hidden_states), bias


def with_groups(
    groups: ProcessGroupCollection, **changes: dist.ProcessGroup
) -> ProcessGroupCollection:
    """Process groups, some of them others."""
    groups = copy.copy(groups)
    for name, group in changes.items():
        setattr(groups, name, group)
    return groups
