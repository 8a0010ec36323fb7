"""Requests share cached blocks with those of the same ``cache_salt``, and with no others."""

from contextlib import closing

import pytest
import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.request_record import block_hashes
from tests.support.engine import CHUNKED, KEPT, Request, engine_of, prompt, step_to_the_end

TEXT = prompt(150)
SALTS = (None, "a", "b", "\ud800", "a" * 1000)
WAYS = {"overlap": {}, "megatron": {"decode_loop": False}, "chunks": CHUNKED}


def run(engine, text, *salts, num_tokens: int = 2) -> list[int]:
    """Requests that arrive together; how many tokens of each the prefix cache had."""
    sampling = Request(text, num_tokens).sampling()
    numbers = [engine.add_request(text, sampling, salt) for salt in salts]
    step_to_the_end(engine)
    engine.require_no_leak()
    assert not any(engine.results[number].error for number in numbers)
    return [engine.results[number].num_cached_tokens for number in numbers]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_sharing(model, options):
    with engine_of(model, **{"step_tokens": 256, **KEPT, **options}) as engine:
        assert run(engine, TEXT, "a", "b", None, "a", None) == [0, 0, 0, 128, 128]
        assert run(engine, TEXT, *SALTS) == [128, 128, 128, 0, 0]
        assert run(engine, TEXT, *SALTS) == [128] * 5
        # Of what was generated, too.
        run(engine, TEXT, "a", num_tokens=50)
        later = [*TEXT, *engine.results[15].tokens, 1]
        assert run(engine, later, *SALTS) == [128, 192, 128, 128, 128]


def test_evicted_requests(model):
    """They keep their salts, and so do the blocks that they find again."""
    with engine_of(model, blocks=7, **KEPT) as engine:
        run(engine, TEXT[:60], "a", "b", "c", num_tokens=100)
        assert engine.statistics.evicted and engine.statistics.prefix_blocks
        assert run(engine, [*TEXT[:60], *engine.results[0].tokens], None) == [0]


def test_prefix_folder(model, tmp_path):
    options = {"prefix_caching": True, "prefix_cache_dir": tmp_path}
    for expected in ([0, 0, 128], [128, 0, 128]):
        with engine_of(model, **options) as engine:
            assert run(engine, TEXT, "a") + run(engine, TEXT, f"b{expected}", "a") == expected


def test_llm(model):
    salts = ("a", "b", "a", None)
    prompts = [{"prompt_token_ids": TEXT, "cache_salt": salt} for salt in salts]
    made = LLM.from_model(model, tokenizer="bytes", max_model_len=192, max_num_seqs=4)
    with closing(made) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert [one.num_cached_tokens for one in outputs] == [0, 0, 128, 0]


def test_hashes():
    """None is that of another text or salt."""
    texts = [torch.tensor(text) for text in (TEXT, prompt(150, 1))]
    found = [[block_hashes(text, 64, salt) for text in texts] for salt in SALTS]
    assert len({value for each in found for one in each for value in one}) == 2 * 2 * len(SALTS)
    assert found == [[block_hashes(text, 64, salt) for text in texts] for salt in SALTS]
