"""Routed experts in the formats of vLLM and SGLang."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import pytest

from absorbed_mla.rollout_formats import routed_experts_from_sglang, routed_experts_from_vllm
from absorbed_mla.serving.server.protocol import npy_text
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
