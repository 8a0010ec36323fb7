"""One live module: it trains, generates and trains again, with nothing converted, kept or lost.

If these fail, a rollout changes the training that it is a part of, or samples from old weights.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from absorbed_mla import AbsorbedMLAOptions
from tests.support.combinations import grid
from tests.support.engine import KEPT, Request, engine_of, generate, generating_model
from tests.support.generation import by_dynamic_context, by_static_context, prompts_of
from tests.support.models import MIXED
from tests.support.programs import run_script
from tests.support.training import Training, differing

RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["mla_up_proj", "core_attn"],
}
BALANCED = {
    **MIXED,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}

CONTEXTS = {"static": by_static_context, "dynamic": by_dynamic_context}
PROMPTS = prompts_of((5, 70, 12))


def evaluated(generated, model):
    """Generate as a rollout does, in evaluation mode."""
    model.eval()
    return generated(model, PROMPTS, 4)


class TestTraining:
    """k steps, a rollout, k steps are 2k steps."""

    @pytest.mark.parametrize(
        ("changes", "generated"),
        [
            (DROPOUT, by_dynamic_context),
            ({**RECOMPUTED, **DROPOUT}, by_static_context),
            (BALANCED, by_static_context),
            (BALANCED, by_dynamic_context),
        ],
        ids=["dense-dynamic", "recomputed-static", "mixed-static", "mixed-dynamic"],
    )
    def test_goes_on_as_if_nothing_had_been_generated(self, changes, generated):
        through = Training(generating_model(**changes))
        expected = through.steps(2)
        training = Training(generating_model(**changes))
        losses = training.steps(1)
        evaluated(generated, training.model)
        assert losses + training.steps(1) == expected
        assert not differing(training.state(), through.state())

    def test_needs_no_switch_of_modes(self):
        """Generating in training mode; there is nothing random in this model."""
        through, training = (Training(generating_model(num_layers=1)) for _ in range(2))
        expected = through.steps(2)
        losses = training.steps(1)
        training.model.train()
        in_training = by_static_context(training.model, PROMPTS, 4)
        evaluating = evaluated(by_static_context, training.model)
        for one, other in zip(in_training, evaluating, strict=True):
            assert one.tokens == other.tokens
            # A GPU's norms of few rows have a kernel of their own in evaluation mode.
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        assert losses + training.steps(1) == expected
        assert not differing(training.state(), through.state())

    def test_survives_tables_made_by_a_rollout(self, tmp_path):
        """A process that generates first: what is cached must serve the backward as well."""
        (tmp_path / "generate_first.py").write_text(_GENERATE_FIRST)
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = run_script(tmp_path / "generate_first.py", PYTHONPATH=path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "trained" in done.stdout


_GENERATE_FIRST = """
import tests.conftest
from tests.support import world
world.start()
from tests.unit.serving.test_train_generate_train import *
for changes in ({}, MIXED):
    training = Training(generating_model(**changes))
    for generated in (by_dynamic_context, by_static_context):
        evaluated(generated, training.model)
    training.steps(1)
print("trained")
"""


def everything(model: nn.Module) -> dict[str, object]:
    """Whatever a module could keep: its attributes, parameters and buffers, and where they lie."""
    found: dict[str, object] = {"state_dict": list(model.state_dict())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name != "training":
                found[f"{path}.{name}"] = id(value)
            if isinstance(value, dict):
                found |= {f"{path}.{name}[{key}]": id(item) for key, item in value.items()}
    for name, parameter in model.named_parameters():
        found[f"memory of {name}"] = (parameter.data_ptr(), parameter.shape, parameter.stride())
    return found


@grid(1, {"generated": CONTEXTS, "form": ["auto", "expanded"]})
def test_nothing_is_kept_or_lost(generated, form):
    """No attribute, parameter or buffer is added, renamed, replaced or moved."""
    model = generating_model(AbsorbedMLAOptions(form=form), num_layers=1)
    Training(model).steps(1)
    model.eval()
    before = everything(model)
    evaluated(generated, model)
    after = everything(model)
    assert {k: v for k, v in after.items() if before.get(k) != v} == {}
    assert before.keys() == after.keys()


def update(model) -> None:
    Training(model).steps(1)


def load_others(model) -> None:
    model.load_state_dict(generating_model(num_layers=1, seed=3).state_dict())


def scale(name: str):
    """W_UK and W_UV are read where they are, not in a copy that was made once."""

    def change(model) -> None:
        with torch.no_grad():
            getattr(model.decoder.layers[0].self_attention, name).weight.mul_(1.5)

    return change


CHANGES = {
    "update": update,
    "load": load_others,
    "W_UK": scale("linear_k_up_proj"),
    "W_UV": scale("linear_v_up_proj"),
}


class TestWeights:
    """The next token sees the parameters as they are."""

    @grid(1, {"generated": CONTEXTS, "change": CHANGES})
    def test_after_a_change(self, generated, change):
        model = generating_model(num_layers=1)
        before = evaluated(generated, model)
        change(model)
        after = evaluated(generated, model)
        fresh = generating_model(num_layers=1, seed=4)
        fresh.load_state_dict(model.state_dict())
        assert after == evaluated(generated, fresh) != before

    @pytest.mark.parametrize("prefix_caching", [False, True])
    def test_in_an_engine_that_is_kept(self, prefix_caching):
        """Latents of the old weights are forgotten; the engine stays."""
        training = Training(generating_model(num_layers=1))
        requests = [Request(prompt, 8) for prompt in PROMPTS]
        options = {**KEPT, "prefix_caching": prefix_caching}
        engine = engine_of(training.model, **options)
        old = generate(engine, requests, log_probs=True)
        training.steps(1)
        kept = generate(engine, requests, log_probs=True)
        fresh = generate(engine_of(training.model, **options), requests, log_probs=True)
        assert kept.results == fresh.results != old.results
