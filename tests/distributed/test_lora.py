"""LoRA of whole models: checkpoints of any tensor-parallel size, generation, merging, refusals."""

import pytest
import torch
from megatron.core import dist_checkpointing

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.checkpoint.distributed import load_model_weights, model_sharded_state_dict
from absorbed_mla.lora import (
    LoRAConfig,
    LoRARequest,
    add_lora,
    merge_lora,
    remove_lora,
    save_peft_adapter,
    unmerge_lora,
)
from absorbed_mla.lora.sharded import load_lora_weights, save_lora_weights
from absorbed_mla.lora.slots import LoRASlots
from absorbed_mla.serving.export import hf_weights
from tests.distributed.whole import shared_folder
from tests.support import needs, world
from tests.support.adapters import wrap
from tests.support.engine import Request, engine_of, generating_model, step_to_the_end
from tests.support.generation import by_dynamic_context, by_forwards, by_static_context, prompts_of
from tests.support.lora import with_random_lora
from tests.support.models import MIXED, gpt_model, logits, token_batch, whole_logits
from tests.support.numerics import relative_error
from tests.support.refusal import refusal
from tests.support.training import Training

pytestmark = needs.processes(1, 2)


def model(seed: int = 0, **changes):
    return gpt_model(seed=seed, num_layers=2, **world.tp_fields(), **changes)


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with the base"])
def test_checkpoints_of_any_size(alone):
    """Written at one tensor-parallel size, read at the other; also A and B alone."""
    with shared_folder() as folder:
        made = with_random_lora(model(), seed=3)
        expected = logits(made).cpu()
        if alone:
            save_lora_weights(made, folder)
        else:
            dist_checkpointing.save(model_sharded_state_dict(made), str(folder))
        with world.parallel(tp=1):
            read = model(seed=0 if alone else 5)
            add_lora(read, LoRAConfig(r=3, lora_alpha=6))
            if alone:
                load_lora_weights(read, folder)
            else:
                load_model_weights(read, folder)
            assert relative_error(logits(read).cpu(), expected) < 1e-5
            if not alone:
                with refusal("has no place in this model", "lora.linear_q_up_proj.lora_A.weight"):
                    load_model_weights(model(), folder)


def test_a_base_is_loaded_beside_it():
    """A checkpoint without LoRA leaves A and B as they are."""
    with shared_folder() as folder:
        base = model()
        dist_checkpointing.save(model_sharded_state_dict(base), str(folder))
        expected = logits(with_random_lora(base, seed=3))
        other = with_random_lora(model(seed=4), seed=3)
        load_model_weights(other, folder, initial=(".lora.",))
        assert torch.equal(logits(other), expected)


@pytest.mark.parametrize(
    "generated", [pytest.param(by_static_context, marks=needs.processes(1)), by_dynamic_context]
)
def test_a_live_model_generates_with_it(generated):
    """Both contexts say what forwards of the whole text say; merged, nearly the same."""
    made = generating_model(**MIXED, **world.tp_fields()).eval()
    prompts = prompts_of((5, 20))
    without = generated(made, prompts, 4)
    with_random_lora(made, seed=2)
    expected = by_forwards(made, prompts, 4)
    found = generated(made, prompts, 4)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    merge_lora(made)
    merged = generated(made, prompts, 4)
    assert [one.tokens for one in merged] == [one.tokens for one in expected]
    for one, other, old in zip(found, merged, without, strict=True):
        assert other.log_probs == pytest.approx(one.log_probs, abs=1e-4)
        assert old.log_probs != pytest.approx(one.log_probs, abs=1e-3)
    unmerge_lora(made)
    remove_lora(made)
    for one, old in zip(generated(made, prompts, 4), without, strict=True):
        assert one.log_probs == pytest.approx(old.log_probs, abs=1e-5)


@pytest.mark.parametrize(
    ("graph_tokens", "fused", "down_projection"),
    [(None, False, "duplicated"), (256, True, "duplicated"), (None, True, "column_parallel")],
)
def test_several_adapters_in_a_batch(graph_tokens, fused, down_projection):
    """Requests beside each other, over ranks that divide heads, tokens and experts."""
    options = AbsorbedMLAOptions(form="absorbed", down_projection=down_projection)
    fields = {**MIXED, **world.tp_fields(), "mla_down_proj_fusion": fused}
    made = generating_model(options, **fields).eval()
    prompts, expected = prompts_of((5, 20, 9)), {}
    with shared_folder() as folder:
        for seed, name in enumerate(("a", "b", None)):
            if name is not None:
                with_random_lora(made, seed=seed)
                save_peft_adapter(made, folder / name)
            expected[name] = by_dynamic_context(made, prompts, 4)
            if name is not None:
                remove_lora(made)
        LoRASlots(made, 2, 6, graph_tokens)
        with engine_of(made) as engine:
            numbers = {}
            for i, prompt in enumerate(prompts):
                for name in expected:
                    lora = name and LoRARequest(name, 1, folder / name)
                    sampling = Request(prompt, 4).sampling(log_probs=True)
                    number = engine.add_request(prompt, sampling, lora_request=lora)
                    numbers[number] = expected[name][i]
            step_to_the_end(engine)
            for number, one in numbers.items():
                assert engine.results[number].tokens == one.tokens
                assert engine.results[number].log_probs == pytest.approx(one.log_probs, abs=1e-4)
    assert len({tuple(one[1].log_probs) for one in expected.values()}) == 3


def test_every_rank_hears_that_an_adapter_cannot_be_written():
    with shared_folder() as folder:
        (folder / "file").touch()
        with pytest.raises(FileExistsError):
            save_peft_adapter(with_random_lora(model(), seed=3), folder / "file")


def test_trains_generates_and_trains():
    """Generation changes nothing of what training does."""

    def training() -> Training:
        made = with_random_lora(generating_model(**MIXED, **world.tp_fields()), seed=2)
        return Training(made.train())

    expected = training().steps(3)
    trained = training()
    losses = trained.steps(2)
    trained.model.eval()
    by_dynamic_context(trained.model, prompts_of((5,)), 2)
    trained.model.train()
    assert losses + trained.steps(1) == expected


def test_exported_only_once_it_is_in_the_weights():
    """Engines that read Hugging Face's names have no LoRA."""
    made = with_random_lora(model(activation_func=torch.nn.functional.silu))
    with refusal("lora"):
        dict(hf_weights(made))
    merge_lora(made)
    remove_lora(made)
    assert len(dict(hf_weights(made))) > 0


def test_layers_by_number():
    """A layer that is not named has none."""
    made = with_random_lora(model(), layers_to_transform=[1], target_modules=["kv_b_proj"])
    names = {n for n, p in made.named_parameters() if p.requires_grad}
    up = "decoder.layers.1.self_attention.lora.linear_{}_up_proj.lora_{}.weight"
    assert names == {up.format(name, factor) for name in "kv" for factor in "AB"}


def test_refused():
    """In one line each, before anything changes."""
    made = with_random_lora(model())
    with refusal("the model has LoRA already: remove_lora first"):
        add_lora(made, LoRAConfig())
    with refusal("LoRA needs a layer"):
        add_lora(model(), LoRAConfig(target_modules="q_proj"))
    merge_lora(made)
    with refusal("merged into the weights: unmerge_lora before saving"):
        model_sharded_state_dict(made)
    with refusal("merged into the weights: unmerge_lora before training"):
        whole_logits(made.train(), token_batch())
    with refusal("the model has no LoRA"):
        merge_lora(model())
    with refusal("add LoRA before DistributedDataParallel"):
        add_lora(Training(model()).model, LoRAConfig())


def test_adapters_of_other_libraries():
    """One that wraps an up-projection has nothing to multiply; around other layers they work."""
    with world.parallel(tp=1):  # The test's own adapter knows no ranks.
        made = model()
        attention, before = made.decoder.layers[0].self_attention, logits(made)
        for name in ("linear_q_up_proj", "linear_kv_down_proj", "linear_proj"):
            wrap(attention, name)
        assert relative_error(logits(made), before) > 1e-3
        wrap(attention, "linear_v_up_proj")
        with refusal("linear_v_up_proj must be a HeadwiseUpProjection, got LoRA", "add_lora"):
            logits(made)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 0}, "r must be an integer above 0, got 0"),
        ({"lora_alpha": 0}, "lora_alpha must be above 0, got 0"),
        ({"lora_dropout": 0.1}, "lora_dropout must be 0, got 0.1"),
        ({"target_modules": ["q_b_proj", "up_proj"]}, "got 'up_proj'"),
        ({"target_modules": []}, "got none"),
    ],
)
def test_config(fields, words):
    with refusal(words):
        LoRAConfig(**fields)
