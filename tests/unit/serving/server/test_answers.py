"""Answers of the server as OpenAI's client reads them: whole, streamed, with log-probabilities."""

import json
import math
import time
import urllib.error
import urllib.request

import pytest
from openai import APIError, InternalServerError, OpenAI

import absorbed_mla
from absorbed_mla.serving.outputs import Logprob
from absorbed_mla.serving.server.logprobs import TextOffsets, text_logprobs
from tests.support.llm import (
    FAILING_PROMPT,
    FAILURE,
    LOGPROB,
    PROMPT_LOGPROBS,
    SECOND,
    expected_text,
    serving,
)
from tests.unit.serving.server.test_metrics import complete, metrics_of


@pytest.fixture(scope="module")
def served():
    with serving(scheduling_policy="priority") as made:
        yield made


def chat(client, text, **fields):
    message = {"role": "user", "content": text}
    return client.chat.completions.create(model="tiny", messages=[message], **fields)


def post(served, path, **body) -> dict:
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(served.url + path, json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def get(served, path) -> str:
    with urllib.request.urlopen(served.url + path) as answer:
        return answer.read().decode()


class TestCompletions:
    def test_one_prompt(self, client):
        answer = complete(client, "hello", max_tokens=5)
        [choice] = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == ("olleh", "length", 0)
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 5, 10)

    def test_default_length(self, client):
        """OpenAI's."""
        assert complete(client, "hello").usage.completion_tokens == 16

    @pytest.mark.parametrize(
        "prompt",
        [["one", "two", "three"], [list(b"one"), list(b"two"), list(b"three")]],
        ids=["texts", "token ids"],
    )
    def test_several_prompts_with_several_outputs(self, client, prompt):
        answer = complete(client, prompt, n=2, max_tokens=4)
        found = {choice.index: choice.text for choice in answer.choices}
        assert found == {
            2 * i + j: expected_text(text, j, 4)
            for i, text in enumerate(("one", "two", "three"))
            for j in range(2)
        }
        assert answer.usage.prompt_tokens == 11 and answer.usage.completion_tokens == 24

    def test_one_prompt_of_token_ids(self, client):
        assert complete(client, list(b"abc"), max_tokens=3).choices[0].text == "cba"

    def test_stop(self, client):
        [choice] = complete(client, "abcdef", stop=["dc", "no"]).choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("fe", "stop", "dc")
        extra = {"stop_token_ids": [ord("d")]}
        [choice] = complete(client, "abcdef", extra_body=extra).choices
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("fe", "stop", ord("d"))
        assert complete(client, "abcdef", max_tokens=1).choices[0].stop_reason is None

    def test_logprobs(self, client):
        [choice] = complete(client, "ab", max_tokens=2, logprobs=2).choices
        assert choice.logprobs.tokens == ["b", "a"]
        assert choice.logprobs.token_logprobs == [LOGPROB] * 2
        assert choice.logprobs.top_logprobs[0] == {"b": LOGPROB, "c": SECOND}
        assert complete(client, "ab").choices[0].logprobs is None

    def test_logprobs_of_tokens_with_the_same_text(self, client):
        """Both are U+FFFD alone: neither hides the other, and clients find the generated one."""
        [choice] = complete(client, "é", max_tokens=2, logprobs=2).choices
        assert choice.logprobs.tokens == ["bytes:\\xa9", "bytes:\\xc3"]
        assert choice.logprobs.top_logprobs == [
            {"bytes:\\xa9": LOGPROB, "bytes:\\xaa": SECOND},
            {"bytes:\\xc3": LOGPROB, "bytes:\\xc4": SECOND},
        ]
        # The end of a text and its neighbour have none at all.
        place = {256: Logprob(-1.0, 1, "", b""), 300: Logprob(-2.0, 2, "", b"")}
        assert text_logprobs([place], TextOffsets()) == {
            "tokens": [""],
            "token_logprobs": [-1.0],
            "top_logprobs": [{"": -1.0, "token_id:300": -2.0}],
            "text_offset": [0],
        }
        place = {7: Logprob(-1.0, 1), 8: Logprob(-2.0, 2)}
        assert text_logprobs([place], TextOffsets())["top_logprobs"] == [
            {"token_id:7": -1.0, "token_id:8": -2.0}
        ]

    def test_text_offset(self, client):
        """In characters of the text; parts of a character are where it begins."""
        [choice] = complete(client, [97, 0xA9, 0xC3, 98], max_tokens=5, logprobs=0).choices
        assert choice.text == "béab" and choice.logprobs.text_offset == [0, 1, 1, 2, 3]

    def test_tokens_by_their_ids(self, client):
        extra = {"return_tokens_as_token_ids": True}
        [choice] = complete(client, "ab", max_tokens=1, logprobs=2, extra_body=extra).choices
        assert choice.logprobs.tokens == ["token_id:98"]
        assert choice.logprobs.top_logprobs == [{"token_id:98": LOGPROB, "token_id:99": SECOND}]
        fields = {"max_tokens": 1, "logprobs": True, "extra_body": extra}
        [one] = chat(client, "a", **fields).choices[0].logprobs.content
        assert (one.token, one.bytes) == ("token_id:59", [ord(";")])

    @pytest.mark.parametrize("prompt", [["abc", "é"], [list(b"abc"), list("é".encode())]])
    def test_echo(self, client, prompt):
        answer = complete(client, prompt, max_tokens=2, echo=True)
        texts = [choice.text for choice in answer.choices]
        assert texts == ["abccb", "é\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"]
        pieces = complete(client, prompt, max_tokens=2, echo=True, stream=True)
        streamed = ["", ""]
        for piece in pieces:
            streamed[piece.choices[0].index] += piece.choices[0].text
        assert streamed == texts
        answer = complete(client, prompt, max_tokens=0, echo=True)
        assert [choice.text for choice in answer.choices] == ["abc", "é"]
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage.completion_tokens == 0

    def test_text_beyond_ascii(self, client):
        answer = complete(client, "é", max_tokens=2)
        # Its two bytes backwards are no character.
        assert answer.choices[0].text == "\N{REPLACEMENT CHARACTER}" * 2


class TestChat:
    def test_messages(self, client):
        answer = chat(client, "hi", max_tokens=8)
        [choice] = answer.choices
        assert choice.message.content == ";ih:resu"
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")

    def test_token_ids(self, client):
        """Those of the prompt once, beside the choices."""
        ask = {"max_tokens": 3, "extra_body": {"return_token_ids": True}}
        whole = chat(client, "hi", **ask)
        assert bytes(whole.prompt_token_ids) == b"user:hi;"
        assert bytes(whole.choices[0].token_ids) == b";ih"
        first, *others = chat(client, "hi", stream=True, **ask)
        assert first.prompt_token_ids == whole.prompt_token_ids
        assert not any(hasattr(piece, "prompt_token_ids") for piece in others)
        tokens = [token for piece in (first, *others) for token in piece.choices[0].token_ids]
        assert bytes(tokens) == b";ih"

    def test_parts(self, client):
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        assert chat(client, parts, max_tokens=3).choices[0].message.content == ";ih"

    def test_length(self, client):
        """The newer name wins, and without either the context is the limit."""
        assert chat(client, "hi", max_completion_tokens=3).usage.completion_tokens == 3
        both = chat(client, "hi", max_completion_tokens=2, max_tokens=5)
        assert both.usage.completion_tokens == 2
        assert chat(client, "hi").usage.total_tokens == 512

    def test_logprobs(self, client):
        [choice] = chat(client, "hi", max_tokens=2, logprobs=True, top_logprobs=1).choices
        first, second = choice.logprobs.content
        assert (first.token, first.logprob, first.bytes) == (";", LOGPROB, [ord(";")])
        assert [one.token for one in first.top_logprobs] == [";"] and second.token == "i"
        [choice] = chat(client, "hi", max_tokens=2, logprobs=True).choices
        assert choice.logprobs.content[0].top_logprobs == []

    def test_bytes_join_to_the_text(self, client):
        """Also those of tokens that are part of a character."""
        fields = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2}
        [choice] = chat(client, "\u0441\u0430", **fields).choices
        content = choice.logprobs.content
        assert [one.bytes for one in content] == [[byte] for byte in b";\xb0\xd0"]
        assert [one.bytes for one in content[1].top_logprobs] == [[0xB0], [0xB1]]
        assert content[1].token == "\N{REPLACEMENT CHARACTER}"


class TestStreams:
    """What is streamed, put together, is the whole answer."""

    def test_completions(self, client):
        fields = {"max_tokens": 30, "n": 2, "stop": ["xyz"], "logprobs": 1}
        fields["extra_body"] = {"return_token_ids": True}
        prompts = ["streamed", "two", "z é x w"]
        whole = complete(client, prompts, **fields)
        texts, ends, logprobs, offsets, tokens = {}, {}, {}, {}, {}
        for piece in complete(client, prompts, stream=True, **fields):
            [choice] = piece.choices
            i = choice.index
            assert i not in ends and piece.object == "text_completion"
            texts[i] = texts.get(i, "") + choice.text
            logprobs.setdefault(i, []).extend(choice.logprobs.tokens)
            offsets.setdefault(i, []).extend(choice.logprobs.text_offset)
            assert (i in tokens) == (getattr(choice, "prompt_token_ids", None) is None)
            tokens.setdefault(i, []).extend(choice.token_ids)
            if choice.finish_reason:
                ends[i] = choice.finish_reason
        for choice in whole.choices:
            i = choice.index
            assert (texts[i], ends[i]) == (choice.text, choice.finish_reason)
            assert logprobs[i] == choice.logprobs.tokens
            assert offsets[i] == choice.logprobs.text_offset
            assert tokens[i] == choice.token_ids
            assert choice.prompt_token_ids == list(prompts[i // 2].encode())

    def test_chat(self, client):
        fields = {"max_tokens": 20, "logprobs": True, "top_logprobs": 1}
        whole = chat(client, "hello", **fields)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces = list(chat(client, "hello", **fields, **options))
        *pieces, last = pieces
        assert last.choices == [] and last.usage == whole.usage
        deltas = [piece.choices[0].delta for piece in pieces]
        assert "".join(delta.content for delta in deltas) == whole.choices[0].message.content
        assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        content = [one for piece in pieces for one in piece.choices[0].logprobs.content]
        assert content == whole.choices[0].logprobs.content
        assert pieces[-1].choices[0].finish_reason == "length"
        assert len({piece.id for piece in pieces}) == 1

    def test_counts_so_far(self, client):
        """In every event, those of its output."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        ask = {"max_tokens": 3, "n": 2, "stream": True, "stream_options": options}
        *pieces, last = complete(client, ["abc", "de"], **ask)
        found = {}
        for piece in pieces:
            usage, index = piece.usage, piece.choices[0].index
            found[index] = usage.completion_tokens
            assert usage.prompt_tokens == (3 if index < 2 else 2)
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert found == dict.fromkeys(range(4), 3)
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 12)
        ask["stream_options"] = {"continuous_usage_stats": True}
        assert all(piece.usage is None for piece in complete(client, "abc", **ask))

    def test_held_back(self, client, served):
        """The beginning of a stop string is not shown before it is known to be none."""
        served.runner.step_seconds = 0.02
        try:
            stream = complete(client, "abcdef", stop=["dcbX"], max_tokens=6, stream=True)
            texts = [piece.choices[0].text for piece in stream]
        finally:
            served.runner.step_seconds = 0.0
        shown = "".join(texts)
        assert shown == "fedcba" and not any(text.endswith(("d", "dc")) for text in texts)

    def test_the_wire(self, served):
        """Server-sent events, the last of which says that there are no more."""
        body = {"prompt": "abc", "max_tokens": 2, "stream": True}
        request = urllib.request.Request(
            f"{served.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            *events, last, rest = answer.read().decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)


class TestFailures:
    """The model fails at one request: its client is not to blame, and the others go on."""

    def test_whole(self, client, caplog):
        with pytest.raises(InternalServerError) as found:
            complete(client, ["fine", FAILING_PROMPT], logprobs=0)
        assert found.value.status_code == 500
        assert found.value.body == {
            "message": FAILURE,
            "type": "server_error",
            "param": None,
            "code": 500,
        }
        assert f"has failed: {FAILURE}" in caplog.text
        assert chat(client, "hi", max_tokens=3).choices[0].message.content == ";ih"

    def test_streamed(self, client, served, monkeypatch):
        """After the pieces that there are, an event with the error, and no end."""
        found = []
        # The server has sent the pieces before the model fails.
        monkeypatch.setattr(served.runner, "step_seconds", 0.25)
        with pytest.raises(APIError, match=FAILURE):
            for piece in complete(client, FAILING_PROMPT, logprobs=0, stream=True):
                found.append(piece.choices[0].text)
        assert "".join(found) == "on"
        # As long as nothing has been sent, an answer of its own.
        monkeypatch.setattr(served.runner, "tokens_before_failure", 0)
        with pytest.raises(InternalServerError, match=FAILURE):
            complete(client, FAILING_PROMPT, stream=True)

    def test_counted(self, served):
        assert metrics_of(served)['vllm:request_success_total{finished_reason="error"}'] >= 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_log_probs_that_are_no_numbers(self, client, served, monkeypatch, stream):
        """There is no JSON of them."""
        monkeypatch.setattr(served.runner, "log_prob", math.nan)
        with pytest.raises(APIError, match="the model's log-probabilities are NaN"):
            list(complete(client, "abc", logprobs=1, stream=stream))
        assert complete(client, "abc", max_tokens=3).choices[0].text == "cba"


class TestEchoWithLogprobs:
    """As lm-eval reads a prompt's log-probabilities."""

    @pytest.fixture(scope="class")
    def client(self):
        with (
            serving(prompt_logprobs=True) as served,
            OpenAI(base_url=f"{served.url}/v1", api_key="any") as made,
        ):
            yield made

    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_of_the_prompt(self, client, max_tokens):
        fields = {"max_tokens": max_tokens, "logprobs": 1, "echo": True}
        [choice] = complete(client, [list("aéb".encode())], **fields).choices
        found, end = choice.logprobs, 4 + max_tokens
        assert choice.text == "aéb" + "b" * max_tokens
        assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "b"][:end]
        assert found.token_logprobs == [None, *PROMPT_LOGPROBS[1:4], LOGPROB][:end]
        assert found.top_logprobs[:2] == [None, {"bytes:\\xc3": PROMPT_LOGPROBS[1], "z": -0.125}]
        assert found.text_offset == [0, 1, 1, 2, 3][:end]
        assert len(found.top_logprobs) == end

    def test_one_token(self, client):
        """Its log-probability is not known."""
        [choice] = complete(client, "a", max_tokens=0, logprobs=1, echo=True).choices
        assert choice.logprobs.tokens == ["a"] and choice.logprobs.token_logprobs == [None]


def test_offsets_of_what_the_text_lacks():
    """Special tokens in front of a prompt, and the space that a decoder drops there."""
    offsets, text = TextOffsets(), "one two"
    tokens = [b"<s>", b" one", b" two", b"</s>"]
    assert [offsets.add(Logprob(0, None, "", one), text) for one in tokens] == [0, 0, 3, 7]


def test_cached_tokens(client):
    """The last token of a prompt is computed, also if the cache has its block."""
    for length, cached in ((63, 0), (64, 63), (100, 64)):
        usage = complete(client, "x" * length, max_tokens=1).usage
        assert usage.prompt_tokens_details.cached_tokens == cached


def test_cache_salt(client, served):
    """Of every prompt of a request."""
    before, salt = len(served.runner.salts), {"cache_salt": "x"}
    for prompt in ("a", ["a", "b"], [7, 8]):
        complete(client, prompt, extra_body=salt)
    complete(client, "a", extra_body={**salt, "add_special_tokens": False})
    chat(client, "a", extra_body=salt)
    chat(client, "a", extra_body={"cache_salt": None})
    assert served.runner.salts[before:] == [*"xxxxxx", None]


def test_priority(client, served):
    """Of every prompt of a request."""
    before = len(served.runner.priorities)
    complete(client, ["a", "b"], extra_body={"priority": -3})
    chat(client, "a", extra_body={"priority": 2})
    client.responses.create(model="tiny", input="a", extra_body={"priority": 5})
    assert served.runner.priorities[before:] == [-3, -3, 2, 5]


def test_models(client):
    [model] = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 512)
    assert abs(model.created - time.time()) < 600
    assert client.models.retrieve("tiny") == model


class TestRequestId:
    def test_answers(self, client):
        """The header, the body's or one of the server's, in that order."""
        create = client.completions.with_raw_response.create
        ask = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        body, header = {"request_id": "of-body"}, {"X-Request-Id": "of-header"}
        for extra, name in (
            ({"extra_body": body}, "of-body"),
            ({"extra_headers": header}, "of-header"),
            ({"extra_body": body, "extra_headers": header}, "of-header"),
        ):
            answer = create(**ask, **extra)
            assert answer.headers["x-request-id"] == name
            assert answer.parse().id == f"cmpl-{name}"
        names = [create(**ask) for _ in range(2)]
        assert len({one.headers["x-request-id"] for one in names}) == 2
        assert names[0].parse().id == f"cmpl-{names[0].headers['x-request-id']}"

    def test_streams_and_errors(self, client):
        header = {"X-Request-Id": "mine"}
        pieces = complete(client, "ab", max_tokens=2, stream=True, extra_headers=header)
        assert pieces.response.headers["x-request-id"] == "mine"
        assert {piece.id for piece in pieces} == {"cmpl-mine"}
        with pytest.raises(APIError) as found:
            complete(client, "ab", n=0, extra_headers=header)
        assert found.value.response.headers["x-request-id"] == "mine"

    def test_lengths(self, client):
        """None at all is none; one of thousands of characters would be in every event."""
        assert complete(client, "a", extra_headers={"X-Request-Id": ""}).id != "cmpl-"
        assert complete(client, "a", extra_headers={"X-Request-Id": "i" * 200}).id[5:] == "i" * 200
        with pytest.raises(APIError, match="X-Request-Id must have at most 200 characters"):
            complete(client, "a", extra_headers={"X-Request-Id": "i" * 201})


class TestTokenize:
    def test_prompt(self, served):
        found = post(served, "/tokenize", prompt="aé")
        assert found == {
            "count": 3,
            "max_model_len": 512,
            "tokens": [97, 195, 169],
            "token_strs": None,
        }
        found = post(served, "/tokenize", prompt="ab", return_token_strs=True)
        assert found["token_strs"] == ["a", "b"]
        assert post(served, "/detokenize", tokens=[97, 195, 169]) == {"prompt": "aé"}

    def test_messages(self, served):
        found = post(served, "/tokenize", messages=[{"role": "user", "content": "a"}])
        assert bytes(found["tokens"]) == b"user:a;"


def test_paths(served):
    """Trailing slashes are taken, also where a body comes with them."""
    assert json.loads(get(served, "/version"))["version"] == absorbed_mla.__version__
    assert json.loads(get(served, "/ping/")) == {"status": "ok"}
    assert json.loads(get(served, "/v1/models/"))["data"][0]["id"] == "tiny"
    assert post(served, "/v1/completions/", prompt="ab", max_tokens=1)["choices"][0]["text"] == "b"


def test_cross_origin_requests():
    """Only if the option says so, and then also without the key that the answer needs."""
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    def preflight(served):
        url = f"{served.url}/v1/completions"
        return urllib.request.Request(url, headers=headers, method="OPTIONS")

    with serving(api_key="key", origins=["https://a.example"]) as served:
        with urllib.request.urlopen(preflight(served)) as answer:
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
        headers["Origin"] = "https://b.example"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(preflight(served))
    with serving() as served, pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(preflight(served))


def test_health(served):
    assert json.loads(get(served, "/health")) == {"status": "ok"}
