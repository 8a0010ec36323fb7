"""Head weights of indexers in a model in bf16: the file's bits, and the selections of fp32."""

import logging

import pytest
import torch

from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.indexer import Indexer
from absorbed_mla.serving.export import hf_weights
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.load import load_model
from tests.conversion.support import V32, random_tensors, tiny_config, write_hugging_face
from tests.support import needs

BIAS = "e_score_correction_bias"
HEAD_WEIGHTS = "indexer.weights_proj.weight"


@pytest.fixture(scope="module")
def tensors():
    config = tiny_config(**V32)
    found = random_tensors(config, torch.float32)
    # No value has less than 23 bits of mantissa.
    return config, {name: x * 0.3 + 2**-20 * x for name, x in found.items()}


def loaded(tensors, folder, stored: torch.dtype, **options):
    config, values = tensors
    kept = {n: x.to(stored) if n.endswith(HEAD_WEIGHTS) else x for n, x in values.items()}
    write_hugging_face(folder, config, kept)
    given = LLMOptions(tensor_parallel_size=1, **{"dtype": "bfloat16", **options})
    device = torch.device(options.get("device", "cpu"))
    return load_model(open_model(folder), given, device), kept


def head_weights(weights) -> dict[str, torch.Tensor]:
    return {n: x for n, x in weights if n.endswith((HEAD_WEIGHTS, BIAS))}


@needs.no_gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bits(tensors, tmp_path, stored, dtype):
    """Exactly the file's values, in no wider a dtype than that needs; others are rounded."""
    model, files = loaded(tensors, tmp_path / "model", stored, dtype=dtype)
    own = getattr(torch, dtype)
    found = dict(hf_weights(model))
    expected = head_weights(files.items())
    assert len(expected) > 4
    for name, value in expected.items():
        assert torch.equal(found[name].double(), value.double()), name
        if name.endswith(HEAD_WEIGHTS):
            assert found[name].dtype == torch.promote_types(stored, own)
    assert {x.dtype for n, x in found.items() if n not in expected} == {own}
    for name in found.keys() - expected.keys():
        assert torch.equal(found[name], files[name].to(own)), name


def indexers(model) -> list[Indexer]:
    return [module for module in model.modules() if isinstance(module, Indexer)]


def chosen(vectors: IndexVectors, weights: torch.Tensor) -> torch.Tensor:
    """The keys that the queries select with these head weights, sorted."""
    scores = torch.einsum("sbhd,tbd->bsht", vectors.query.float(), vectors.key.float()).relu()
    return torch.einsum("bsht,sbh->bst", scores, weights).topk(24).indices.sort().values


@needs.no_gpu
def test_selections(tensors, tmp_path):
    """What a layer multiplies is that of fp32; with rounded weights it selects other keys."""
    model, files = loaded(tensors, tmp_path / "model", torch.float32)
    config, _ = tensors
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 1, config.hidden_size, generator=generator).bfloat16()
    q = torch.randn(200, 1, config.q_lora_rank, generator=generator).bfloat16()
    angles = torch.randn(200, config.qk_rope_head_dim // 2, generator=generator)
    different = 0
    for layer, indexer in enumerate(indexers(model)):
        weight = files[f"model.layers.{layer}.self_attn.{HEAD_WEIGHTS}"]
        made = indexer(x, q, angles.cos(), angles.sin())
        scale = (indexer.dsa.num_heads * indexer.dsa.head_dim) ** -0.5
        torch.testing.assert_close(made.weights, scale * (x.float() @ weight.T))
        exact = chosen(made, scale * (x.float() @ weight.T))
        assert torch.equal(chosen(made, made.weights), exact)
        rounded = chosen(made, scale * (x @ weight.T.bfloat16()).float())
        different += int((rounded != exact).any(-1).sum())
    assert different


@needs.no_gpu
def test_parity(tensors, tmp_path, caplog):
    """Agrees with training, whose weights are all in bf16."""
    with caplog.at_level(logging.WARNING, "absorbed_mla.serving"):
        model, _ = loaded(tensors, tmp_path / "model", torch.float32, parity=True)
    assert {x.dtype for x in head_weights(hf_weights(model)).values()} >= {torch.bfloat16}
    [line] = [line for line in caplog.messages if "weights_proj" in line]
    assert "torch.float32 in the checkpoint, is rounded to torch.bfloat16: parity" in line


@needs.gpu
@torch.no_grad()
def test_on_a_gpu(tensors, tmp_path):
    """In TransformerEngine's layers, where they are installed; TF32 would be 1e-3 off."""
    model, files = loaded(tensors, tmp_path / "model", torch.float32, device="cuda")
    config, _ = tensors
    x, q = (torch.randn(9, 1, n).bfloat16() for n in (config.hidden_size, config.q_lora_rank))
    angles = torch.randn(9, config.qk_rope_head_dim // 2)
    for layer, indexer in enumerate(indexers(model)):
        weight = files[f"model.layers.{layer}.self_attn.{HEAD_WEIGHTS}"]
        assert torch.equal(indexer.linear_weights_proj.weight.cpu(), weight)
        made = indexer(*(part.cuda() for part in (x, q, angles.cos(), angles.sin())))
        scale = (indexer.dsa.num_heads * indexer.dsa.head_dim) ** -0.5
        expected = scale * (x.float() @ weight.T)
        torch.testing.assert_close(made.weights.cpu(), expected, rtol=1e-5, atol=1e-6)


@needs.no_gpu
@torch.no_grad()
def test_forward(tensors, tmp_path):
    """A forward in bf16 with these weights in fp32."""
    model, _ = loaded(tensors, tmp_path / "model", torch.float32)
    tokens = torch.arange(60)[None]
    logits = model(tokens, torch.arange(60)[None], None)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
