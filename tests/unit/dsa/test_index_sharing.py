"""Layers that share selections, on which stage they are, and selections that are replayed."""

import pytest
import torch

from absorbed_mla.dsa import core_attention
from absorbed_mla.dsa.pipeline_indices import stages_of_layers
from absorbed_mla.dsa.replay import record_selections, replay_selections
from tests.support.cases import TINY, config_for
from tests.support.dsa_models import DSA, SHARED, dsa_model
from tests.support.models import TOKENS, call, gpt_model, token_batch
from tests.support.refusal import refusal

# How Megatron cuts six layers into checkpoints.
FULL = {
    "layer by layer": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "two layers": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "all layers": {"recompute_method": "uniform", "recompute_num_layers": 6},
    "some layers": {"recompute_method": "block", "recompute_num_layers": 3},
}


def recomputing(method: dict) -> dict:
    return {"recompute_granularity": "full", **method}


def losses_of(model, seeds) -> list[torch.Tensor]:
    losses = []
    for seed in seeds:
        tokens = token_batch(seed)
        positions = torch.arange(TOKENS, device=tokens.device).expand_as(tokens)
        losses.append(model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean())
    return losses


def microbatch_gradients(model, seeds=(5,)) -> dict[str, torch.Tensor]:
    """All forwards come before the backwards, as in the warm-up of a pipeline."""
    for loss in losses_of(model, seeds):
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_which_layers_have_an_indexer():
    model = dsa_model(**SHARED)
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    assert [core.indexer is not None for core in cores] == [True, True, False, False, True, False]


def test_layers_attend_to_the_shared_keys(monkeypatch):
    """And no one else keeps them after the forward."""
    model, seen = dsa_model(**SHARED), []
    over = core_attention.TopKBackend
    monkeypatch.setattr(
        core_attention,
        "TopKBackend",
        lambda sparse, keys: (seen.append(keys), over(sparse, keys))[1],
    )
    call(model, labels=token_batch(6))
    assert seen[1] is seen[2] is seen[3] and seen[4] is seen[5]
    assert len({id(keys) for keys in seen}) == 3
    assert not torch.equal(seen[1], seen[4])
    first = model.decoder.layers[0].self_attention.core_attention
    assert first.selection._sharing.latest is None


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("method", FULL)
def test_recomputation(method, microbatches):
    """Layers that are recomputed without the one that selects; several microbatches in flight."""
    seeds = range(5, 5 + microbatches)
    plain = dsa_model(**SHARED)
    recomputed = dsa_model(**SHARED, **recomputing(FULL[method]))
    recomputed.load_state_dict(plain.state_dict())
    expected = microbatch_gradients(plain, seeds)
    for name, gradient in microbatch_gradients(recomputed, seeds).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14, msg=name)


def test_evaluation_after_training():
    model = dsa_model(**SHARED, **recomputing(FULL["layer by layer"]))
    microbatch_gradients(model)
    with torch.no_grad():
        assert torch.isfinite(call(model.eval())).all()


class TestReplay:
    def test_replayed_bits(self):
        """With other indexers, which would select others."""
        model = dsa_model(**SHARED).eval()
        with record_selections(model) as selections:
            expected = [call(model), call(model)]
        assert [len(of_layer) for of_layer in selections.values()] == [2, 2, 2]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "indexer" in name:
                    parameter.copy_(torch.randn_like(parameter))
        assert not torch.equal(call(model), expected[0])
        with replay_selections(model, selections):
            assert all(torch.equal(call(model), one) for one in expected)
        assert not torch.equal(call(model), expected[0])

    @pytest.mark.parametrize("method", [None, *FULL])
    def test_replayed_gradients(self, method):
        """Backward, and what it recomputes, comes after the block."""
        changes = recomputing(FULL[method]) if method else {}
        model = dsa_model(**SHARED, **changes, dsa_indexer_loss_coeff=None)
        with record_selections(model) as selections:
            expected = microbatch_gradients(model, (5, 6))
        assert {len(of_layer) for of_layer in selections.values()} == {2}, "no forward counts twice"
        expected = {name: gradient for name, gradient in expected.items() if gradient is not None}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.grad = None
                if "indexer" in name:
                    parameter.copy_(torch.randn_like(parameter))
        with replay_selections(model, selections):
            losses = losses_of(model, (5, 6))
        for loss in losses:
            loss.backward()
        found = dict(model.named_parameters())
        for name, gradient in expected.items():
            assert torch.equal(found[name].grad, gradient), name

    def test_refused(self):
        model = dsa_model(**SHARED).eval()
        with record_selections(model) as selections:
            call(model)
        with replay_selections(model, selections):
            call(model)
            with refusal("no selection left to replay for layer 1"):
                call(model)
        with refusal("of layers", "decoder.layers.1"), replay_selections(model, {}):
            pass
        short = {name: [one[:-1] for one in found] for name, found in selections.items()}
        expected = f"({TOKENS}, 2, {DSA.topk})"
        with refusal("for layer 1 must be", expected), replay_selections(model, short):
            call(model)
        with refusal("no layer with an indexer"), record_selections(gpt_model()):
            pass


TWO = {"pipeline_model_parallel_size": 2}
# How Megatron cuts models, and the pipeline stage of every layer.
CUTS = {
    "one stage": ({"num_layers": 3}, [0, 0, 0]),
    "even": ({"num_layers": 4, **TWO}, [0, 0, 1, 1]),
    "virtual": (
        {
            "num_layers": 8,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True,
            **TWO,
        },
        [0, 0, 1, 1, 0, 0, 1, 1],
    ),
    "a longer last stage": (
        {"num_layers": 5, "num_layers_in_last_pipeline_stage": 3, **TWO},
        [0, 0, 1, 1, 1],
    ),
    "by hand": (
        {"num_layers": 6, "pipeline_model_parallel_layout": "Ettt|t|tt|L", **TWO},
        [0, 0, 0, 1, 0, 0],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_stages_of_layers(name):
    fields, expected = CUTS[name]
    config = config_for(TINY, torch.float32, pipeline_dtype=torch.float32, **fields)
    assert stages_of_layers(config) == expected
