"""TransformerEngine's linear layer held whole by every rank. Import only where TE is installed."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import TELinear


class TEDuplicatedLinear(TELinear):
    """``TELinear`` in duplicated mode, with the constructor of the other linear layers."""

    def __init__(
        self, input_size, output_size, *, tp_group=None, gather_output=False, **kwargs
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            parallel_mode="duplicated",
            skip_weight_param_allocation=False,
            tp_group=None,
            **kwargs,
        )
