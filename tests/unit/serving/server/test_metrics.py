"""``/metrics`` after known traffic: every figure is exact, or what its clients measured."""

import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from absorbed_mla.serving.server import limits
from absorbed_mla.serving.statistics import Statistics
from tests.support.llm import FAILING_PROMPT, serving, until
from tests.unit.serving.server.test_clients import open_request
from tests.unit.serving.server.test_limits import answer_of, connected
from tests.unit.serving.server.test_refusals import COMPLETIONS, head, send

STOP_AT_A = {"stop_token_ids": [ord("a")]}


def metrics_of(served) -> dict[str, float]:
    """By name and labels, but for the model's; without a request, which would be counted."""
    found = {}
    for family in text_string_to_metric_families(
        served.http.config.app.state.metrics.text().decode()
    ):
        for one in family.samples:
            labels = [f'{k}="{v}"' for k, v in sorted(one.labels.items()) if k != "model_name"]
            found[one.name + (f"{{{','.join(labels)}}}" if labels else "")] = one.value
    return found


def of_vllm(values: dict[str, float], *names: str) -> dict[str, float]:
    return {name: values[f"vllm:{name}"] for name in names}


def client_of(served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)


def complete(client, prompt, **fields):
    return client.completions.create(model="tiny", prompt=prompt, **fields)


def reasons(values: dict[str, float]) -> dict[str, float]:
    name = 'vllm:request_success_total{finished_reason="%s"}'
    return {one: values[name % one] for one in ("stop", "length", "abort", "error")}


def test_before_any_request():
    """All names of counters and histograms are there, at 0, so that rates begin with it."""
    with serving() as served:
        values = metrics_of(served)
    assert reasons(values) == dict.fromkeys(("stop", "length", "abort", "error"), 0)
    assert not any(value for name, value in values.items() if name.startswith("vllm:"))
    assert values["process_resident_memory_bytes"] > 1 << 20


def test_requests_and_tokens():
    with serving() as served, client_of(served) as client:
        complete(client, "hello", max_tokens=5, n=2)
        complete(client, "hello", max_tokens=3, stop="l")
        complete(client, "ahello", max_tokens=8, extra_body=STOP_AT_A)
        complete(client, ["x" * 100, "y"], max_tokens=4)
        with pytest.raises(openai.InternalServerError):
            complete(client, FAILING_PROMPT)
        served.runner.step_seconds = 0.01
        raw = open_request(served, max_tokens=400, stream=True)
        assert raw.recv(10_000).startswith(b"HTTP/1.1 200")
        raw.close()
        until(lambda: reasons(metrics_of(served))["abort"])
        # Refused: nothing of them runs.
        for fields in ({"model": "other", "prompt": "a"}, {"model": "tiny", "prompt": [[300]]}):
            with pytest.raises(openai.APIStatusError):
                client.completions.create(**fields)
        values = metrics_of(served)
        generated = int(values["vllm:generation_tokens_total"]) - (10 + 2 + 6 + 8 + 2)
        assert 0 < generated < 400
    assert reasons(values) == {"length": 4, "stop": 2, "error": 1, "abort": 1}
    prompts = 5 + 5 + 6 + 100 + 1 + len(FAILING_PROMPT.encode()) + len("some text")
    tokens = {"prompt_tokens_total": prompts, "request_prompt_tokens_sum": prompts}
    tokens["request_generation_tokens_sum"] = values["vllm:generation_tokens_total"]
    # Of every output, the tokens after its first one.
    tokens["inter_token_latency_seconds_count"] = 8 + 1 + 5 + 3 + 3 + 1 + generated - 1
    tokens['request_generation_tokens_bucket{le="5.0"}'] = 5
    assert of_vllm(values, *tokens) == tokens
    every = ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token")
    phases = [f"request_{one}_time" for one in ("queue", "prefill", "decode", "inference")]
    for name in (*every, *phases):
        assert values[f"vllm:{name}_seconds_count"] == 7, name
        assert values[f'vllm:{name}_seconds_bucket{{le="+Inf"}}'] == 7


def test_outputs_of_different_lengths(served_slowly):
    """A token that one output alone gets took a step, not as many as there are outputs."""
    served = served_slowly
    with client_of(served) as client:
        # The output of index i has 16 - i tokens.
        complete(client, "a" + "b" * 15, max_tokens=20, n=16, extra_body=STOP_AT_A)
    values = metrics_of(served)
    assert values["vllm:generation_tokens_total"] == 136
    assert values["vllm:inter_token_latency_seconds_count"] == 120
    for name in ("inter_token_latency", "request_time_per_output_token"):
        count = values[f"vllm:{name}_seconds_count"]
        assert 0.02 <= values[f"vllm:{name}_seconds_sum"] / count < 0.035


@pytest.fixture
def served_slowly():
    with serving() as made:
        made.runner.step_seconds = 0.02
        yield made


def test_times_are_those_of_clients(served_slowly):
    """TTFT, whole and per token; and phases add up to them."""
    served, measured = served_slowly, []

    def ask(tokens: int) -> None:
        began, times = time.monotonic(), []
        with open_request(served, max_tokens=tokens, stream=True) as raw:
            while not (received := raw.recv(1 << 16)).endswith(b"0\r\n\r\n"):
                times += [time.monotonic()] * (b"data: {" in received)
        measured.append((times[0] - began, time.monotonic() - began, times[-1] - times[0]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, (5, 10, 15, 20)))
    values = metrics_of(served)

    def total(name: str) -> float:
        return values[f"vllm:{name}_seconds_sum"]

    first, whole, between = map(sum, zip(*measured))
    # Clients also connect, send and read: four of them on a busy machine.
    assert first - 1.0 < total("time_to_first_token") <= first
    assert whole - 1.0 < total("e2e_request_latency") <= whole
    assert total("request_decode_time") == pytest.approx(between, abs=0.5)
    assert total("inter_token_latency") == pytest.approx(total("request_decode_time"))
    queue, prefill = total("request_queue_time"), total("request_prefill_time")
    assert queue + prefill == pytest.approx(total("time_to_first_token"), abs=0.005)
    inference = prefill + total("request_decode_time")
    assert total("request_inference_time") == pytest.approx(inference, abs=0.005)


def test_queue_time(served_slowly):
    """Also before the model's thread takes a request, which is busy with a step."""
    served = served_slowly
    served.runner.go.clear()
    with client_of(served) as client, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(complete, client, "ab", max_tokens=1) for _ in range(2)]
        assert served.runner.started.wait(10)
        time.sleep(0.3)
        served.runner.go.set()
        for one in both:
            one.result(10)
    values = metrics_of(served)
    assert 0.5 < values["vllm:request_queue_time_seconds_sum"] < 2
    assert values["vllm:request_prefill_time_seconds_sum"] < 0.2


@pytest.mark.parametrize("parser", ["httptools", "h11"])
def test_answers_by_status(monkeypatch, parser):
    """Those of the application, and those of requests that it never sees, or not as a whole."""
    monkeypatch.setattr(limits, "_SECONDS", 0.3)
    if parser == "h11":
        monkeypatch.setattr(limits, "HttpToolsProtocol", None)
    elif limits.HttpToolsProtocol is None:
        pytest.skip("needs httptools")
    slow, body = b"POST / HTTP/1.1\r\nhost: ", head(COMPLETIONS, "content-length: 9") + b"{"
    long_head = b"POST / HTTP/1.1\r\nx: " + b"a" * (limits.HEAD_BYTES + 100)
    chunks = head(COMPLETIONS, "transfer-encoding: chunked") + b"100000\r\n"
    with serving(http_options={"max_body_bytes": 1 << 12}) as served:
        for sent in (slow, body, long_head, b"nonsense\r\n\r\n", chunks + b" " * (1 << 18)):
            with connected(served) as raw:
                raw.sendall(sent)
                assert answer_of(raw).startswith(b"HTTP/1.1 4")
        for path, content in ((COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, b"{"), ("/b", b"")):
            send(served, "POST", path, content)
        send(served, "GET", "/health")
        send(served, "DELETE", "/v1/completions/")

        def fail(*_):
            raise RuntimeError("a mistake in the server")

        monkeypatch.setattr(served.service, "tokenize", fail)
        with pytest.raises(urllib.error.HTTPError, match="500"):
            content, kind = b'{"prompt": "a"}', {"content-type": "application/json"}
            urllib.request.urlopen(urllib.request.Request(f"{served.url}/tokenize", content, kind))
        served.runner.step_seconds = 0.01
        gone = open_request(served, max_tokens=400, n=2)
        until(lambda: served.runner.num_added == 3)
        gone.close()
        until(lambda: key(COMPLETIONS, 499) in metrics_of(served))
        values = metrics_of(served)
    refused_head = 431 if parser == "httptools" else 400
    expected = {
        key("other", 408, "other"): 1,
        key(COMPLETIONS, 408): 1,
        key("other", 400, "other"): 1 + (refused_head == 400),
        key(COMPLETIONS, 413): 1,
        key(COMPLETIONS, 200): 1,
        key(COMPLETIONS, 400): 1,
        key(COMPLETIONS, 405, "other"): 1,
        key(COMPLETIONS, 499): 1,
        key("other", 404): 1,
        key("/health", 200, "GET"): 1,
        key("/tokenize", 500): 1,
    }
    if refused_head == 431:
        expected[key("other", 431, "other")] = 1
    assert {k: v for k, v in values.items() if k.startswith("http_requests_total")} == expected


def key(handler: str, status: int, method: str = "POST") -> str:
    return f'http_requests_total{{handler="{handler}",method="{method}",status="{status}"}}'


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_end_of_the_model_and_of_the_server(reason):
    """What ran has ended, too."""
    with serving(http_options={"shutdown_timeout": 0}) as served:
        served.runner.step_seconds = 0.01
        raw = open_request(served, max_tokens=400, n=2, stream=True)
        assert raw.recv(10_000).startswith(b"HTTP/1.1 200")
        if reason == "error":
            served.runner.error = RuntimeError("rank 1 has ended")
        else:
            served.http.should_exit = True
        until(lambda: not served.service.is_alive)
        until(lambda: reasons(metrics_of(served))[reason] == 2)
        raw.close()
    assert sum(reasons(metrics_of(served)).values()) == 2


def test_engine():
    """Its statistics, which are read each second."""
    now = {"running": 3, "waiting": 5, "blocks": 8, "used_blocks": 6}
    totals = {"evicted": 1, "prefix_queries": 200, "prefix_hits": 127}
    drafts = {"drafts": 5, "drafted": 9, "accepted": 4}
    with serving() as served:
        served.runner.statistics = lambda: Statistics(**now, **totals, **drafts)
        until(lambda: metrics_of(served)["vllm:num_requests_running"] == 3)
        values = metrics_of(served)
    expected = {
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.75,
        "prefix_cache_queries_total": 200,
        "prefix_cache_hits_total": 127,
        "num_preemptions_total": 1,
        "spec_decode_num_drafts_total": 5,
        "spec_decode_num_draft_tokens_total": 9,
        "spec_decode_num_accepted_tokens_total": 4,
    }
    assert of_vllm(values, *expected) == expected


def test_over_http():
    """With the type that Prometheus asks for."""
    with serving() as served, urllib.request.urlopen(f"{served.url}/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "# TYPE vllm:request_success_total counter" in answer.read().decode()
