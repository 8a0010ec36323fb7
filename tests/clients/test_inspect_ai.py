"""inspect-ai: an evaluation of two samples."""

import pytest

inspect_ai = pytest.importorskip("inspect_ai")


def test_evaluation(url, tmp_path):
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    samples = [Sample(input="Where?", target="zzzz"), Sample(input="When?", target="")]
    task = inspect_ai.Task(dataset=MemoryDataset(samples), solver=generate(), scorer=includes())
    model = get_model(
        "openai-api/tiny/tiny", base_url=url, api_key="k", config=GenerateConfig(max_tokens=6)
    )
    [log] = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
    assert log.status == "success" and len(log.samples) == 2
