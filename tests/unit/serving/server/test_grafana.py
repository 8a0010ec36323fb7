"""The Grafana board: its panels do not overlap, and their metrics are a server's."""

import json
import re
from pathlib import Path

from tests.support.llm import serving
from tests.unit.serving.server.test_metrics import client_of, complete, metrics_of

BOARD = json.loads((Path(__file__).resolve().parents[4] / "docs/grafana.json").read_text())
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


def test_every_metric_is_a_servers():
    with serving() as served, client_of(served) as client:
        complete(client, "hello", max_tokens=3)
        known = {name.partition("{")[0] for name in metrics_of(served)}
    expressions = [one["expr"] for panel in PANELS for one in panel["targets"]]
    read = {
        name for one in expressions for name in re.findall(r"\b(?:vllm:|http_|process_)\w+", one)
    }
    assert read <= known and len(read) > 15, read - known
