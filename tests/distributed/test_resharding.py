"""Weights of a live model in another model of the same ranks, from any layout to any other."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla import LLM
from absorbed_mla.serving.export import WeightResharding
from absorbed_mla.serving.weights import live_weights
from checkpoint_conversion.model import ModelConfig
from tests.conversion.support import in_memory, random_tensors
from tests.distributed.llm import GREEDY, token_ids
from tests.distributed.test_hf_weights import (
    EP,
    MODELS,
    PP,
    VIRTUAL,
    four_layers,
    sharded,
    sharded_chunks,
)
from tests.support import needs, world
from tests.support.memory import PeakMemory
from tests.support.refusal import refusal

TP, TP_OF_EXPERTS = "tp", "expert_tensor_parallel_size"
# From, to, the model.
CASES = {
    1: [({}, {}, "mtp")],
    2: [
        ({TP: 2}, {}, "mixed"),
        ({PP: 2}, {TP: 2}, "mtp"),
        ({EP: 2}, {TP: 2}, "mixed"),
        ({}, {EP: 2}, "mixed"),
        ({TP: 2}, {PP: 2}, "tied"),
        ({PP: 2}, {}, "tied"),
        ({}, {PP: 2}, "mtp"),
    ],
    4: [
        ({TP: 2, PP: 2}, {EP: 4, TP_OF_EXPERTS: 1}, "mtp"),
        ({EP: 2, PP: 2}, {TP: 4}, "mixed"),
        ({TP: 2, EP: 2, TP_OF_EXPERTS: 1}, {TP: 2, PP: 2}, "tied"),
        ({TP: 2}, {}, "mixed"),
    ],
}.get(world.size(), [])
BYTES = 4_000


def weights_of(*models: GPTModel) -> Iterator[Tensor]:
    for model in models:
        yield from (x for x in model.state_dict().values() if x is not None)


@pytest.fixture(autouse=True)
def experts_of_all_ranks(monkeypatch):
    """Also of those that are no tensor-parallel ranks, which none of ``LLM`` have."""
    of_group = live_weights._of_all_ranks
    everywhere = lambda names, group: of_group(names, dist.group.WORLD)  # noqa: E731
    monkeypatch.setattr(live_weights, "_of_all_ranks", everywhere)


def filled(config: ModelConfig) -> GPTModel:
    """This rank's share of given weights."""
    model = sharded(config)
    set_weights = live_weights.set_weights
    set_weights(model, config, in_memory(random_tensors(config, torch.float32)))
    return model


def emptied(*models: GPTModel) -> list[GPTModel]:
    for weight in weights_of(*models):
        weight.fill_(float("nan"))
    return list(models)


def assert_same(found: GPTModel, expected: GPTModel) -> None:
    """Every bit on every rank, those of copies included."""
    theirs = expected.state_dict()
    assert [*found.state_dict()] == [*theirs]
    for name, weight in found.state_dict().items():
        if weight is not None:
            assert weight.dtype == theirs[name].dtype
            assert torch.equal(weight, theirs[name]), name


@pytest.fixture
def received(monkeypatch) -> list[int]:
    """Bytes of each message to this rank."""
    sizes: list[int] = []
    send_and_receive = dist.batch_isend_irecv

    def counted(operations):
        sizes.extend(one.tensor.nbytes for one in operations if one.op is dist.irecv)
        return send_and_receive(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", counted)
    return sizes


@pytest.mark.parametrize(("start", "end", "name"), CASES)
def test_every_bit(start, end, name, received):
    """By one plan each time, in messages of half the budget; what a rank has it does not receive.

    The source's parameters move, as they do into the buffers of DDP, and are replaced by others.
    """
    config = four_layers(**MODELS[name])
    with world.parallel(**start):
        source = filled(config)
    with world.parallel(**end):
        [target], expected = emptied(sharded(config)), filled(config)
    plan = WeightResharding(source, target, bucket_bytes=BYTES)
    for times in (1, 2, 3):
        plan.copy()
        assert_same(target, expected)
        for model in (source, expected):
            if times == 1:
                for parameter in model.parameters():
                    parameter.data = parameter.data * 2
            else:
                given = {n: x * 2 for n, x in model.state_dict().items() if x is not None}
                model.load_state_dict(given, assign=True, strict=False)
    assert all(size <= BYTES // 2 for size in received)
    held, needed = (sum(x.nbytes for x in weights_of(one)) for one in (source, target))
    if not end and len(start) == 1 and name == "mixed":
        # All of what others hold, and a few bytes between tensors.
        assert needed - held <= sum(received) // 3 < (needed - held) * 1.02


@needs.processes(2)
def test_chunks_of_a_virtual_pipeline():
    """As the target and as the source."""
    config = four_layers()
    with world.parallel(tp=2):
        source = filled(config)
    with world.parallel(**VIRTUAL):
        chunks = emptied(*sharded_chunks(config))
    with world.parallel(**{EP: 2}):
        [target], expected = emptied(sharded(config)), filled(config)
    WeightResharding(source, chunks).copy()
    WeightResharding(chunks, target).copy()
    assert_same(target, expected)


@needs.processes(2)
def test_memory():
    """Two buffers; and parameters that have moved, as to the host, leave nothing behind."""
    with world.parallel(tp=2):
        source = filled(four_layers())
    with world.parallel():
        plan = WeightResharding(source, sharded(four_layers()), bucket_bytes=BYTES)
    if needs.HAS_GPU:
        plan.copy()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        plan.copy()
        # In blocks of 512 bytes.
        assert 0 < torch.cuda.max_memory_allocated() - before <= BYTES + 1024
    with PeakMemory() as memory:
        plan.copy()
    assert 0 < memory.peak <= BYTES
    with PeakMemory() as memory:
        for _ in range(2):
            plan.copy()
            for parameter in source.parameters():
                parameter.data = parameter.data * 2
    assert memory.now == sum(parameter.nbytes for parameter in source.parameters())


@needs.processes(2)
def test_generation():
    """By an ``LLM`` of another layout, from weights that the training has changed."""
    config = four_layers()
    fields = {"cache_mla_latents": True}
    prompts = [[token % 64 for token in range(first, first + 9)] for first in (3, 20)]
    with world.parallel(tp=2):
        trained = sharded(config, **fields).eval()
        with LLM.from_model(trained, max_model_len=64, max_num_seqs=4) as llm:
            expected = token_ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    with world.parallel():
        [rolling] = emptied(sharded(config, **fields).eval())
        llm = LLM.from_model(rolling, max_model_len=64, max_num_seqs=4)
    WeightResharding(trained, rolling).copy()
    with world.parallel(), llm:
        assert token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected


@needs.processes(2)
@pytest.mark.parametrize(
    ("changes", "fields", "options", "words"),
    [
        ({}, {"moe_ffn_hidden_size": 8}, {}, ["linear_fc2.weight: (4, 32, 16) in source, (4, 32"]),
        ({"num_nextn_predict_layers": 1}, {}, {}, ["mtp.layers.0", "none in source"]),
        ({"first_k_dense_replace": 4}, {}, {}, ["mlp.router.weight", "none in target"]),
        ({}, {}, {"bucket_bytes": 63}, ["bucket_bytes must be at least 64, got 63"]),
    ],
)
def test_refused_on_all_ranks(changes, fields, options, words):
    with world.parallel(tp=2):
        source = sharded(four_layers())
    with world.parallel():
        target = sharded(four_layers(**changes), **fields)
    with refusal(*words):
        WeightResharding(source, target, **options)


def test_mtp_layers_may_stay_behind():
    """Of a target that does not draft; its dtype may be another, to which values are rounded."""
    config = four_layers(num_nextn_predict_layers=1)
    with world.parallel(tp=world.size()):
        source, [target] = filled(config), emptied(sharded(four_layers()).bfloat16())
    WeightResharding(source, target).copy()
    theirs = source.state_dict()
    for name, weight in target.state_dict().items():
        if weight is not None:
            assert torch.equal(weight, theirs[name].to(weight.dtype)), name
