"""Export of live weights from several ranks: whole tensors, on every rank, without deadlocks."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.checkpoint.distributed import load_model_weights, model_sharded_state_dict
from absorbed_mla.serving.export import LiveWeights, WeightSender, hf_weights
from absorbed_mla.serving.weights.transfer import Receiver, Sender
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.hugging_face import HuggingFaceWriter
from checkpoint_conversion.mapping import hugging_face_shapes
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig
from tests.conversion.megatron_models import SAME, megatron_model, save_torch_dist
from tests.conversion.support import (
    in_memory,
    load_all,
    random_tensors,
    read_torch_dist,
    tiny_config,
    write_torch_dist,
)
from tests.distributed.whole import on_one_rank
from tests.support import needs, world
from tests.support.combinations import few_ranks, grid, thinned
from tests.support.memory import PeakMemory
from tests.support.refusal import refusal

SILU = {"activation_func": torch.nn.functional.silu}
MODELS = {
    "mixed": {},
    "dense": {"first_k_dense_replace": 4},
    "mtp": {"num_nextn_predict_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "no_q_lora": {"q_lora_rank": None},
}
PP, EP = "pipeline_model_parallel_size", "expert_model_parallel_size"
# Models, each with the sizes that treat it in a way of their own; the mixed one with all.
SIZES = {
    2: {"TP2": {"tp": 2}, "EP2": {EP: 2}, "PP2": {PP: 2}, "DP2": {}},
    4: {"TP2 PP2": {"tp": 2, PP: 2}, "TP2 EP2": {"tp": 2, EP: 2}, "EP2 PP2": {EP: 2, PP: 2}},
}.get(world.size(), {"all TP": {"tp": world.size()}})
ELSEWHERE = {
    2: (("dense", "PP2"), ("mtp", "TP2"), ("mtp", "PP2"), ("tied", "PP2"), ("no_q_lora", "TP2")),
    4: (("mtp", "TP2 PP2"), ("tied", "EP2 PP2")),
}.get(world.size(), ())
ONE = next(iter(SIZES))


def four_layers(**changes) -> ModelConfig:
    """A tiny model that two stages share."""
    return tiny_config(**{**SAME, "num_hidden_layers": 4, **changes})


def sharded(config: ModelConfig, kind: str = "absorbed", **changes: object) -> GPTModel:
    """This rank's share of a model, by the sizes of the moment."""
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    ep = parallel_state.get_expert_model_parallel_world_size() if any(config.moe_layers) else 1
    sizes = {PP: pp, EP: ep, "pipeline_dtype": torch.float32}
    fields = {**sizes, **SILU, "q_lora_rank": config.q_lora_rank, **changes}
    return megatron_model(config, kind, stage=ends, **fields).to(world.device())


VIRTUAL = {PP: 2, "virtual_pipeline_model_parallel_size": 2}


def sharded_chunks(config: ModelConfig) -> list[GPTModel]:
    """This rank's chunks of a virtual pipeline."""
    rank = parallel_state.get_pipeline_model_parallel_rank()
    fields = {**VIRTUAL, **SILU, "pipeline_dtype": torch.float32}
    return [
        megatron_model(
            config,
            "absorbed",
            stage=tuple((chunk, rank) == end for end in ((0, 0), (1, 1))),
            vp_stage=chunk,
            **fields,
        ).to(world.device())
        for chunk in range(2)
    ]


@pytest.fixture(scope="module")
def written(module_folder) -> Callable[[str], tuple[ModelConfig, dict[str, Tensor], Path]]:
    """Makes, once for each name, a model, its whole weights and a distributed checkpoint."""

    @functools.cache
    def make(name: str):
        config, made = four_layers(**MODELS[name]), module_folder / name
        tensors = random_tensors(config, torch.float32)
        on_one_rank(lambda: write_torch_dist(made, config, tensors, "absorbed", norms="separate"))
        return config, tensors, made / "release"

    return make


def loaded(config: ModelConfig, folder: Path) -> GPTModel:
    """This rank's share of the weights in a checkpoint, which all ranks' shares make up."""
    model = sharded(config)
    load_model_weights(model, folder)
    return model


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        own = found[name].cpu()
        assert own.dtype == tensor.dtype, name
        assert torch.equal(own.view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(("name", "size"), [*(("mixed", size) for size in SIZES), *ELSEWHERE])
def test_every_rank_gets_whole_tensors(name, size, written):
    """Those that were converted and loaded into the shares; in the table's order."""
    config, tensors, folder = written(name)
    with world.parallel(**SIZES[size]):
        found = dict(hf_weights(loaded(config, folder)))
    assert_equal(found, {name: tensors[name] for name in hugging_face_shapes(config)})


@few_ranks
@grid(1, {"size": [*SIZES][: 2 if thinned() else None]})
def test_sender(size, written):
    """Rank 0 sends what all ranks hold; where a receiver refuses, all of them raise."""
    config, tensors, folder = written("mixed")
    found: dict[str, Tensor] = {}
    with world.parallel(**SIZES[size]), ThreadPoolExecutor(1) as threads:
        weights = LiveWeights(loaded(config, folder))
        sender = WeightSender("tcp://127.0.0.1:0", 1, bucket_bytes=10_000, timeout=60.0)

        def received(accept) -> Future | None:
            if world.rank():
                return None
            receiver = Receiver(sender.address, 1, world.device(), 60.0)
            take = lambda arrived: found.update({k: x.clone() for k, x in arrived.items()})  # noqa: E731
            return threads.submit(receiver.receive, accept, take)

        def refuse(shapes):
            raise ValueError("another model")

        if world.device().type == "cuda":
            answer = received(lambda shapes: None)
            with pytest.raises(ValueError, match="'process_group' needs another GPU than"):
                sender.send(weights)
            return
        answer = received(refuse)
        with pytest.raises(ValueError, match="receiver 1: another model"):
            sender.send(weights)
        assert answer is None or isinstance(answer.exception(), ValueError)
        answer = received(lambda shapes: None)
        sender.send(weights)
        if answer is not None:
            answer.result()
            assert_equal(found, {name: tensors[name] for name in hugging_face_shapes(config)})


@needs.processes(2)
def test_from_rank_to_rank():
    """Over a process group between two processes, twice; NCCL where there are GPUs."""
    sizes, found = (3, 70_000, 5), {}
    device, name = world.device(), "tcp://127.0.0.1:0"
    sender = Sender(name, 1, bucket_bytes=100_000, timeout=60.0) if world.rank() == 0 else None
    addresses = [sender and sender.address]
    dist.broadcast_object_list(addresses, 0)
    receiver = None if sender else Receiver(addresses[0], 1, device, 60.0)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tensors = {f"of {n}": torch.randn(n, 2, generator=generator) for n in sizes}
        if sender:
            shapes = [(key, x.dtype, tuple(x.shape)) for key, x in tensors.items()]
            on_device = {key: x.to(device) for key, x in tensors.items()}
            sender.send(shapes, on_device.items, device)
        else:
            receiver.receive(
                lambda shapes: None,
                lambda new: found.update({k: x.clone() for k, x in new.items()}),
            )
            assert_equal(found, tensors)


@few_ranks
def test_equal_to_saving_and_converting(written, folder):
    config, _, made = written("mixed")
    with world.parallel(**SIZES[ONE]):
        model = loaded(config, made)
        args = to_megatron_args(config, dtype=torch.float32)
        save_torch_dist(folder / "saved", model, args)
        dist.barrier()
        assert_equal(dict(hf_weights(model)), read_torch_dist(folder / "saved"))


@few_ranks
def test_fp8(written):
    """Blocks and scales are those of the whole tensors."""
    config, tensors, folder = written("mixed")
    writer = HuggingFaceWriter(config, TargetOptions(fp8="ue8m0"))
    parts = writer.plan(in_memory(tensors), 1 << 30)
    expected = load_all({one.key: one.tensor for part in parts for one in part.entries})
    with world.parallel(**SIZES[ONE]):
        found = dict(hf_weights(loaded(config, folder), fp8="ue8m0"))
    assert_equal(found, expected)


@few_ranks
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_memory(sizes):
    """A tensor and the largest message it is made of; the backend drops the last one late."""
    config = four_layers()
    with world.parallel(**sizes):
        model = sharded(config)
        largest = max(tensor.nbytes for _, tensor in hf_weights(model))
        weights = hf_weights(model)
        with PeakMemory() as memory:
            for _, tensor in weights:
                del tensor
    assert largest <= memory.peak <= 3 * largest


@needs.processes(2)
def test_chunks_of_a_virtual_pipeline(written):
    """A list of models, each with every second layer."""
    config, tensors, made = written("mixed")
    with world.parallel(**VIRTUAL):
        chunks = sharded_chunks(config)
        entries = {
            f"{chunk.vp_stage}.{name}": entry
            for chunk in chunks
            for name, entry in model_sharded_state_dict(chunk).items()
        }
        state = dist_checkpointing.load(entries, str(made))
        for chunk in chunks:
            own = f"{chunk.vp_stage}."
            chunk.load_state_dict(
                {k.removeprefix(own): v for k, v in state.items() if k.startswith(own)}
            )
        found = dict(hf_weights(chunks))
    assert_equal(found, {name: tensors[name] for name in hugging_face_shapes(config)})


@few_ranks
class TestLeaving:
    """All ranks end, whatever one of them does."""

    @pytest.fixture
    def model(self) -> GPTModel:
        with world.parallel(tp=world.size()):
            yield sharded(four_layers())

    @pytest.fixture(autouse=True)
    def small_parts(self, monkeypatch):
        """So that this model has some."""
        monkeypatch.setattr("checkpoint_conversion.planning._SMALLEST_PART", 1 << 12)

    @pytest.mark.parametrize("after", [0, 7, 60])
    def test_one_rank_leaves(self, after, model):
        weights = hf_weights(model)
        if world.rank() == world.size() - 1:
            for _ in range(after):
                next(weights)
            del weights
        else:
            with pytest.raises(RuntimeError, match=f"rank {world.size() - 1} has stopped"):
                for _ in weights:
                    pass
        self.check_that_ranks_still_agree(model)

    def test_one_rank_fails(self, model):
        """In what it does with a tensor."""

        def use():
            for i, _ in enumerate(hf_weights(model)):
                if i == 5 and world.rank() == 0:
                    raise OSError("full")

        with pytest.raises(OSError if world.rank() == 0 else RuntimeError):
            use()
        self.check_that_ranks_still_agree(model)

    def test_all_leave(self, model):
        for _ in hf_weights(model):
            break
        self.check_that_ranks_still_agree(model)

    def test_one_rank_leaves_in_the_last_part(self, model, monkeypatch):
        """It serves the others to the end, which need nothing more of it."""
        monkeypatch.undo()
        for _ in hf_weights(model):
            if world.rank() == 0:
                break
        self.check_that_ranks_still_agree(model)

    def check_that_ranks_still_agree(self, model) -> None:
        """No message is left over from what was given up."""
        names = [name for name, _ in hf_weights(model)]
        assert names == [*hugging_face_shapes(four_layers())]


@needs.processes(2)
def test_a_device_without_messages_is_refused():
    """As a model on the CPU is whose ranks have NCCL only."""
    with world.parallel(**SIZES[ONE]):
        model = sharded(four_layers()).to("meta")
        with refusal("hf_weights", "on 'meta'", "move the model"):
            hf_weights(model)


@needs.processes(2)
def test_different_options_are_refused_everywhere():
    dtypes = [torch.bfloat16, torch.float16]
    with world.parallel(tp=world.size()):
        model = sharded(four_layers())
        with refusal("same options", "bfloat16", "float16"):
            hf_weights(model, dtype=dtypes[world.rank() % 2])


@needs.processes(2)
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"dtype": torch.int8}, "dtype must be"),
        ({"hf_config": {"model_type": "llama"}}, "model_type must be"),
    ],
    ids=["option", "config"],
)
def test_an_error_of_one_rank_is_raised_on_all(asked, message):
    """Before the options of other layers are known, and after."""
    with world.parallel(tp=world.size()):
        model = sharded(four_layers())
        failing = world.rank() == 1
        with refusal(message if failing else "on rank 1: ", message):
            hf_weights(model, **(asked if failing else {}))


@needs.processes(2)
@pytest.mark.parametrize("normalised", [None, False])
def test_a_stage_without_layers(normalised):
    """It takes the options of the router from the other stage."""
    config = four_layers() if normalised is None else four_layers(norm_topk_prob=normalised)
    layout = {"pipeline_model_parallel_layout": "E|ttttL"}
    with world.parallel(**{PP: 2}):
        model = sharded(config, **layout)
        assert len(model.decoder.layers) == (0, 4)[world.rank()]
        for layer in model.decoder.layers:
            options = layer.self_attention.options
            layer.self_attention.options = options.replace(moe_router_norm_topk_prob=normalised)
        found = dict(hf_weights(model, hf_config=config.hugging_face))
        assert list(found) == [*hugging_face_shapes(config)]
        other = four_layers(norm_topk_prob=normalised is False).hugging_face
        with refusal("another router", "norm_topk_prob"):
            hf_weights(model, hf_config=other)


@needs.processes(2)
def test_tied_embeddings_on_the_stage_of_mtp():
    """All ranks say so: otherwise the others would wait, or find that options differ."""
    config = four_layers(**MODELS["mtp"], **MODELS["tied"])
    with world.parallel(**{PP: 2}):
        model = sharded(config)
        with refusal("share_embeddings_and_output_weights=True", "mtp_num_layers=1", "got 2"):
            hf_weights(model)
