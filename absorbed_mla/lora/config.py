"""Which layers of which attentions LoRA trains, in the words of PEFT's ``LoraConfig``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from absorbed_mla.lora.targets import ALL_LINEAR, TARGETS, layers_named


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Options of LoRA; names and defaults are those of PEFT's ``LoraConfig``.

    Args:
        r: Rank of the update of every layer.
        lora_alpha: The update is ``lora_alpha / r`` times B A.
        target_modules: ``"all-linear"``: those of the attention; or names of layers, Megatron's
            (``linear_q_up_proj``) or Hugging Face's (``q_b_proj``). ``kv_b_proj`` is
            ``linear_k_up_proj`` and ``linear_v_up_proj``.
        layers_to_transform: Numbers of the layers, from 0; None: all.
        use_rslora: Divide ``lora_alpha`` by the root of r instead of r.
        lora_dropout: 0. Of the latent, which is not multiplied in the absorbed form, there is none.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """

    r: int = 8
    lora_alpha: float = 8
    target_modules: str | Collection[str] = ALL_LINEAR
    layers_to_transform: int | Collection[int] | None = None
    use_rslora: bool = False
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.r, int) or isinstance(self.r, bool) or self.r < 1:
            raise ValueError(f"r must be an integer above 0, got {self.r!r}")
        if not self.lora_alpha > 0:
            raise ValueError(f"lora_alpha must be above 0, got {self.lora_alpha!r}")
        if self.lora_dropout:
            raise ValueError(
                f"lora_dropout must be 0, got {self.lora_dropout!r}: in the absorbed form W_UK and "
                "W_UV are not multiplied by the latent that it would drop"
            )
        named = dict.fromkeys((*TARGETS, *TARGETS.values()))
        accepted = f"{ALL_LINEAR!r} or names of {', '.join(named)}"
        if not self._targets:
            raise ValueError(f"target_modules must be {accepted}; got none")
        for target in self._targets:
            if not layers_named(target):
                raise ValueError(f"target_modules must be {accepted}; got {target!r}")

    @property
    def scaling(self) -> float:
        """What B A is multiplied with."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)

    @property
    def layers(self) -> tuple[str, ...]:
        """Megatron's names of the layers, those that a model does not have included."""
        named = {name for target in self._targets for name in layers_named(target)}
        return tuple(name for name in TARGETS if name in named)

    def has_layer(self, index: int) -> bool:
        """Whether the attention of the layer with this number, from 0, is trained."""
        chosen = self.layers_to_transform
        return chosen is None or index in ({chosen} if isinstance(chosen, int) else chosen)

    @property
    def _targets(self) -> tuple[str, ...]:
        named = self.target_modules
        return (named,) if isinstance(named, str) else tuple(named)
