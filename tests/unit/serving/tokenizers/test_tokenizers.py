"""Tokenizers of ``LLM``: prompts to tokens, and tokens back to text."""

import pytest
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, open_tokenizer
from tests.support.tokenizers import byte_level, with_byte_fallback, with_word_marks

TEXT = "aé€😀 ü z"
# A byte that is no UTF-8, as os.fsdecode gives it.
SURROGATE = "a\udcff"


def text_of(tokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream(tokens)
    return "".join([*(stream.push([token]) for token in tokens), stream.finish()])


def test_bytes():
    tokenizer = open_tokenizer("bytes", None)
    assert isinstance(tokenizer, ByteTokenizer)
    tokens = tokenizer.encode(TEXT)
    assert tokens == list(TEXT.encode())
    # The end of a text has no text.
    assert text_of(tokenizer, [*tokens, 256]) == TEXT
    assert tokenizer.encode(SURROGATE) == [97, 255]
    assert tokenizer.begin_token is None


class TestHuggingFace:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        made = byte_level()
        made.add_special_tokens({"bos_token": "<bos>"})
        # As released models: the tokenizer begins every text by itself.
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.bos_token_id)]
        )
        made.save_pretrained(tmp_path)
        return open_tokenizer(tmp_path, None)

    def test_text(self, tokenizer):
        assert text_of(tokenizer, tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.encode("a")[0] == tokenizer.begin_token
        assert tokenizer.end_tokens == (256,)

    def test_begin_token(self, tokenizer):
        """``begin`` decides, whatever the tokenizer adds by itself."""
        plain = tokenizer.encode(TEXT, begin=False)
        assert tokenizer.begin_token not in plain
        assert tokenizer.encode(TEXT, begin=True) == [tokenizer.begin_token, *plain]

    def test_bytes_that_are_no_text(self, tokenizer):
        assert tokenizer.encode(SURROGATE) == tokenizer.encode("a\N{REPLACEMENT CHARACTER}")

    def test_conversation(self, tokenizer):
        """Its text, and the tokens of that, with what is a token of its own."""
        inner = tokenizer._tokenizer
        inner.chat_template = "<bos>{% for one in messages %}{{ one.content }}{{ x }}{% endfor %}"
        messages = [{"role": "user", "content": "a <bos>"}, {"role": "user", "content": TEXT}]
        text = tokenizer.render(messages, x=5)
        assert text == f"<bos>a <bos>5{TEXT}5"
        assert tokenizer.encode(text, begin=False) == tokenizer.chat(messages, x=5)

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            # As GLM-4.5, Kimi-K2 and DeepSeek-V3.1 have them.
            ("{{ tools }}{% for k, v in args.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
            ("{{ args if args is string else args | tojson }}{{ tools }}", '{"a": 1}'),
            ("{{ '```' + args + tools[0].name }}", '```{"a": 1}f'),
            ("{{ messages[0]['content'] + '<call>' }}{{ tools }}", "<call>"),
        ],
    )
    def test_tool_calls(self, tokenizer, template, text):
        """Arguments are dicts, or texts where the template joins them; content is there."""
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        first = "{% set args = messages[0].tool_calls[0].function.arguments %}"
        tokenizer._tokenizer.chat_template = first + template
        found = tokenizer.render(messages, tools=[{"name": "f"}])
        assert found.replace("[{'name': 'f'}]", "") == text

    def test_template_without_tools(self, tokenizer):
        """It would leave them out."""
        inner = tokenizer._tokenizer
        inner.chat_template = {"default": "{{ messages }}", "tool_use": "{{ 1 }}"}
        with pytest.raises(ValueError, match="tools must not be given: the model's chat template"):
            tokenizer.render([], tools=[{}])
        assert tokenizer.render([{"role": "user", "content": "a"}], tools=[])

    def test_truncates_nothing(self):
        """Whatever its file says; transformers would say so at the first text, in any thread."""
        made = byte_level()
        made.backend_tokenizer.enable_truncation(2)
        assert len(open_tokenizer(made, None).encode("abcd")) == 4
        assert made.backend_tokenizer.truncation is None


@pytest.mark.parametrize(
    ("make", "normalizer", "longest"),
    [
        pytest.param(byte_level, None, 5, id="bytes"),
        pytest.param(byte_level, normalizers.NFC(), 5, id="composed"),
        pytest.param(byte_level, normalizers.Strip(), None, id="spaces are lost"),
        pytest.param(with_byte_fallback, None, 6, id="fallback"),
        # Its unknown token stands for any number of characters.
        pytest.param(with_word_marks, None, None, id="words"),
    ],
)
def test_longest_token(make, normalizer, longest):
    made = make()
    if normalizer is not None:
        made.backend_tokenizer.normalizer = normalizer
    assert open_tokenizer(made, None).longest_token == longest


def test_of_the_model(tmp_path):
    """None is the tokenizer that came with the model, if one did."""
    assert open_tokenizer(None, None) is None
    assert open_tokenizer(None, tmp_path) is None
    byte_level().save_pretrained(tmp_path)
    assert open_tokenizer(None, tmp_path, [7]).end_tokens == (256, 7)


@pytest.mark.parametrize(
    ("name", "error"),
    [("absent", "must be a folder or 'bytes', got"), (".", "cannot load a tokenizer from")],
)
def test_no_tokenizer(tmp_path, name, error):
    with pytest.raises(ValueError, match=f"tokenizer.*{error}"):
        open_tokenizer(tmp_path / name, None)
