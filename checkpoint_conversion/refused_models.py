"""Model types with a latent attention that cannot be converted, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A model type with a latent attention that cannot be converted.

    Attributes:
        name: As config.json has it.
        lacking: What it has that Megatron-Core lacks.
        unmapped: What it has that the converter has no place for; None: nothing more.
        also: Model types of whole models that it is the text model of, or its own in one.
        released: Checkpoints of it.
    """

    name: str
    lacking: str
    unmapped: str | None = None
    also: tuple[str, ...] = ()
    released: tuple[str, ...] = ()

    @property
    def has(self) -> str:
        """Why it is refused, for the error."""
        more = f"; and {self.unmapped}, which the converter has no place for"
        return f"{self.lacking}, which Megatron-Core lacks{more if self.unmapped else ''}"

    @property
    def summary(self) -> str:
        """For the table of models in the documentation."""
        return f"refused: {self.lacking}"


# name, also: released, and the other fields.
_TABLE = """
axk2: A.X-K2
  lacking: norms with gates of low rank
  unmapped: queries and output gates of one projection (q_gate_proj)
bailing_hybrid: Ling-2.5, 2.6, 3.0, Ring
  lacking: Lightning attention (2.5, 2.6); in releases KDA (3.0)
  unmapped: KDA's layers, as branch dev has them, and output gates
deepseek_v4, deepseek_v41: DeepSeek-V4
  lacking: compressed attention, which is no MLA, and hyper-connections
dots3_note, dots3_note_text: dots3-note
  lacking: two kinds of MLA by layer
  unmapped: scaled latents, output gates, windows and a norm of k_rope
gigachat3_5: GigaChat-3.5
  lacking: gated norms, on both sides of sublayers
  unmapped: gated delta net in most layers, output gates and scaled latents
glm5_next, glm5_next_text: GLM-5.3-Flash
  lacking: KDA with low-rank gates, hyper-connections, index scores of pooled keys
  unmapped: latent attention without rotary channels, clamped SwiGLU
hy_v4, hy_v4_vl, hy_v4_vl_text: Hy4-preview
  lacking: hyper-connections, indexers that rotate the last channels
  unmapped: output gates, sinks and clamped SwiGLU
kimi_linear, kimi_k3: Kimi-Linear, Kimi-K3
  lacking: KDA with low-rank gates; in Kimi-K3, AttnRes and SiTU
  unmapped: KDA's layers, unrotated rope channels, in Kimi-K3 output gates and latent experts
longcat_flash: LongCat-Flash
  lacking: two attentions in a layer, experts that do nothing (zero_expert_num)
  unmapped: latents that are scaled (mla_scale_q_lora, mla_scale_kv_lora)
mistral_large4, mistral_large4_text: Mistral-Large-4
  lacking: latents that later layers reuse, learned frequencies and query scales, soft caps
  unmapped: layers without RoPE
pangu_ultra_moe: openPangu-Ultra-MoE
  lacking: norms on both sides of sublayers
"""


def _read(table: str) -> Iterator[Refused]:
    for entry in re.split(r"\n(?! )", table.strip()):
        first, *lines = entry.splitlines()
        names, released = first.split(": ")
        name, *also = names.split(", ")
        fields = dict(line.strip().split(": ", 1) for line in lines)
        yield Refused(name=name, also=tuple(also), released=tuple(released.split(", ")), **fields)


REFUSED = tuple(_read(_TABLE))
