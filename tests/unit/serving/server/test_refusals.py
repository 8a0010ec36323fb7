"""What the server refuses: in OpenAI's shape, and without harm to those that come after."""

import http.client
import json
import socket

import openai
import pytest
from openai import OpenAI

from tests.support.llm import serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def served():
    with serving() as made:
        yield made
        # Nothing of all this stopped it.
        assert made.service.is_alive and not made.deaths


def send(served, method, path, body=b"", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {"content-type": "application/json"} if method == "POST" else {}
    connection.request(method, path, content, kind | (headers or {}))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def head(path: str, *lines: str) -> bytes:
    first = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json")
    return "\r\n".join([*first, *lines, "", ""]).encode()


def require_error(found, status: int, text: str) -> None:
    """An error in the shape of OpenAI's."""
    assert found[0] == status, found
    error = found[1]["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert text in error["message"], error


MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES = [
    # Route, body, and what is said about it.
    (COMPLETIONS, b"", "body: Invalid JSON"),
    (COMPLETIONS, b"{", "body: Invalid JSON"),
    (COMPLETIONS, b'{"prompt": "\xff"}', "body: Invalid JSON"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', "body: Invalid JSON"),
    (COMPLETIONS, b"[" * 100_000, "body: Invalid JSON"),
    (COMPLETIONS, [1], "body: Input should be an object"),
    (COMPLETIONS, {}, "prompt: Field required"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt must not be empty"),
    (COMPLETIONS, {"prompt": ""}, "prompt must not be empty"),
    (COMPLETIONS, {"prompt": [""]}, "the prompt is empty"),
    (COMPLETIONS, {"prompt": [[]]}, "the prompt is empty"),
    (COMPLETIONS, {"prompt": [257]}, "token 257 is not in the vocabulary of 257"),
    (COMPLETIONS, {"prompt": [-1]}, "token -1 is not in the vocabulary"),
    (COMPLETIONS, {"prompt": [10**30]}, "is not in the vocabulary"),
    (COMPLETIONS, {"prompt": ["a"] * 600, "n": 2}, "1024 outputs together, got 600 times 2"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n must be an integer of at least 1, got 0"),
    (COMPLETIONS, {"prompt": "a", "n": 10**9}, "n: Input should be less than or equal to 1024"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, "max_tokens: Input should be a valid"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer of at least 1"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature must be at least 0"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature must be at least 0"),
    (COMPLETIONS, {"prompt": "a", "top_p": 2}, "top_p must be above 0 and at most 1"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 1e-300}, "must be from 0.001 to 1000"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**30]}, "stop_token_ids must be token ids"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed must be an integer of 64 bits"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop must be a string or several"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 1000}, "logprobs must be an integer from 0 to 100"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs needs an engine"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "needs stream false"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "prompt_logprobs needs an engine"),
    (
        COMPLETIONS,
        {"prompt": "a", "echo": True, "logprobs": 1, "stream": True},
        "echo with logprobs needs stream false",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2},
        "echo with logprobs needs prompt_logprobs null, got 2",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "echo": True, "truncate_prompt_tokens": 5},
        "echo needs truncate_prompt_tokens null, got 5",
    ),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"7": 101}}, "logit_bias must be token ids with"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
    (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"257": 1}},
        "logit_bias must have tokens below 257",
    ),
    (COMPLETIONS, {"prompt": "a", "request_id": "a\nb"}, "request_id: String should match"),
    (COMPLETIONS, {"prompt": "a", "whatever": {}}, "whatever: Extra inputs are not permitted"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt must be a text that is not empty"),
    (CHAT, {"messages": [MESSAGE], "cache_salt": ""}, "cache_salt must be a text that is not"),
    (COMPLETIONS, {"prompt": "a", "priority": 1}, "priority needs scheduling_policy='priority'"),
    (CHAT, {"messages": [MESSAGE], "priority": 2**63}, "priority: Input should be less than"),
    (CHAT, {"messages": []}, "messages: List should have at least 1 item"),
    (CHAT, {"messages": [{}]}, "messages.0.role: Field required"),
    (CHAT, {"messages": [{**MESSAGE, "content": 5}]}, "messages.0.content"),
    (CHAT, {"messages": [{**MESSAGE, "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (CHAT, {"messages": [{**MESSAGE, "content": [{"type": "text"}]}]}, "messages.0.content"),
    (CHAT, {"messages": [MESSAGE], "top_logprobs": 1}, "top_logprobs needs logprobs true"),
    (CHAT, {"messages": [MESSAGE], "max_completion_tokens": 0}, "max_tokens must be an integer"),
    (
        CHAT,
        {"messages": [MESSAGE], "continue_final_message": True},
        "continue_final_message needs add_generation_prompt false",
    ),
    ("/tokenize", {}, "one of prompt and messages must be given"),
    ("/tokenize", {"prompt": "a", "messages": [MESSAGE]}, "one of prompt and messages"),
    (
        "/tokenize",
        {"messages": [MESSAGE], "add_special_tokens": True},
        "add_special_tokens must be false or null with messages, got true",
    ),
    ("/detokenize", {"tokens": [3, 257]}, "tokens must be below 257, got 257"),
    (CHAT, {"messages": [MESSAGE], "tools": [1]}, "tools.0: Input should be"),
    (CHAT, {"messages": [MESSAGE], "tools": [{"type": "mcp"}]}, "tools.0.type: Input should be"),
    (CHAT, {"messages": [MESSAGE], "tools": [TOOL]}, "tools need the server's option tool_call_"),
    (CHAT, {"messages": [MESSAGE], "tool_choice": "required"}, "tool_choice 'required' needs too"),
    (
        CHAT,
        {
            "messages": [MESSAGE],
            "tools": [TOOL],
            "tool_choice": {**TOOL, "function": {"name": "g"}},
        },
        "tool_choice must name one of the tools, got 'g'",
    ),
    (
        CHAT,
        {
            "messages": [MESSAGE],
            "tools": [{**TOOL, "function": {"name": "f", "parameters": {"$defs": 3}}}],
            "tool_choice": "required",
        },
        "$defs of tools must be an object, got 3",
    ),
    (CHAT, {"messages": [MESSAGE], "functions": [{"name": "f"}]}, "functions: must be [] or null"),
    (CHAT, {"messages": [MESSAGE], "include_reasoning": False}, "needs the server's option reas"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, 1]}]},
        "a message's tool_calls must have function.name, got 1",
    ),
    (
        CHAT,
        {"messages": [{**MESSAGE, "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "arguments of a message's tool_calls must be a JSON object, got '['",
    ),
    # A number is no text, and no truth value.
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens: Input should be a valid int"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5.5}, "max_tokens: Input should be a valid int"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n: Input should be a valid integer"),
    (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream: Input should be a valid boolean"),
    (COMPLETIONS, {"prompt": "a", "temperature": "0"}, "temperature: Input should be a valid num"),
    (COMPLETIONS, {"prompt": "a", "model": 7}, "model: Input should be a valid string"),
    (COMPLETIONS, {"prompt": [True, 1]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "store": 0}, "store: must be false or null, got 0"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": 1}}, "include_usage: Input"),
    (CHAT, {"messages": [{**MESSAGE, "role": 1}]}, "messages.0.role: Input should be a valid str"),
    (CHAT, {"messages": [MESSAGE], "logprobs": 1}, "logprobs: Input should be a valid boolean"),
    (
        CHAT,
        {"messages": [MESSAGE], "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
        "chat_template_kwargs must not have chat_template",
    ),
    # The template's own refusal, of whatever type.
    (
        CHAT,
        {"messages": [{"role": "system", "content": "x"}]},
        "the prompt cannot be tokenized: KeyError: 'only users'",
    ),
]


@pytest.mark.parametrize(("path", "body", "text"), BODIES, ids=[text for _, _, text in BODIES])
def test_body(served, path, body, text):
    require_error(send(served, "POST", path, body), 400, text)


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_of_several(served, stream):
    """As if all were refused, before the head of an answer is sent."""
    body = {"prompt": ["fine", "x" * 600], "stream": stream, "max_tokens": 400}
    text = "the prompt has 600 tokens and must be shorter than 512"
    require_error(send(served, "POST", COMPLETIONS, body), 400, text)


def test_other_models_and_routes(served):
    body = {"model": "other", "prompt": "a"}
    text = "the model is 'tiny', not 'other'"
    require_error(send(served, "POST", COMPLETIONS, body), 404, text)
    require_error(send(served, "GET", "/v1/models/other"), 404, text)
    long = send(served, "POST", COMPLETIONS, {"model": "m" * 1_000_000, "prompt": "a"})
    assert len(long[1]["error"]["message"]) < 300
    require_error(send(served, "POST", "/tokenize", body), 404, text)
    require_error(send(served, "GET", "/v1/embeddings"), 404, "Not Found")
    require_error(send(served, "GET", CHAT), 405, "Method Not Allowed")
    require_error(send(served, "POST", "/v1/models", {}), 405, "Method Not Allowed")


def test_as_openai_sees_it(served):
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="shorter than 512"):
            client.completions.create(model="tiny", prompt="x" * 512)
        with pytest.raises(openai.NotFoundError, match="the model is 'tiny'"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="best_of"):
            client.completions.create(model="tiny", prompt="x", best_of=2)


class TestTooLarge:
    LIMIT = 16 << 20

    def test_without_a_length(self, served):
        """Not before the limit, and never more than it."""
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as raw:
            raw.sendall(head(COMPLETIONS, "transfer-encoding: chunked"))
            chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            for _ in range(16):
                raw.sendall(chunk)
            raw.sendall(b"1\r\n \r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += raw.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"the body must have at most 16777216 bytes" in answer

    def test_by_its_length(self, served):
        """Before any of it is sent."""
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as raw:
            raw.sendall(head(CHAT, f"content-length: {self.LIMIT + 1}"))
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 413")

    def test_not_http(self, served):
        for rubbish in (b"\0\1\2\3\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n: \r\n\r\n"):
            with socket.create_connection(("127.0.0.1", served.port), timeout=10) as raw:
                raw.sendall(rubbish)
                assert raw.recv(1 << 16).startswith(b"HTTP/1.1 400")


class TestApiKey:
    @pytest.fixture(scope="class")
    def guarded(self):
        with serving(api_key="sécret") as made:
            yield made

    @pytest.mark.parametrize(
        "header",
        [None, "", "Bearer", "Bearer ", "Bearer other", "sécret", "Bearer sécret2", "bearer x"],
    )
    def test_wrong(self, guarded, header):
        headers = {} if header is None else {"authorization": header.encode()}
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/version"),
            ("POST", "/tokenize"),
            ("POST", COMPLETIONS),
            ("POST", CHAT),
        ):
            found = send(guarded, method, path, {}, headers)
            require_error(found, 401, "the API key is missing or wrong")
            assert found[1]["error"]["type"] == "authentication_error"

    def test_right(self, guarded):
        headers = {"authorization": "Bearer sécret".encode()}
        assert send(guarded, "GET", "/v1/models", headers=headers)[0] == 200
        assert send(guarded, "POST", COMPLETIONS, {"prompt": "a"}, headers)[0] == 200

    def test_health_is_open(self, guarded):
        assert send(guarded, "GET", "/health")[0] == 200

    def test_openai(self, guarded):
        with (
            OpenAI(base_url=f"{guarded.url}/v1", api_key="other") as client,
            pytest.raises(openai.AuthenticationError, match="missing or wrong"),
        ):
            client.models.list()
