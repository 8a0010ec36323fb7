"""Log-probabilities of one model by ``LLM``, run in several ways in this process."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from checks.beside_transformers.cases import MODELS, Case

if TYPE_CHECKING:
    import torch

    from tests.support.log_probs import Text

_VOCABULARY = 131
# A block of the prefix cache, and the lengths of what follows it; prompts without it.
_SHARED, _BEHIND, _OTHERS = 64, (1, 9, 56), (3, 70, 64)
NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    """Token ids; the last three begin equally."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(_VOCABULARY) for _ in range(count)]

    shared = tokens(_SHARED)
    return [*map(tokens, _OTHERS), *(shared + tokens(count) for count in _BEHIND)]


def prepare(case: Case) -> None:
    """Before anything is imported: ``LLM`` runs in this process, and finds what it may use."""
    if not case.transformer_engine:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    import torch
    import torch.distributed as dist

    from absorbed_mla.cpu_host import enable_cpu_host

    enable_cpu_host()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def measure(case: Case, folder: Path) -> list[dict]:
    """A row for the prompts one after the other, and one for all of them together.

    Args:
        case: What to run; the first of this process, because Megatron keeps what it finds of the
            first model's experts.
        folder: With the checkpoint of its model.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [
        {**dataclasses.asdict(case), "together": together, **_errors(case, folder, texts, device)}
        for together, texts in _written(case, folder).items()
    ]


def _written(case: Case, folder: Path) -> dict[bool, list[Text]]:
    """By whether they ran together: texts of all prompts, by one ``LLM``."""
    from absorbed_mla import LLM
    from tests.support.log_probs import written

    # Those of prompts have all of a prompt computed, outside of graphs of whole steps.
    of_prompts = not (case.prefix_cache or case.graphs)
    options = {
        "dtype": case.dtype,
        "max_num_seqs": 8,
        "enable_prefix_caching": case.prefix_cache,
        "cuda_graphs": case.graphs,
        "prompt_logprobs": of_prompts,
    }
    more = {"prompt_log_probs": of_prompts}
    with LLM(folder, **options) as llm:
        alone = [text for one in prompts() for text in written(llm, [one], NEW_TOKENS, **more)]
        together = written(llm, prompts(), NEW_TOKENS, **more)
        done = llm.statistics()
        llm.require_no_leak()
    assert bool(done.prefix_blocks) == case.prefix_cache, "equal beginnings were not found"
    assert bool(done.graph_steps) == case.graphs, "steps were not as asked for"
    return {False: alone, True: together}


def _errors(case: Case, folder: Path, texts: list[Text], device: torch.device) -> dict:
    import torch

    from tests.support.log_probs import (
        FACTOR,
        ROUTED_FACTOR,
        by_transformers,
        errors_of,
        errors_of_transformers,
        exceeded,
    )

    tokens = [text.tokens for text in texts]
    expected = by_transformers(folder, tokens, torch.float32, device)
    rounded = by_transformers(folder, tokens, torch.bfloat16, device)
    found, theirs = errors_of(texts, expected), errors_of_transformers(texts, rounded, expected)
    last = [(a[-NEW_TOKENS:], b[-NEW_TOKENS:]) for a, b in zip(rounded, expected)]
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in last]).double().mean()
    factor = ROUTED_FACTOR if MODELS[case.model].experts else FACTOR
    return {
        **dataclasses.asdict(found),
        "transformers_bf16": {**dataclasses.asdict(theirs), "same_choice": float(same)},
        "exceeded": exceeded(found, theirs, factor),
    }
