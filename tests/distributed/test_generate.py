"""scripts/generate.py against transformers: a converted model goes on with the same tokens.

If it fails, the cache, the engine or the script changes what a checkpoint says.
"""

import pytest
from megatron.core import parallel_state

from checkpoint_conversion import cli
from tests.conversion.models import Architecture
from tests.distributed.llm import NEW, PROMPTS
from tests.distributed.whole import on_one_rank
from tests.support import world
from tests.support.combinations import few_ranks
from tests.support.generate import generate

pytestmark = few_ranks

# The tokenizer's: all bytes, and the end of a document.
_VOCABULARY = 257


def left_from_inference() -> list[str]:
    """Buffers of Megatron's that training could not write to."""
    buffers = parallel_state.get_global_memory_buffer().buffer
    return [str(key) for key, buffer in buffers.items() if buffer.is_inference()]


CASES = [
    (Architecture("v3", False, False, "rope"), ""),
    # In chunks of a step's 64 tokens; one rank has nobody to cut sequences with.
    (
        Architecture("v3", True, True, "yarn"),
        "--step-tokens 64 --form expanded" + " --sequence-parallel" * (world.size() > 1),
    ),
]


def _id(value: Architecture | str) -> str:
    return (getattr(value, "name", value) or "default").replace(" ", "-")


@pytest.mark.parametrize("architecture, options", CASES, ids=_id)
def test_tokens_of_transformers(saved, folder, architecture, options):
    """Converted by the command line, with rows of padding that all ranks divide."""
    source, expected = saved(architecture, vocab_size=_VOCABULARY)

    def prepare() -> int:
        (folder / "prompts").write_bytes(b"\n".join(map(bytes, PROMPTS)))
        words = ["convert", source, folder / "made", "--to", "absorbed"]
        return cli.main([*map(str, words), "--make-vocab-size-divisible-by", "64"])

    assert on_one_rank(prepare) == 0
    words = f"--num-tokens-to-generate {NEW} --greedy --ignore-eos --json {options}".split()
    done = generate("--load", folder / "made", "--prompt-file", folder / "prompts", *words)
    assert done.code == 0, done.err
    assert not left_from_inference()
    if world.rank() == 0:
        assert [row["tokens"] for row in done.rows[:-1]] == expected
