"""Options of LLM and of sampling on a script's command line, under Megatron's names if it has any.

``absorbed_mla.serving.option_flags`` adds them to a parser.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.option_flags import flag_of
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.sampling.parameters import SamplingParams

FLAGS = {
    "max_model_len": "--max-sequence-length",
    "max_num_seqs": "--max-requests",
    "max_num_batched_tokens": "--step-tokens",
    "max_tokens": "--num-tokens-to-generate",
}
_BY_NAME = {
    **{
        name: flag_of(one)
        for cls in (LLMOptions, SamplingParams)
        for name, one in options_of(cls).items()
        # Not those that switch off what the name says.
        if one.default is not True
    },
    **FLAGS,
    "tensor_parallel_size": "--tensor-model-parallel-size",
    "tokenizer": "--tokenizer",
}


@contextlib.contextmanager
def errors_by_flag() -> Iterator[None]:
    """Lets errors of the package name the flags of the command line."""
    try:
        yield
    except ValueError as error:
        text = re.sub(r"^\w+|\w+_\w+", lambda word: _BY_NAME.get(word[0], word[0]), str(error))
        # Which no flag takes.
        raise ValueError(text.replace(", or None", "")) from error
