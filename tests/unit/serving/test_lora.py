"""Several adapters in one ``LLM``: each request as its adapter alone, merged into the weights."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from absorbed_mla import LLM, AsyncLLM, SamplingParams
from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.lora import (
    LoRARequest,
    load_peft_adapter,
    merge_lora,
    remove_lora,
    slots,
    unmerge_lora,
)
from absorbed_mla.lora.adapter import lora_of
from absorbed_mla.lora.model import attentions
from absorbed_mla.lora.side_stream import SideStream
from absorbed_mla.lora.slots import LoRASlots
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.weights import load
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from tests.conversion.models import Architecture
from tests.support import needs, world
from tests.support.engine import Request, engine_of, step_to_the_end
from tests.support.llm import serving, tiny_folder
from tests.support.log_probs import text_of
from tests.support.parity import trained
from tests.support.refusal import refusal
from tests.support.wide_models import wide_folder

DEVICE = world.device().type
PARAMS = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
RANKS = {"a": 4, "b": 2, "c": 4}
# A whole block of the prefix cache, and more.
PROMPTS = [[*range(3, 73)], [9, 8, 7], [*range(3, 73), 5]]


def write_adapter(
    base: Path, folder: Path, seed: int, rank: int, size: float = 0.25
) -> LoRARequest:
    """LoRA of every linear layer of the attentions of a checkpoint."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    weights = {k: v for f in base.glob("*.safetensors") for k, v in load_file(f).items()}
    for name, weight in weights.items():
        if ".self_attn." in name and name.endswith(("proj.weight", "with_mqa.weight")):
            rows, columns = weight.shape
            for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                key = f"base_model.model.{name.removesuffix('weight')}lora_{factor}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * size
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1.7 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(folder.name, seed + 1, folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def adapters(base) -> dict[str, LoRARequest | None]:
    made = {
        name: write_adapter(base, base.parent / name, seed, rank)
        for seed, (name, rank) in enumerate(RANKS.items())
    }
    return {**made, "base": None}


@pytest.fixture(scope="module")
def alone(base, adapters) -> dict[str, list]:
    """Results of each adapter, merged into the weights of a model in this process."""
    options = LLMOptions.of({**OPTIONS, "tensor_parallel_size": 1})
    model, found = load_model(open_model(base), options, world.device()), {}
    sampling = [Request(prompt, PARAMS.max_tokens).sampling(log_probs=True) for prompt in PROMPTS]
    for name, adapter in adapters.items():
        if adapter is not None:
            load_peft_adapter(model, adapter.lora_path)
            merge_lora(model)
        with engine_of(model) as engine:
            found[name] = engine.generate(PROMPTS, sampling)
        if adapter is not None:
            unmerge_lora(model)
            remove_lora(model)
    return found


OPTIONS = {"dtype": "float32", "device": DEVICE, "max_model_len": 128, "cache_tokens": 2048}
SLOTS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
LORA = {**OPTIONS, **SLOTS}


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=needs.gpu)],
    ids=["eager", "cuda_graphs"],
)
def llm(base, request):
    with LLM(base, tokenizer="bytes", cuda_graphs=request.param, **LORA) as llm:
        yield llm


def close(found, expected) -> bool:
    output = found.outputs[0]
    logprob = pytest.approx(sum(expected.log_probs), abs=1e-3)
    return output.token_ids == expected.tokens and output.cumulative_logprob == logprob


def test_a_mixed_batch(llm, adapters, alone):
    """Every request as its adapter alone; the prefix cache is not shared among adapters."""
    order = ["a", "base", "b"] * 2
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(3)] + [PROMPTS[2]] * 3
    outputs = llm.generate(
        prompts, PARAMS, use_tqdm=False, lora_request=[adapters[name] for name in order]
    )
    places = [0, 1, 2, 2, 2, 2]
    for output, name, place in zip(outputs, order, places, strict=True):
        assert close(output, alone[name][place]), (name, place)
    texts = {tuple(alone[name][2].tokens) for name in ("a", "b", "base")}
    assert len(texts) == 3
    loras = [adapters["a"], None]
    again = llm.generate([PROMPTS[2]] * 2, PARAMS, lora_request=loras, use_tqdm=False)
    assert [one.num_cached_tokens for one in again] == [64, 64]


def test_an_adapter_takes_the_place_of_one_that_rests(llm, adapters, alone):
    """Also step by step, and beside one that runs; the third at a time waits, others behind it."""
    llm.add_request(PROMPTS[1], PARAMS, "first", adapters["a"])
    llm.add_request(PROMPTS[1], PARAMS, "second", adapters["b"])
    llm.step()
    llm.add_request(PROMPTS[1], PARAMS, "aborted", adapters["c"])
    llm.add_request(PROMPTS[1], PARAMS, "third", adapters["c"])
    llm.add_request(PROMPTS[1], PARAMS, "behind it", adapters["b"])
    llm.abort("aborted")
    ended = {}
    while llm.has_unfinished_requests():
        ended |= {one.request_id: one for one in llm.step() if one.finished}
    assert next(iter(ended)) == "aborted" and [*ended].index("third") > 2
    assert ended.pop("aborted").outputs[0].finish_reason == "abort"
    for name, adapter in {"first": "a", "second": "b", "third": "c", "behind it": "b"}.items():
        assert close(ended[name], alone[adapter][1]), name
    [output] = llm.generate(PROMPTS[1], PARAMS, use_tqdm=False, lora_request=adapters["c"])
    assert close(output, alone["c"][1])
    [output] = llm.generate(PROMPTS[1], PARAMS, use_tqdm=False, lora_request=adapters["b"])
    assert close(output, alone["b"][1])


def test_more_adapters_in_a_call_than_may_run(llm, adapters, alone):
    order = "abcacb"
    outputs = llm.generate(
        [PROMPTS[1]] * 6, PARAMS, use_tqdm=False, lora_request=[adapters[name] for name in order]
    )
    assert all(close(one, alone[name][1]) for one, name in zip(outputs, order, strict=True))


def test_layers_in_one_product(base, adapters):
    """Their A and B are those of the layers apart, also where an adapter has replaced another."""
    of_attentions = []
    for options in (LORA, {**LORA, "parity": True}):  # in parity mode layers are apart
        given = LLMOptions.of({**options, "tensor_parallel_size": 1})
        model = load_model(open_model(base), given, world.device())
        room = LoRASlots.of(model)
        assert [room.hold(adapters[name], ())[0] for name in "abc"] == [0, 1, 0]
        of_attentions.append([lora_of(attention) for attention in attentions(model)])
    with refusal("at most 2048 in parity mode, got 2064"):
        LoRASlots(model, 129, 5)
    for one, two in zip(*of_attentions, strict=True):
        fused = one["linear_qkv_down_proj"]
        apart = [two[f"linear_{name}_down_proj"] for name in ("q", "kv")]
        a, b = zip(*((one.lora_A.weight, one.scaled(one.lora_B.weight)) for one in apart))
        assert a[0].any(1).sum() == RANKS["b"] + RANKS["c"]
        assert torch.equal(fused.lora_A.weight, torch.cat(a))
        assert torch.equal(fused.lora_B.weight, torch.block_diag(*b))


def test_the_largest_step_under_graphs(base, adapters, monkeypatch):
    """Megatron's context takes more tokens than ``step_tokens``, which it rounds up to blocks."""
    monkeypatch.setattr(load, "model_fields", lambda padded: {})  # no CPU captures graphs
    sizes = {"max_num_batched_tokens": 66, "max_num_seqs": 3, "cuda_graphs": True, "device": "auto"}
    options = LLMOptions.of({**LORA, **sizes, "tensor_parallel_size": 1})
    model = load_model(open_model(base), options, world.device())
    with engine_of(model, step_tokens=options.step_tokens, max_requests=3) as engine:
        assert engine.host.context.max_tokens == 128 > options.step_tokens
        for prompt in PROMPTS:
            sampling = Request(prompt, 4).sampling()
            engine.add_request(prompt, sampling, lora_request=adapters["a"])
        assert len(step_to_the_end(engine)) == len(PROMPTS)


@needs.gpu
def test_products_on_a_side_stream(base, tmp_path, monkeypatch):
    """No bit depends on it, at odd numbers of tokens, in graphs neither."""
    options = {**LORA, "tensor_parallel_size": 1}
    # Products take long enough to run beside each other.
    base = wide_folder(tmp_path / "base", Architecture("v3", True, False, "rope"))
    options |= {"cuda_graphs": True, "dtype": "bfloat16"}
    loras = [write_adapter(base, tmp_path / name, i, 4, 1 / 32) for i, name in enumerate("ab")]
    started, start = [], SideStream.start
    monkeypatch.setattr(SideStream, "start", lambda *args: started.append(1) or start(*args))

    def found(few_tokens: int, **graphs) -> list[tuple[list[int], list[float]]]:
        monkeypatch.setattr(slots, "_FEW_TOKENS", few_tokens)
        # Graphs of a layer belong to one engine.
        model = load_model(open_model(base), LLMOptions.of(options), world.device())
        with engine_of(model, **graphs) as engine:
            for count in (1, 3, 5):
                for i in range(count):
                    lora = [*loras, None][(i + count) % 3]
                    sampling = Request(PROMPTS[i % 3], 24).sampling(log_probs=True)
                    engine.add_request(PROMPTS[i % 3], sampling, lora_request=lora)
                results = step_to_the_end(engine)
        return [(one.tokens, one.log_probs) for one in results]

    for graphs in ({}, {"num_cuda_graphs": 4}):
        expected = found(0, **graphs)
        assert not started
        assert found(512, **graphs) == expected and started
        started.clear()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=needs.no_gpu), "bfloat16"])
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=needs.gpu)])
def test_parity_mode(base, tmp_path, dtype, graphs):
    """The bits of a training forward with the adapter, alone and beside others, in any slot."""
    if DEVICE == "cuda":
        base = wide_folder(tmp_path / "base", Architecture("v3", True, False, "rope"))
    sizes = {"a": 4, "b": 2, "c": 20}
    loras = [
        write_adapter(base, tmp_path / name, i, rank, 1 / 16)
        for i, (name, rank) in enumerate(sizes.items())
    ]
    options, texts = {**OPTIONS, "dtype": dtype, "parity": True}, {None: []}
    slots = {**SLOTS, "max_lora_rank": max(sizes.values())}
    with LLM(base, **options, cuda_graphs=graphs, **slots) as llm:
        for order in ([2], [0, 1, None, 0, 1], [2, 1, 2], [None, 0, 2]):
            prompts, given = PROMPTS * 2, [None if i is None else loras[i] for i in order]
            some = {"lora_request": given, "use_tqdm": False}
            outputs = llm.generate(prompts[: len(order)], PARAMS, **some)
            for i, output in zip(order, outputs, strict=True):
                texts.setdefault(i, []).append(text_of(output))
    options |= {"experts": "sequential", "tensor_parallel_size": 1}
    model = load_model(open_model(base), LLMOptions.of(options), world.device())
    with batch_invariant_mode(DEVICE):
        for i, some in texts.items():
            if i is not None:
                load_peft_adapter(model, loras[i].lora_path)
            for text in some:
                tokens = torch.tensor([text.tokens], device=DEVICE)
                values = trained(model, tokens)[0, :-1].float().log_softmax(-1)
                values = values.gather(1, tokens[0, 1:, None])[-text.generated :, 0]
                assert values.tolist() == text.log_probs, i
            if i is not None:
                remove_lora(model)


def test_refused(llm, base, adapters, tmp_path):
    """Before anything runs, where it can be known."""
    with refusal("there are 1 prompts and 2 lora_requests"):
        llm.generate([PROMPTS[1]], lora_request=[None, None])
    for wrong in ("a", {"lora_name": "a"}):
        with refusal(f"lora_request must be a LoRARequest, got {wrong!r}"):
            llm.generate([PROMPTS[1]], lora_request=wrong)
    with refusal("has no adapter_config.json"):
        LoRARequest("x", 1, tmp_path)
    with refusal("lora_int_id must be an integer above 0, got 0"):
        LoRARequest("x", 0, tmp_path)
    large = write_adapter(base, tmp_path / "large", 7, 5)
    [output] = llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False, lora_request=large)
    assert "max_lora_rank must be at least 5" in output.outputs[0].error
    (large.lora_path / "adapter_model.safetensors").unlink()
    [output] = llm.generate([PROMPTS[1]], PARAMS, use_tqdm=False, lora_request=large)
    assert "lora_path cannot be read" in output.outputs[0].error
    for fields in (
        {"tensor_parallel_parts": 2},
        {"form": "expanded"},
        {"num_speculative_tokens": 1},
        {"decode_context_parallel": True},
    ):
        with refusal("enable_lora", next(iter(fields))):
            LLM(base, **{**LORA, **fields})


def test_the_server(llm, adapters, alone):
    """The request's model names the adapter; /v1/models lists them."""
    pytest.importorskip("starlette")
    pytest.importorskip("openai", exc_type=ImportError)
    from openai import NotFoundError, OpenAI

    loras = {name: adapters[name] for name in "ab"}
    with serving(llm=llm, app_options={"loras": loras}) as served:
        client = OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
        models = {one.id: one.model_dump() for one in client.models.list()}
        assert [*models] == ["tiny", "a", "b"] and "parent" not in models["tiny"]
        assert models["b"]["parent"] == "tiny" and models["b"]["root"].endswith("/b")
        assert client.models.retrieve("a").id == "a"
        fields = {"prompt": PROMPTS[0], "max_tokens": 4, "temperature": 0, "logprobs": 1}
        for name, called in (("a", "a"), ("b", "b"), ("base", "tiny")):
            answer = client.completions.create(model=called, **fields)
            logprobs = answer.choices[0].logprobs.token_logprobs
            assert answer.model == called
            assert sum(logprobs) == pytest.approx(sum(alone[name][0].log_probs), abs=1e-3)
        with pytest.raises(NotFoundError, match="the model is 'tiny' or 'a' or 'b', not 'c'"):
            client.completions.create(model="c", **fields)


def test_async_llm(llm, adapters, alone):
    """As the server."""
    pytest.importorskip("starlette")

    async def last() -> RequestOutput:
        stream = made.generate(PROMPTS[1], PARAMS, lora_request=adapters["a"])
        return [one async for one in stream][-1]

    made = AsyncLLM.from_llm(llm)
    assert close(asyncio.run(last()), alone["a"][1])
    made._service.stop()
