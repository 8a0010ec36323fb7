"""Which form and backend our attention ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from absorbed_mla.core_attention.module import LatentCoreAttention


class ChosenBackends:
    """Form and backend of every call of our attentions, from their plans.

    Args:
        model: Its modules are watched; attentions other than ours are ignored.
    """

    def __init__(self, model: nn.Module) -> None:
        from absorbed_mla.core_attention.module import LatentCoreAttention

        # A dict, for its order.
        self._found: dict[str, None] = {}
        for module in model.modules():
            if isinstance(module, LatentCoreAttention):
                self._watch(module)

    def __str__(self) -> str:
        """``"expanded, cudnn"``; several are separated by semicolons; empty if none ran."""
        return "; ".join(self._found)

    def _watch(self, attention: LatentCoreAttention) -> None:
        plan = attention.plan

        def watched(*args, **kwargs):
            made = plan(*args, **kwargs)
            form = type(made.form).__name__.removesuffix("Form").lower()
            self._found[f"{form}, {made.backend.name}"] = None
            return made

        attention.plan = watched  # type: ignore[method-assign]
