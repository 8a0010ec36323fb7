"""``LLM`` over ranks: what it generates, and whether company changes a request's tokens."""

from pathlib import Path

import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.batch_invariant import disable_batch_invariant_mode
from tests.support import needs, world

NEW = 10
# Shorter and longer than a block of the cache.
PROMPTS = [list(b"An"), list(b"the quick brown fox"), list(range(32, 102))]
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)


def expected_tokens(model, prompts=PROMPTS, new: int = NEW) -> list[list[int]]:
    """What a model of transformers generates greedily."""
    found = []
    for prompt in prompts:
        text = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(text[0, len(prompt) :].tolist())
    return found


def token_ids(outputs) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def generated(path, prompts=PROMPTS, params=GREEDY, **options) -> list[list[int]]:
    """By ``LLM``, tensor-parallel over all ranks by default; its blocks must all be free then."""
    options = {"tensor_parallel_size": world.size(), **options}
    with LLM(path, **{"max_num_seqs": 8, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.require_no_leak()
        return token_ids(outputs)


def sampled(path: Path, **options) -> list[list[int]]:
    """Greedy and sampled texts of a model with 64 tokens, by ``LLM``."""
    prompts = [[token % 64 for token in prompt] for prompt in PROMPTS]
    params = [GREEDY, GREEDY.replace(temperature=0.7, seed=1), GREEDY.replace(top_p=0.5, seed=2)]
    return generated(path, prompts, params, **options)


def assert_parity(path: Path, **sizes) -> None:
    """Sampled tokens are the same alone, together, twice, in chunks and evicted by priority."""
    kinds = {}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05, "frequency_penalty": 0.5}
    params = [
        SamplingParams(max_tokens=8, ignore_eos=True, seed=seed, **kind)
        for seed, kind in enumerate(kinds)
    ]
    # They need a second block of the cache at about the same time.
    prompts = [list(range(start, start + 58 + start)) for start in (1, 2, 3)]
    options = {"parity": True, "max_num_seqs": 8, **sizes}
    if needs.HAS_GPU:  # whose kernels have no fp32
        options["dtype"] = "bfloat16"
    try:
        with LLM(path, **options) as llm:
            alone = [
                token_ids(llm.generate([prompt], one, use_tqdm=False))[0]
                for prompt, one in zip(prompts, params, strict=True)
            ]
        crowded = {"max_num_batched_tokens": 56, "cache_tokens": 320}
        with LLM(path, **options, **crowded, scheduling_policy="priority") as llm:
            twice = [*prompts, *prompts], [*params, *params]
            together = llm.generate(*twice, use_tqdm=False, priority=[2, 0, 1, 0, 0, -1])
            assert llm.statistics().evicted + llm.statistics().most_paused
    finally:
        disable_batch_invariant_mode()
    assert token_ids(together) == [*alone, *alone]
