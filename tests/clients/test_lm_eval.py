"""lm-eval: multiple choice and perplexity, equal to those of its own model of transformers."""

import json

import pytest

pytest.importorskip("lm_eval")

ROWS = [
    {
        "q": "The sky is",
        "choices": [" blue", " made of cheese"],
        "answer": 0,
        "text": "A sky. " * 9,
    },
    {"q": "One and one", "choices": [" is six", " make two"], "answer": 1, "text": "One, two."},
]
CHOICE = {"output_type": "multiple_choice", "doc_to_text": "q", "doc_to_choice": "choices"}
CHOICE |= {"doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
ROLLING |= {"metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}


@pytest.fixture
def tasks(tmp_path):
    from lm_eval.api.task import ConfigurableTask

    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    data = {"dataset_path": "json", "test_split": "train"}
    data["dataset_kwargs"] = {"data_files": {"train": str(tmp_path / "rows.json")}}
    kinds = {"choice": CHOICE, "rolling": ROLLING}
    return lambda: {
        name: ConfigurableTask(config={"task": name, **data, **kind})
        for name, kind in kinds.items()
    }


def test_scores(url, folder, tasks):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    ours = LocalCompletionsAPI(
        model="tiny", base_url=f"{url}/completions", tokenizer=str(folder), max_length=256
    )
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", max_length=256)
    found, expected = (
        evaluate(lm=lm, task_dict=tasks(), log_samples=True, bootstrap_iters=0)["samples"]
        for lm in (ours, theirs)
    )
    for name in ("choice", "rolling"):
        for one, other in zip(found[name], expected[name], strict=True):
            scores = [answer[0] for answer in one["filtered_resps"]] if name == "choice" else one
            if name == "choice":
                of_other = [answer[0] for answer in other["filtered_resps"]]
                assert scores == pytest.approx(of_other, abs=1e-4)
            else:
                assert one["filtered_resps"] == pytest.approx(other["filtered_resps"], abs=1e-3)
