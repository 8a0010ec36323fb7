"""Routed experts and chosen keys in the formats of vLLM and SGLang."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from absorbed_mla.dsa.config import DSAConfig
from absorbed_mla.rollout_formats import (
    indexer_topk_from_sglang,
    indexer_topk_from_vllm,
    routed_experts_from_sglang,
    routed_experts_from_vllm,
)
from absorbed_mla.serving.server.protocol import npy_text
from tests.support.cases import config_for
from tests.support.dsa_models import DSA, generating_fields
from tests.support.refusal import refusal

CONFIG = SimpleNamespace(
    num_layers=3, moe_layer_freq=[0, 1, 1], num_moe_experts=300, moe_router_topk=2
)
EXPERTS = np.arange(20).reshape(5, 2, 2)
# Engines have rows of zeros for dense layers.
ALL_LAYERS = np.concatenate((np.zeros((5, 1, 2), int), EXPERTS), 1)
BYTES = base64.b64encode(ALL_LAYERS.astype("<i4").tobytes()).decode()
REST = {"prompt": EXPERTS[:3].tolist()}


@pytest.mark.parametrize(
    ("read", "answer", "more"),
    [
        (routed_experts_from_vllm, {"routed_experts": npy_text(EXPERTS.astype("u2"))}, {}),
        (routed_experts_from_vllm, SimpleNamespace(routed_experts=ALL_LAYERS.astype("u1")), {}),
        (routed_experts_from_vllm, {"routed_experts": EXPERTS[3:].tolist()}, REST),
        (routed_experts_from_sglang, {"meta_info": {"routed_experts": BYTES}}, {}),
        (routed_experts_from_sglang, {"sglext": {"routed_experts": BYTES}}, {}),
    ],
    ids=["vllm", "vllm object", "vllm 0.21", "sglang", "sglang chat"],
)
def test_formats(read, answer, more):
    found = read(answer, CONFIG, **more)
    assert found.dtype == np.int32 and np.array_equal(found, EXPERTS)
    later = read(answer, CONFIG, start=2, **more)
    assert (later[:2] == -1).all() and np.array_equal(later[2:], EXPERTS)


# Layers 1 and 3 of four have an indexer; engines may have rows for the others, and any order.
KEYS = np.array([[[0, -1, -1]] * 2, [[0, 1, -1], [0, 1, -1]], [[0, 1, 2], [0, 2, 3]]], "<i4")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_keys(engine):
    fields = {"dsa_indexer_skip_topk_offset": 1, **generating_fields()}
    config = config_for(fields.pop("mla"), torch.float32, **fields)
    indexed = DSAConfig.from_config(config).indexed_layers(4)
    assert len(indexed) == 2
    given = np.full((3, 4, DSA.topk), 7, "<i4")
    given[:, [number - 1 for number in indexed]] = KEYS[..., ::-1]
    if engine == "vllm":
        assert np.array_equal(
            indexer_topk_from_vllm({"indexer_topk": npy_text(given)}, config), KEYS
        )
        found = indexer_topk_from_vllm({"indexer_topk": KEYS}, config)
        with refusal("2 layers with an indexer or 4 layers, 3", "(3, 1, 3)"):
            indexer_topk_from_vllm({"indexer_topk": KEYS[:, :1]}, config)
    else:
        text = base64.b64encode(given.tobytes()).decode()
        found = indexer_topk_from_sglang({"meta_info": {"indexer_topk": text}}, config)
        with refusal("4 layers x 3 keys"):
            indexer_topk_from_sglang({"meta_info": {"indexer_topk": text[:16]}}, config)
    assert found.dtype == np.int32 and np.array_equal(found, KEYS)


@pytest.mark.parametrize(
    ("read", "answer", "words"),
    [
        (routed_experts_from_vllm, {}, ["--enable-return-routed-experts"]),
        (routed_experts_from_vllm, {"routed_experts": "?"}, ["no .npy file"]),
        (routed_experts_from_vllm, {"routed_experts": EXPERTS[:, :1]}, ["2 layers", "(5, 1, 2)"]),
        (routed_experts_from_vllm, {"routed_experts": EXPERTS + 299}, ["below", "299 to 318"]),
        (routed_experts_from_sglang, {"meta_info": {}}, ["SGLang", "routed-experts"]),
        (routed_experts_from_sglang, {"sglext": {"routed_experts": BYTES[:16]}}, ["3 layers x 2"]),
        (routed_experts_from_sglang, {"sglext": {"routed_experts": "?"}}, ["int32 in base64"]),
    ],
)
def test_refused(read, answer, words):
    with refusal(*words):
        read(answer, CONFIG)
