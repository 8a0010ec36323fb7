"""``/v1/responses`` as OpenAI's client reads it."""

import json

import pytest
from openai import APIError, BadRequestError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from absorbed_mla.registry import TOOL_PARSERS
from absorbed_mla.serving.server.output_parsers import OutputParsers
from absorbed_mla.serving.server.reasoning import REASONING_PARSERS
from absorbed_mla.serving.server.responses_request import ResponsesRequest
from tests.support.llm import FAILING_PROMPT, FAILURE, serving
from tests.unit.serving.server.test_tool_calls import SAYS, Recording
from tests.unit.serving.server.test_tool_parsers import CALLS, TOOLS

WHOLE, EVENT = TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)
FUNCTIONS = [{"type": "function", "strict": True, **one["function"]} for one in TOOLS]


@pytest.fixture(scope="module")
def tokenizer():
    return Recording()


@pytest.fixture(scope="module")
def served(tokenizer):
    parsers = OutputParsers(TOOL_PARSERS["glm45"], REASONING_PARSERS["glm45"])
    with serving(tokenizer=tokenizer, app_options={"parsers": parsers}) as made:
        yield made


@pytest.fixture
def says(served, monkeypatch):
    monkeypatch.setattr(served.runner, "says", SAYS)


def create(client, **fields):
    return client.responses.create(**{"model": "tiny", "input": "abc", **fields})


def test_text(client, tokenizer):
    answer = create(
        client, instructions="Be brief.", max_output_tokens=4, temperature=0.5, metadata={"a": "b"}
    )
    WHOLE.validate_python(answer.to_dict())
    assert answer.output_text == ";cba" and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.store, answer.temperature, answer.top_p) == (False, 0.5, 1.0)
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "Be brief.")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (26, 4)
    assert tokenizer.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "abc"},
    ]


def test_all_kinds_of_output(client, says):
    answer = create(client, tools=FUNCTIONS)
    WHOLE.validate_python(answer.to_dict())
    thought, message, *calls = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Look.")
    assert message.content[0].text == answer.output_text == "I look."
    assert [(one.name, json.loads(one.arguments)) for one in calls] == CALLS
    assert {one.status for one in answer.output} == {answer.status} == {"completed"}
    assert len({one.id for one in answer.output}) == len({one.call_id for one in calls}) + 2
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Look.")
    assert answer.tools[0].name == "weather" and answer.tool_choice == "auto"


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_events(client, served, says, monkeypatch, seconds):
    """Joined they are the whole answer, in the order in which the client puts them together."""
    monkeypatch.setattr(served.runner, "step_seconds", seconds)
    events = list(create(client, tools=FUNCTIONS, stream=True))
    for event in {event.type: event for event in events}.values():
        EVENT.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    without = [kind for kind in kinds if not kind.endswith(".delta")]
    part = ["content_part.added", "TEXT.done", "content_part.done"]
    texts = [
        kind.replace("TEXT", name)
        for name in ("reasoning_text", "output_text")
        for kind in ("output_item.added", *part, "output_item.done")
    ]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert without == ["created", "in_progress", *texts, *call * 3, "completed"]
    deltas = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    whole = create(client, tools=FUNCTIONS)
    final = events[-1].response
    assert [deltas[one.id] for one in final.output] == [
        one.arguments if one.type == "function_call" else one.content[0].text
        for one in whole.output
    ]
    assert final.usage == whole.usage and final.output_text == whole.output_text
    assert events[0].response.output == [] and events[0].response.status == "in_progress"


def test_helper_of_the_client(client, says):
    with client.responses.stream(model="tiny", input="abc", tools=FUNCTIONS) as stream:
        final = stream.get_final_response()
    assert final.output_text == "I look."
    assert [one.parsed_arguments for one in final.output[2:]] == [given for _, given in CALLS]


def test_stream_that_is_cut(client):
    *_, last = create(client, max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == ";c"


def test_nothing_said(client, served, monkeypatch):
    """There is a message, without text."""
    monkeypatch.setattr(served.runner, "says", "")
    [message] = create(client).output
    assert message.content[0].text == ""
    assert [event.type for event in create(client, stream=True)][-1] == "response.completed"


def test_former_turns(client, tokenizer, says):
    """What an answer has, given back, is one message of the assistant's."""
    answer = create(client, tools=FUNCTIONS)
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "fine"}
        for one in answer.output[2:]
    ]
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be "}] * 2},
        {"role": "user", "content": "abc"},
        *(one.to_dict() for one in answer.output),
        *results,
    ]
    create(client, input=given, tools=FUNCTIONS)
    system, user, said, *told = tokenizer.messages
    assert (system["role"], system["content"], user["content"]) == ("system", "Be Be ", "abc")
    assert (said["content"], said["reasoning_content"]) == ("I look.", "Look.")
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in said["tool_calls"]]
    assert calls == CALLS
    assert [one["tool_call_id"] for one in told] == [one["id"] for one in said["tool_calls"]]
    assert {(one["role"], one["content"]) for one in told} == {("tool", "fine")}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"previous_response_id": "a"}, "previous_response_id: must be null"),
        ({"store": True}, "store: must be false or null, got true"),
        ({"background": True}, "background: must be false or null"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs tools"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.list"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.list"),
        ({"max_output_tokens": "5"}, "max_output_tokens: Input should be a valid integer"),
        ({"extra_body": {"n": 2}}, "n: Extra inputs are not permitted"),
        ({"reasoning": {"effort": "high"}}, "reasoning: must be"),
    ],
)
def test_refused(client, fields, text):
    with pytest.raises(BadRequestError, match=text):
        create(client, **fields)


def test_schema_of_the_text():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = {"input": "a", "text": {"format": form}}
    params = ResponsesRequest.model_validate_json(json.dumps(body)).params()
    assert params.structured_outputs.json == schema


def test_values_that_ask_for_nothing(client):
    fields = {"store": False, "background": False, "truncation": "disabled", "include": []}
    fields |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "user": "a"}
    assert create(client, max_output_tokens=2, **fields).output_text == ";c"


def test_failure(client):
    """After what there is, an event that the client raises."""
    found = []
    with pytest.raises(APIError, match=FAILURE):
        for event in create(client, input=FAILING_PROMPT, stream=True):
            found.append(event.type)
    assert found[-1] == "response.output_text.delta"
    with pytest.raises(APIError, match=FAILURE):
        create(client, input=FAILING_PROMPT)
