"""Tool calls and reasoning as OpenAI's client reads them, of a model that says what it is told."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.server.chat_request import ChatRequest
from absorbed_mla.serving.server.forced_calls import schema_of_one, schema_of_several
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.reasoning import REASONING_PARSERS
from tests.support.llm import ChatBytes, serving
from tests.unit.serving.server.test_tool_parsers import CALLS, TEXTS, TOOLS

# With all fields that strict clients need.
WHOLE, CHUNK = TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)


class Recording(ChatBytes):
    """Notes what the chat template gets."""

    def chat(self, messages, **options):
        self.messages, self.options = messages, options
        return self.encode("".join(f"{one['role']}:{one.get('content')};" for one in messages))


@pytest.fixture(scope="module")
def tokenizer():
    return Recording()


@pytest.fixture(scope="module")
def served(tokenizer):
    parsers = OutputParsers(TOOL_PARSERS["glm45"], REASONING_PARSERS["glm45"])
    with serving(tokenizer=tokenizer, app_options={"parsers": parsers}) as made:
        yield made


ASK = [{"role": "user", "content": "?"}]
SAYS = f"<think>Look.</think>I look.\n{TEXTS['glm45']}"


def chat(client, messages=ASK, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, **fields})


def joined(pieces):
    """Message and reason of the end, of a stream whose calls begin with their names."""
    content, reasoning, calls, end = "", "", {}, None
    for piece in pieces:
        CHUNK.validate_python(piece.to_dict())
        [choice] = piece.choices
        delta, end = choice.delta, choice.finish_reason
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for call in delta.tool_calls or ():
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.name
                calls[call.index] = [call.function.name, ""]
            else:
                assert (call.id, call.function.name) == (None, None) and call.function.arguments
            calls[call.index][1] += call.function.arguments
    return content, reasoning, [(name, json.loads(text)) for name, text in calls.values()], end


class TestAuto:
    @pytest.fixture(autouse=True)
    def says(self, served, monkeypatch):
        monkeypatch.setattr(served.runner, "says", SAYS)

    def test_whole(self, client, tokenizer):
        answer = chat(client, tools=TOOLS)
        WHOLE.validate_python(answer.to_dict())
        [choice] = answer.choices
        message = choice.message
        assert (message.content, message.reasoning_content) == ("I look.", "Look.")
        assert message.reasoning == "Look." and choice.finish_reason == "tool_calls"
        found = [
            (one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls
        ]
        assert found == CALLS and len({one.id for one in message.tool_calls}) == 3
        assert tokenizer.options == {"tools": TOOLS}

    @pytest.mark.parametrize("seconds", [0.0, 0.001])
    def test_streamed(self, client, served, monkeypatch, seconds):
        """Also where a piece has several tokens."""
        monkeypatch.setattr(served.runner, "step_seconds", seconds)
        pieces = list(chat(client, tools=TOOLS, stream=True))
        assert joined(pieces) == ("I look.", "Look.", CALLS, "tool_calls")
        first, *others, _ = (piece.choices[0].delta for piece in pieces)
        assert first.role == "assistant" and len(others) > 1
        # Nothing is sent for what is held back.
        assert all(one.content or one.tool_calls or one.reasoning for one in others)

    def test_helper_of_the_client(self, client):
        with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
            final = stream.get_final_completion()
        calls = final.choices[0].message.tool_calls
        assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == CALLS

    def test_one_at_most(self, client):
        fields = {"tools": TOOLS, "parallel_tool_calls": False}
        assert len(chat(client, **fields).choices[0].message.tool_calls) == 1
        assert joined(chat(client, **fields, stream=True))[2] == CALLS[:1]

    def test_none(self, client, tokenizer):
        """They are shown to the model, and what it says is text."""
        [choice] = chat(client, tools=TOOLS, tool_choice="none").choices
        assert choice.message.content == SAYS.partition("</think>")[2]
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert tokenizer.options == {"tools": TOOLS}

    def test_cut_off(self, client):
        """The reason of the end is that there were no tokens left."""
        [choice] = chat(client, tools=TOOLS, max_tokens=120).choices
        assert choice.finish_reason == "length" and len(choice.message.tool_calls) == 1

    def test_log_probs_of_all_tokens(self, client):
        """Also of those that are held back, and of marks."""
        fields = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
        [choice] = chat(client, **fields).choices
        pieces = list(chat(client, **fields, stream=True))
        expected = bytes([*SAYS.encode()])
        assert bytes(choice.token_ids[:-1]) == expected
        tokens = [token for piece in pieces for token in piece.choices[0].token_ids]
        assert tokens == choice.token_ids
        assert sum(len(piece.choices[0].logprobs.content) for piece in pieces) == len(tokens)

    def test_several_outputs(self, client):
        for choice in chat(client, tools=TOOLS, n=2).choices:
            assert len(choice.message.tool_calls) == 3

    def test_reasoning_is_left_out(self, client):
        fields = {"tools": TOOLS, "extra_body": {"include_reasoning": False}}
        message = chat(client, **fields).choices[0].message
        assert message.content == "I look." and not hasattr(message, "reasoning_content")
        assert joined(chat(client, **fields, stream=True))[:2] == ("I look.", "")


class TestForced:
    """What structured output has the model say, of which the runner knows nothing."""

    @pytest.fixture
    def params(self, served, monkeypatch):
        """Of the requests that run; none of them with a grammar."""
        found, llm = [], served.service.llm
        encode, add = llm.prompt_encoder.encode, llm.add_request

        def plain(prompt, params, **rest):
            found.append(params)
            return encode(prompt, params.replace(structured_outputs=None), **rest)

        monkeypatch.setattr(llm.prompt_encoder, "encode", plain)
        monkeypatch.setattr(
            llm,
            "add_request",
            lambda prompt, params, name: add(prompt, params.replace(structured_outputs=None), name),
        )
        return found

    def test_required(self, client, served, params, monkeypatch):
        listed = [{"name": name, "parameters": given} for name, given in CALLS]
        monkeypatch.setattr(served.runner, "says", f"Look.</think>{json.dumps(listed)}")
        fields = {"tools": TOOLS, "tool_choice": "required"}
        found = joined(chat(client, **fields, stream=True))
        assert found == ("", "Look.", CALLS, "tool_calls")
        message = chat(client, **fields, parallel_tool_calls=False).choices[0].message
        assert message.content is None and len(message.tool_calls) == 1
        schemas = [one.structured_outputs.json for one in params]
        assert schemas == [schema_of_several(TOOLS, most) for most in (None, 1)]

    def test_named(self, client, served, params, monkeypatch):
        """The end is that of a text, as OpenAI has it."""
        name, given = CALLS[1]
        monkeypatch.setattr(served.runner, "says", f"<think>Look.</think>{json.dumps(given)}")
        fields = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": name}}}
        assert joined(chat(client, **fields, stream=True)) == ("", "Look.", CALLS[1:2], "stop")
        [call] = chat(client, **fields).choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (name, given)
        assert params[0].structured_outputs.json == schema_of_one(TOOLS[1])


def test_without_tools(client, served, monkeypatch):
    """Reasoning is taken apart; calls are none."""
    monkeypatch.setattr(served.runner, "says", SAYS)
    message = chat(client).choices[0].message
    assert message.content == SAYS.partition("</think>")[2] and message.reasoning == "Look."
    assert joined(chat(client, stream=True))[:3] == (message.content, "Look.", [])


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("<think>a</think>b", "", "c"), ("</think><think>a", "c", ""), ("a", "c", "")],
)
def test_reasoning_of_a_message_that_goes_on(begun, reasoning, content):
    """Which may be behind what was thought."""
    messages = [*ASK, {"role": "assistant", "content": begun}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    body = ChatRequest(**fields)
    body.use(OutputParsers(None, REASONING_PARSERS["deepseek_r1"]))
    message = body.message_parser([*begun.encode()], ChatBytes()).read("c", True)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_special_tokens_are_marks(client, served):
    """They are in the text where something looks for them."""
    seen = []
    add = served.service.llm.add_request
    served.service.llm.add_request = lambda prompt, params, name: (
        seen.append(params) or add(prompt, params, name)
    )
    try:
        chat(client, tools=TOOLS, max_tokens=1)
        client.completions.create(model="tiny", prompt="a", max_tokens=1)
    finally:
        del served.service.llm.add_request
    assert [params.skip_special_tokens for params in seen] == [False, True]


def test_calls_of_former_turns(client, tokenizer):
    """As templates expect them: arguments are dicts, and reasoning has its old name, too."""
    call = {"id": "a", "type": "function"}
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {**call, "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                {**call, "function": {"name": "now", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "fine"}]},
    ]
    chat(client, messages, max_tokens=1)
    _, asked, told = tokenizer.messages
    given = [one["function"]["arguments"] for one in asked["tool_calls"]]
    assert given == [{"city": "Oslo"}, {}] and asked["reasoning_content"] == "Hm."
    assert told == {"role": "tool", "tool_call_id": "a", "content": "fine"}
