"""What is done with weights of a layout besides training: export, generation."""

from __future__ import annotations

import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.export import hf_weights
from checks.recipes.model import VOCAB
from checks.recipes.recipe import Outcome, Recipe
from tests.support import world


def export(recipe: Recipe) -> Outcome:
    """The whole weights that every rank gets, by Hugging Face name."""
    with world.parallel(**recipe.layout.sizes):
        return Outcome([], {}, dict(hf_weights(recipe.build(recipe))))


def generate(recipe: Recipe) -> Outcome:
    """Greedy tokens of the live model, whose ranks all get the same prompts."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (5, 70, 1, 33)
    ]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with world.parallel(**recipe.layout.sizes):
        [model] = recipe.build(recipe)
        with LLM.from_model(model, max_model_len=128, max_num_seqs=4, cache_tokens=2048) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
    tokens = {
        f"tokens {i}": torch.tensor(one.outputs[0].token_ids) for i, one in enumerate(outputs)
    }
    return Outcome([], {}, tokens)
