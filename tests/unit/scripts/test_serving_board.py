"""The Grafana board, and the script that draws it: its panels' metrics are a server's."""

from __future__ import annotations

import json
import math

import pytest

import serving_board
from board.promql import Recording, metric_names
from tests.support.llm import serving, until
from tests.support.needs import installed

PACKAGES = {"starlette": "starlette", "prometheus_client": "prometheus-client", "openai": "openai"}
pytestmark = [installed(*names) for names in PACKAGES.items()]

BOARD = json.loads(serving_board.BOARD.read_text())
PANELS = BOARD["panels"]


def test_board_is_one_of_grafana():
    """One variable, which all panels and queries take their data from; no two panels overlap."""
    [variable] = BOARD["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")
    assert BOARD["schemaVersion"] >= 39 and len({one["id"] for one in PANELS}) == len(PANELS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["datasource"] == source and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [one["refId"] for one in panel["targets"]] == list("ABC"[: len(panel["targets"])])
        assert all(one["datasource"] == source for one in panel["targets"])
    places = [tuple(sorted(panel["gridPos"].items())) for panel in PANELS]
    assert len(set(places)) == len(places)
    assert all(dict(one)["x"] + dict(one)["w"] <= 24 for one in places)


def test_recorded_run(tmp_path):
    """Every metric of every expression is there after a few requests, and the picture is drawn."""
    picture = tmp_path / "board.png"
    with serving(api_key="key") as served:
        served.runner.step_seconds = 0.01
        options = ["--url", served.url, "--api-key", "key", "--seconds", "2"]
        assert serving_board.main([*options, "--output", str(picture)]) == 0
        until(lambda: not served.runner.has_running())
        recording = Recording()
        recording.add(0.0, served.http.config.app.state.metrics.text().decode())
    known = {name for scrape in recording._scrapes for name in scrape}
    expressions = [one["expr"] for panel in PANELS for one in panel["targets"]]
    read = {name for one in expressions for name in metric_names(one)}
    assert read <= known and len(read) > 15, read - known
    assert recording.evaluate("sum by (status) (http_requests_total)", 0)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 300_000


def scrape(count: float, **labels: str) -> str:
    shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"http_a_total{{{shown}}} {count}\n"


def recorded() -> Recording:
    """Two series, of which one falls as if its server had begun anew, and one is late."""
    found = Recording(window=4)
    # The first scrape is out of the window of the last one.
    for at, (one, other) in enumerate([(100, None), (0, None), (8, 2), (2, 4), (6, 8)]):
        late = "" if other is None else scrape(other, status="b", le="+Inf")
        found.add(2.0 * at, scrape(one, status="a", le="1") + late)
    return found


RATES = {"a": (6 - 2 + 2) / 4, "b": (8 - 2) / 4}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("http_a_total", {"a": 6, "b": 8}),
        ("sum by (status) (rate(http_a_total[$__rate_interval]))", RATES),
        ("sum(rate(http_a_total[$__rate_interval]))", {None: sum(RATES.values())}),
        ("max(http_a_total)", {None: 8}),
        ("sum(http_a_total) / max(http_a_total)", {None: 14 / 8}),
        ("sum(http_b_total) / sum(http_a_total)", {}),
    ],
)
def test_expressions(expression, expected):
    found = {dict(k).get("status"): v for k, v in recorded().evaluate(expression, 4).items()}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "value"), [(0.25, 0.5), (0.5, 1.0), (0.75, 2.0), (0.99, 3.0), (0.0, 0.0)]
)
def test_quantiles(share, value):
    """In even shares of a bucket; at most the last bound."""
    found = Recording()
    counts = {"1.0": 4, "3.0": 8, "+Inf": 8 + math.ceil(share > 0.9)}
    found.add(0, "".join(f'vllm:t_bucket{{le="{le}"}} {n}\n' for le, n in counts.items()))
    expression = f"histogram_quantile({share}, sum by (le) (vllm:t_bucket))"
    assert list(found.evaluate(expression, 0).values()) == pytest.approx([value])


def test_unknown_expression():
    with pytest.raises(ValueError, match=r"must be one that promql\.py knows, got 'irate"):
        recorded().evaluate("irate(http_a_total[5m])", 0)
