"""On which pipeline stage every layer is, as Megatron cuts models."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.dsa.pipeline_indices import stages_of_layers
from tests.support.cases import TINY, config_for

CUTS = {
    "one stage": ({"num_layers": 3}, [0, 0, 0]),
    "even": ({"num_layers": 4, "pipeline_model_parallel_size": 2}, [0, 0, 1, 1]),
    "virtual": (
        {
            "num_layers": 8,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": True,
        },
        [0, 0, 1, 1, 0, 0, 1, 1],
    ),
    "a longer last stage": (
        {
            "num_layers": 5,
            "pipeline_model_parallel_size": 2,
            "num_layers_in_last_pipeline_stage": 3,
        },
        [0, 0, 1, 1, 1],
    ),
    "by hand": (
        {
            "num_layers": 6,
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Ettt|t|tt|L",
        },
        [0, 0, 0, 1, 0, 0],
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_stages_of_layers(name):
    fields, expected = CUTS[name]
    config = config_for(TINY, torch.float32, pipeline_dtype=torch.float32, **fields)
    assert stages_of_layers(config) == expected
