"""The text of one output while it grows, with tokens that are parts of characters.

If these fail, a stop string is missed or cut in the wrong place, or text is shown and taken back.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla import SamplingParams
from absorbed_mla.serving.output_processor import Completion
from absorbed_mla.serving.outputs import CompletionOutput
from absorbed_mla.serving.prompts import of_output
from absorbed_mla.serving.request_results import Progress, Result
from absorbed_mla.serving.tokenizers.tokenizers import HuggingFaceTokenizer
from tests.support.tokenizers import byte_level_across_characters, with_byte_fallback

TOKENIZERS = {
    "byte_level": HuggingFaceTokenizer(byte_level_across_characters()),
    "byte_fallback": HuggingFaceTokenizer(with_byte_fallback()),
}
LETTERS = st.sampled_from("ab \n\u05d0\u05dc\u0f56\U0001f468")


def test_bad_words():
    """Alone and behind a space, unless the latter is the former behind something."""
    tokens = {"a": [1], " a": [2], "bc": [3, 4], " bc": [5, 3, 4]}
    tokenizer = SimpleNamespace(encode=lambda text, begin: tokens[text])
    params = SamplingParams(bad_words=["a", "bc", [7, 8], "a"])
    found = of_output(params, (), tokenizer).bad_words
    assert found == [(1,), (2,), (3, 4), (7, 8)]


def test_bad_words_of_more_tokens_than_lists_may_have():
    params = SamplingParams(bad_words=["\u4e2d" * 4096])
    assert len(of_output(params, (), TOKENIZERS["byte_level"]).bad_words[0]) > 4096


def grow(tokenizer, tokens: list[int], **params) -> CompletionOutput:
    """The output of these tokens, one after the other."""
    first = tokenizer.encode("b", begin=False)
    sampling = SamplingParams(max_tokens=len(tokens), **params)
    completion = Completion(0, first, sampling, tokenizer.end_tokens, tokenizer)
    texts = []
    for i, token in enumerate(tokens, 1):
        result = Result(tokens, finish="length") if i == len(tokens) else None
        completion.advance(Progress(0, [token], result=result))
        texts.append(completion.output.text)
        if completion.finished:
            break
    assert completion.finished
    # Nothing is taken back.
    assert all(texts[-1].startswith(text) for text in texts)
    return completion.output


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_stop_strings(name, data):
    """Cut where the first one begins, wherever tokens end."""
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(data.draw(st.text(LETTERS, min_size=1, max_size=14)), begin=False)
    text = grow(tokenizer, tokens).text
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 3))]
    included = data.draw(st.booleans())
    output = grow(tokenizer, tokens, stop=stop, include_stop_str_in_output=included)
    end = text.index(stop) + len(stop) * included
    assert (output.text, output.finish_reason, output.stop_reason) == (text[:end], "stop", stop)


def test_a_stop_string_that_is_held_back():
    """A line break is a byte token, which waits for the next one; the model ends first."""
    tokenizer = TOKENIZERS["byte_fallback"]
    a, line_break, *rest = tokenizer.encode("a\nb", begin=False)[-3:]
    [end] = tokenizer.end_tokens
    for after in (rest[0], end):
        output = grow(tokenizer, [a, line_break, after, a], stop="\n")
        assert (output.text, output.finish_reason, output.stop_reason) == (" a", "stop", "\n")
    output = grow(tokenizer, [a, line_break, end], stop="b")
    assert (output.text, output.finish_reason, output.stop_reason) == (" a\n", "stop", None)
