"""Model types with a latent attention that cannot be converted, and why."""

from __future__ import annotations

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


# fmt: off
REFUSED = (
    Refused(name="axk2", released=("A.X-K2",), lacking="norms with gates of low rank",
            unmapped="queries and output gates of one projection (q_gate_proj)"),
    Refused(name="bailing_hybrid", released=("Ling-2.5", "2.6", "3.0", "Ring"),
            lacking="Lightning attention (2.5, 2.6); in releases KDA (3.0)",
            unmapped="KDA's layers, as branch dev has them, and output gates"),
    Refused(name="deepseek_v4", also=("deepseek_v41",), released=("DeepSeek-V4",),
            lacking="compressed attention, which is no MLA, and hyper-connections"),
    Refused(name="dots3_note", also=("dots3_note_text",), released=("dots3-note",),
            lacking="two kinds of MLA by layer",
            unmapped="scaled latents, output gates, windows and a norm of k_rope"),
    Refused(name="gigachat3_5", released=("GigaChat-3.5",),
            lacking="gated norms, on both sides of sublayers",
            unmapped="gated delta net in most layers, output gates and scaled latents"),
    Refused(name="glm5_next", also=("glm5_next_text",), released=("GLM-5.3-Flash",),
            lacking="KDA with low-rank gates, hyper-connections, index scores of pooled keys",
            unmapped="latent attention without rotary channels, clamped SwiGLU"),
    Refused(name="hy_v4", also=("hy_v4_vl", "hy_v4_vl_text"), released=("Hy4-preview",),
            lacking="hyper-connections, indexers that rotate the last channels",
            unmapped="output gates, sinks and clamped SwiGLU"),
    Refused(name="kimi_linear", also=("kimi_k3",), released=("Kimi-Linear", "Kimi-K3"),
            lacking="KDA with low-rank gates; in Kimi-K3, AttnRes and SiTU",
            unmapped="KDA's layers (branch dev's have gates of full rank), unrotated rope "
                     "channels, in Kimi-K3 output gates and latent experts"),
    Refused(name="longcat_flash", released=("LongCat-Flash",),
            lacking="two attentions in a layer, experts that do nothing (zero_expert_num)",
            unmapped="latents that are scaled (mla_scale_q_lora, mla_scale_kv_lora)"),
    Refused(name="mistral_large4", also=("mistral_large4_text",), released=("Mistral-Large-4",),
            lacking="latents that later layers reuse, learned frequencies and query scales, soft "
                    "caps", unmapped="layers without RoPE"),
    Refused(name="pangu_ultra_moe", released=("openPangu-Ultra-MoE",),
            lacking="norms on both sides of sublayers"),
)
# fmt: on
