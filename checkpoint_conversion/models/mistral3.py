"""Mistral Small 4: a model of text and images whose text model is a Mistral 4."""

from __future__ import annotations

from checkpoint_conversion.model_type import TextAndImages

ENTRY = TextAndImages(
    name="mistral3",
    summary=(
        "the text model, if it is a `mistral4`, which it is back in `hf`; dequantise its FP8 first"
    ),
    released=("Mistral-Small-4",),
    text_model="mistral4",
    prefix="language_model.",
    images=("vision_tower.", "multi_modal_projector."),
)
