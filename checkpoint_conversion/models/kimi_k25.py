"""Kimi-K2.5 to K2.7: a model of text and images whose text model is a DeepSeek-V3."""

from __future__ import annotations

from checkpoint_conversion.model_type import TextAndImages

ENTRY = TextAndImages(
    name="kimi_k25",
    summary=("the text model, back in `hf` a `deepseek_v3`; image tensors are left out and listed"),
    released=("Kimi-K2.5", "K2.6", "K2.7"),
    text_model="deepseek_v3",
    prefix="language_model.",
    images=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
    # transformers 5.23 saves the layers as blocks.
    renamed={"model.blocks.": "model.layers."},
)
