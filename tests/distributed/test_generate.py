"""scripts/generate.py against transformers: a converted model goes on with the same tokens.

If it fails, the cache, the engine or the script changes what a checkpoint says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from checkpoint_conversion import cli
from tests.conversion.models import Architecture, make_model, save
from tests.distributed.whole import shared_folder
from tests.support import world
from tests.support.combinations import few_ranks
from tests.support.generate import generate

pytestmark = few_ranks

# The tokenizer's: all bytes, and the end of a document.
_VOCABULARY = 257
_NEW = 12
# Shorter and longer than a block of the cache.
_PROMPTS = (b"An", b"the quick brown fox", bytes(range(32, 102)))


def expected_tokens(model) -> list[list[int]]:
    """What transformers generates, greedily, from all prompts as one batch."""
    longest = max(map(len, _PROMPTS))
    tokens = torch.tensor([list(prompt.rjust(longest, b"\0")) for prompt in _PROMPTS])
    missing = torch.tensor([[longest - len(prompt)] for prompt in _PROMPTS])
    mask = (torch.arange(longest) >= missing).long()
    texts = model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=_NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return texts[:, longest:].tolist()


def convert(model, folder: Path) -> None:
    """By the command line, with rows of padding that all ranks divide."""
    source = save(model, folder / "hf")
    words = ["convert", source, folder / "made", "--to", "absorbed"]
    assert cli.main([*map(str, words), "--make-vocab-size-divisible-by", "64"]) == 0


def left_from_inference() -> list[str]:
    """Buffers of Megatron's that training could not write to."""
    buffers = parallel_state.get_global_memory_buffer().buffer
    return [str(key) for key, buffer in buffers.items() if buffer.is_inference()]


CASES = [
    (Architecture("v3", False, False, "rope"), ""),
    (Architecture("v3", True, True, "yarn"), ""),
    # In chunks of a step's 64 tokens.
    (Architecture("v3", True, True, "yarn"), "--step-tokens 64 --form expanded"),
    (Architecture("v3", True, True, "yarn"), "--sequence-parallel"),
][: None if world.size() > 1 else -1]  # one rank has nobody to cut sequences with


def _id(value: Architecture | str) -> str:
    return (getattr(value, "name", value) or "default").replace(" ", "-")


@pytest.fixture(scope="module")
def converted():
    """Per architecture, the converted checkpoint and the expected tokens, made when asked for."""
    with shared_folder() as folder:
        made = {}

        def make(architecture: Architecture):
            if architecture not in made:
                own, expected = folder / str(len(made)), [None]
                if world.rank() == 0:
                    own.mkdir()
                    model = make_model(architecture, vocab_size=_VOCABULARY)
                    expected = [expected_tokens(model)]
                    convert(model, own)
                    (own / "prompts").write_bytes(b"\n".join(_PROMPTS))
                dist.broadcast_object_list(expected)
                made[architecture] = own, expected[0]
            return made[architecture]

        yield make


@pytest.mark.parametrize("architecture, options", CASES, ids=_id)
def test_tokens_of_transformers(converted, architecture, options):
    folder, expected = converted(architecture)
    words = f"--num-tokens-to-generate {_NEW} --greedy --ignore-eos --json {options}".split()
    done = generate("--load", folder / "made", "--prompt-file", folder / "prompts", *words)
    assert done.code == 0, done.err
    assert not left_from_inference()
    if world.rank() == 0:
        assert [row["tokens"] for row in done.rows[:-1]] == expected
