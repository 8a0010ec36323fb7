"""TransformerEngine's linear layer held whole by every rank. Import only where TE is installed."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import TELinear


class TEDuplicatedLinear(TELinear):
    """``TELinear`` in duplicated mode, with the constructor of the other linear layers."""

    def __init__(
        self,
        input_size,
        output_size,
        *,
        tp_group=None,
        gather_output=False,
        parallel_mode="duplicated",
        skip_weight_param_allocation=False,
        **kwargs,
    ) -> None:
        assert parallel_mode == "duplicated" and not skip_weight_param_allocation
        super().__init__(
            input_size,
            output_size,
            parallel_mode=parallel_mode,
            skip_weight_param_allocation=skip_weight_param_allocation,
            tp_group=None,
            **kwargs,
        )
