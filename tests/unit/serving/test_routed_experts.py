"""``enable_return_routed_experts``: each token's experts are those of a training forward.

In fp64, in which no two scores tie.
"""

import base64
import io

import numpy as np
import pytest
import torch

from absorbed_mla import SamplingParams
from absorbed_mla.router_replay import decoder_routers
from absorbed_mla.serving.output_processor import OutputProcessor
from absorbed_mla.serving.outputs import CompletionOutput, RequestOutput
from absorbed_mla.serving.prompts import EncodedPrompt, of_output
from absorbed_mla.serving.request_results import Progress, Result
from absorbed_mla.serving.server.chat_answer import ChatAnswer
from absorbed_mla.serving.server.chat_request import ChatRequest
from absorbed_mla.serving.server.protocol import Answer, CompletionRequest
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer
from tests.support import world
from tests.support.engine import CHUNKED, KEPT, add, engine_of, generating_model, step_to_the_end
from tests.support.experts import grouped_model
from tests.support.refusal import refusal
from tests.support.routed_experts import (
    BIASED,
    REQUESTS,
    assert_forgotten,
    bias,
    biased_model,
    own_experts,
    roll_out,
)

ENGINES = {
    "whole prompts": {},
    "by Megatron's steps": {"decode_loop": False},
    "chunks, evicted": {**CHUNKED, "blocks": 5},
    "paused": {**CHUNKED, "blocks": 7, "paused_blocks": 2},
    "prefix cache": {**KEPT, "max_requests": 2},
    "sizes of graphs": {"num_cuda_graphs": 4},
    "drafts": {"num_speculative_tokens": 1},
    "drafts, evicted": {"num_speculative_tokens": 1, **CHUNKED, **KEPT, "blocks": 6},
}


@pytest.fixture(scope="module")
def model():
    return bias(biased_model(mtp_num_layers=1))


def check(model, texts, experts):
    """Of all tokens but the last, which the model has not read."""
    for text, found in zip(texts, experts, strict=True):
        assert found.dtype == np.uint8
        expected = own_experts(model, text)[:-1]
        assert torch.equal(torch.as_tensor(found).sort(-1).values.long(), expected)


def check_results(model, results, requests=REQUESTS):
    texts = [[*request.prompt, *result.tokens] for request, result in zip(requests, results)]
    check(model, texts, [result.routed_experts for result in results])


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_as_in_training(model, options):
    rollout = roll_out(model, **options)
    check(model, rollout.texts, rollout.requests)


def test_grouped_experts():
    """Those that ``LLM(folder)`` has, whose router gives its choice away."""
    on_gpu = world.device().type == "cuda"
    # PyTorch's grouped product on a GPU takes no other.
    dtype = torch.bfloat16 if on_gpu else torch.float64
    trained = bias(biased_model(dtype))
    grouped = grouped_model(
        dtype=dtype, **{**BIASED, "init_method_std": 0.4, "cache_mla_latents": True}
    )
    grouped.load_state_dict(trained.state_dict())
    rollout = roll_out(grouped, **CHUNKED)
    equal = [
        (torch.as_tensor(found).sort(-1).values == own_experts(trained, text)[:-1]).all(-1)
        for text, found in zip(rollout.texts, rollout.requests, strict=True)
    ]
    # But for near ties of bf16.
    assert torch.cat(equal).double().mean() >= (0.9 if on_gpu else 1.0)


def test_launched_ahead(model):
    """A request that a stop token ends has a row in the step that was launched before."""
    texts = roll_out(model).texts
    engine = engine_of(model, enable_return_routed_experts=True, decode_loop=True)
    engine.scheduler.launches_ahead = True
    stops = [text[len(request.prompt) + 3] for text, request in zip(texts, REQUESTS)]
    params = [one.sampling().replace(stop_token_ids=[stop]) for one, stop in zip(REQUESTS, stops)]
    results = engine.generate([request.prompt for request in REQUESTS], params)
    assert any(result.finish == "stop" for result in results)
    check_results(model, results)
    assert_forgotten(engine)


def test_training_in_between(model):
    """Forwards of others are not recorded, and the routers are as they were."""
    engine = engine_of(model, enable_return_routed_experts=True)
    with engine:
        add(engine, REQUESTS[:1])
        engine.step()
        own_experts(model, [1, 2, 3] * 99)
        [result] = step_to_the_end(engine)
    check_results(model, [result], REQUESTS[:1])
    assert all(one.router_replay is None for one in decoder_routers(model, "a test"))


def test_aborted(model):
    """Running, waiting after an eviction, and before a token."""
    engine = engine_of(model, enable_return_routed_experts=True, **CHUNKED, blocks=5)
    with engine:
        numbers = add(engine, REQUESTS)
        while not engine.statistics.evicted:
            engine.step()
        assert engine.host.waiting_request_ids
        for number in numbers:
            engine.abort(number)
        results = step_to_the_end(engine)
    assert any(one.tokens for one in results)
    assert_forgotten(engine)
    begun = [number for number, result in enumerate(results) if result.tokens]
    check_results(model, [results[n] for n in begun], [REQUESTS[n] for n in begun])
    assert all(one.routed_experts is None for one in results if not one.tokens)


class TestOutputs:
    """Of ``LLM``: an output that a stop string ends gets them, too, when its request has ended."""

    def steps(self, **params):
        processor = OutputProcessor(ByteTokenizer(), waits_for_results=True)
        params = SamplingParams(**params)
        prompt = EncodedPrompt(None, "ab", [97, 98], of_output(params, (), ByteTokenizer()))
        processor.add(prompt, params, "it")
        processor.commands()
        return processor

    def claimed(self, processor, progress):
        processor.process([progress])
        return processor.claim(lambda name: True)

    def test_stop_string(self):
        processor = self.steps(stop="d", max_tokens=9)
        assert self.claimed(processor, Progress(0, [99]))
        # The engine has to end it first, and has made another token by then.
        assert not self.claimed(processor, Progress(0, [100]))
        [abort] = processor.commands()
        assert abort.number == 0
        experts = np.arange(4)[:, None, None]
        result = Result([99, 100, 101], finish="abort", routed_experts=experts)
        [output] = self.claimed(processor, Progress(0, [101], result=result))
        assert output.finished and output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].token_ids == [99, 100]
        assert output.outputs[0].routed_experts.tolist() == experts[:3].tolist()

    def test_prompt_start(self):
        processor = self.steps(max_tokens=1, routed_experts_prompt_start=1)
        result = Result([99], finish="length", routed_experts=np.ones((1, 1, 1)))
        [output] = self.claimed(processor, Progress(0, [99], result=result))
        assert output.outputs[0].routed_experts.shape == (1, 1, 1)


def test_prompt_start(model):
    engine = engine_of(model, enable_return_routed_experts=True)
    [request] = REQUESTS[:1]
    whole, part = (
        engine.generate([request.prompt], request.sampling().replace(**start))[0]
        for start in ({}, {"routed_experts_prompt_start": 60})
    )
    assert np.array_equal(part.routed_experts, whole.routed_experts[60:])


@pytest.mark.parametrize("answer", [Answer, ChatAnswer])
def test_json(answer):
    """As vLLM's clients read it."""
    kinds = {"routed_experts": np.uint16, "indexer_topk": np.int32}
    found = {name: np.arange(12, dtype=kind).reshape(2, 2, 3) for name, kind in kinds.items()}
    output = RequestOutput("it", None, [97], [CompletionOutput(0, "b", [98], **found)], True)
    body = CompletionRequest(prompt="a")
    if answer is ChatAnswer:
        body = ChatRequest(messages=[{"role": "user", "content": "a"}])
    [choice] = answer(body, "tiny", "it", ByteTokenizer()).whole([output])["choices"]
    for name, expected in found.items():
        file = io.BytesIO(base64.b64decode(choice[name]))
        read = np.load(file, allow_pickle=False)
        assert read.dtype == expected.dtype and np.array_equal(read, expected)


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"num_moe_experts": None, "moe_layer_freq": 1}, ["num_moe_experts"]),
            ({"moe_router_load_balancing_type": "sinkhorn"}, ["got 'sinkhorn'"]),
        ],
    )
    def test_models(self, fields, words):
        plain = {"moe_router_enable_expert_bias": False, "moe_router_score_function": "softmax"}
        dense = fields.get("num_moe_experts", 8) is None
        one = generating_model(**fields) if dense else biased_model(**plain, **fields)
        with refusal("enable_return_routed_experts", *words):
            engine_of(one, enable_return_routed_experts=True)

    @pytest.mark.parametrize(
        ("options", "start", "words"),
        [
            ({}, 1, ["needs enable_return_routed_experts=True"]),
            ({"enable_return_routed_experts": True}, 126, ["below the prompt's 126, got 126"]),
        ],
    )
    def test_requests(self, model, options, start, words):
        [request] = REQUESTS[:1]
        params = request.sampling().replace(routed_experts_prompt_start=start)
        [result] = engine_of(model, **options).generate([request.prompt], params)
        assert all(word in result.error for word in ["routed_experts_prompt_start", *words])
