"""What the pages say was measured is what the data in docs/measurements/ say."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

from absorbed_mla.registry import Registry
from checks import docs_tables, oracle_report
from checks.docs_tables import DOCS, MEASUREMENTS
from checks.tables import measured, options

DATA = DOCS / MEASUREMENTS


def test_tables_are_what_their_data_say(capsys):
    code = docs_tables.main(["--check"])
    assert code == 0, f"run scripts/checks/docs_tables.py: {capsys.readouterr().out}"


@pytest.mark.parametrize("words", [[], ["--check"]])
def test_a_folder_that_is_not_there(tmp_path, capsys, words):
    """Not that of pages without a difference."""
    assert docs_tables.main(["--docs", str(tmp_path / "docs"), *words]) == 2
    assert "--docs must be a folder" in capsys.readouterr().err


def test_every_table_is_in_a_page():
    texts = [page.read_text() for page in docs_tables.pages(DOCS)]
    used = {match[2] for text in texts for match in docs_tables._BLOCK.finditer(text)}
    known = set(docs_tables.TABLES)
    assert used == known


@pytest.fixture
def copied(tmp_path) -> Path:
    """The folder of the data in a copy of the pages."""
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("*.png"))
    return tmp_path / "docs" / MEASUREMENTS


def test_a_table_that_differs_is_found_and_written(copied, capsys):
    file = copied / "attention" / "layer.json"
    content = json.loads(file.read_text())
    # Implementation and recomputation -> milliseconds and MiB.
    figures = {("megatron", True): (40, 400), ("ours", True): (20, 300)}
    figures |= {("megatron", False): (30, 1000), ("ours", False): (15, 500)}
    for (implementation, recompute), (milliseconds, mebibytes) in figures.items():
        case = {"implementation": implementation, "recompute": recompute, "heads": 128}
        case |= {"tokens": 8192, "layout": "sbhd"}
        [row] = [r for r in content["rows"] if r["case"] == case]
        row["step"]["median"], row["kept_bytes"] = milliseconds / 1e3, mebibytes * 2**20
    file.write_text(json.dumps(content))
    docs = ["--docs", str(copied.parent)]
    assert docs_tables.main([*docs, "--check"]) == 1
    assert docs_tables.main(docs) == 0
    pages = "attention.md, performance.md, performance.png"
    assert capsys.readouterr().out == f"Differ: {pages}\nWritten: {pages}\n"
    recomputed, kept = "40.00 | 20.00 | 0.50 | 400 | 300 | 0.75", "30.00 | 15.00 | 0.50 | 1000"
    line = f"| 128 | 8k | sbhd | {recomputed} | {kept} | 500 | 0.50 |"
    assert line in (copied / "attention.md").read_text()


def test_an_unknown_table(copied):
    page = copied / "attention.md"
    page.write_text(page.read_text().replace("<!-- table: layers -->", "<!-- table: layer -->"))
    with pytest.raises(KeyError, match="layer"):
        docs_tables.main(["--docs", str(copied.parent)])


def ring(copied: Path, implementation: str, recompute: str) -> dict:
    """The first such row of two GPUs, of Megatron's made from ours."""
    content = json.loads((copied / "context-parallel" / "h200-x2.json").read_text())
    row = next(r for r in content["rows"] if r["case"]["implementation"] == implementation)
    row["case"]["recompute"] = recompute
    return row


@pytest.mark.parametrize("recompute", ["none", "mla_up_proj"])
def test_only_like_is_compared_with_like(copied, recompute):
    """Ours recomputed beside Megatron's recomputed has ratios; beside one that is not, none."""
    folder = copied / "context-parallel"
    content = json.loads((folder / "h200-x2.json").read_text())
    ours, theirs = ring(copied, "ours", "mla_up_proj"), ring(copied, "megatron", recompute)
    ours["step_seconds"], theirs["step_seconds"] = [0.01], [0.02]
    output = ours["case"]["tokens"] // 2 * 7168 * 2
    ours["kept_bytes"], theirs["kept_bytes"] = output + 2**20, output + 4 * 2**20
    for file in folder.glob("*.json"):
        file.unlink()
    (folder / "a.json").write_text(json.dumps({**content, "rows": [ours, theirs]}))
    table, ranges = (measured.TABLES[f"context parallel{x}"](copied) for x in ("", " ranges"))
    [line] = table.splitlines()[2:]
    if recompute == "none":
        assert line.endswith("| - | 10.0 | - | - | 1 | - | 20.0 | - | - | 4 | - | - |")
        assert ranges.startswith("Not measured")
    else:
        assert line.endswith("| 20.0 | 10.0 | 0.50 | 4 | 1 | 0.25 | - | - | - | - | - | - |")
        assert "0.50 to 0.50 | 0.25 to 0.25" in ranges


def worst(machine: str, *, cp: bool, table: str = "module") -> float:
    """In float64 with the rotary table of the module, or of the oracle."""
    rows = oracle_report.read_summary(DATA / "accuracy" / machine / "summary.json")
    return max(
        row["worst_relative_error"]
        for row in rows
        if row["dtype"] == "float64"
        and row["rotary_table"].startswith(table)
        and (row["context_parallel"] > 1) is cp
    )


def test_claims_about_float64():
    """Of prose: context-parallel.md, and the bound that accuracy.md gives."""
    page = (DATA / "context-parallel.md").read_text()
    [claimed] = re.findall(r"worst (\d\.\de-\d+), bound 1e-9", page)
    assert claimed == f"{max(worst('cpu', cp=True), worst('h200', cp=True)):.1e}"
    accuracy = " ".join((DATA / "accuracy.md").read_text().split())
    assert "worst error is below 1e-14" in accuracy
    assert max(worst(m, cp=c) for m in ("cpu", "h200") for c in (False, True)) < 1e-14
    [claimed] = re.findall(r"in float64, the error is up to (\d\.\de-\d+)", accuracy)
    with_its_own = max(worst(machine, cp=False, table="oracle") for machine in ("cpu", "h200"))
    assert claimed == f"{with_its_own:.1e}"
    # README.md rounds it up.
    assert "1e-7 with one in float64" in (DOCS.parent / "README.md").read_text()
    assert with_its_own < 1e-7


def test_summary_of_errors(tmp_path):
    """An error above the smallest bound of others is no violation; one above its own is."""
    common = dict.fromkeys(oracle_report.CASE, "x")
    figures = [(1e-6, 2e-6, "a"), (1e-7, 5e-7, "b"), (3e-6, 1e-6, "c")]
    rows = [{**common, "worst_relative_error": e, "bound": b, "tensor": t} for e, b, t in figures]
    table, found = tmp_path / "errors.jsonl", tmp_path / "summary.json"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert oracle_report.main([str(found), str(table)]) == 0
    [case] = oracle_report.read_summary(found)
    assert case == {
        **common,
        "combinations": 3,
        "worst_relative_error": 3e-6,
        "least_bound": 5e-7,
        "greatest_bound": 2e-6,
        "worst_error_over_bound": 3.0,
        "tensor": "c",
    }


class TestSupportMatrix:
    """From the files of a folder, so that one new file adds a line."""

    FILE = """
class Entry:
    name = "{name}"
    summary = "needs {name}"
    {forms}

ENTRY = Entry()
"""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch) -> Path:
        folder = tmp_path / "implementations_of_this_test"
        folder.mkdir()
        (folder / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        found = (Registry("option", folder.name), "backend")
        monkeypatch.setitem(options.KINDS, "support attention backends", found)
        return folder

    @pytest.mark.parametrize("forms", ["forms = ('absorbed', 'expanded')", ""])
    def test_lines(self, folder, forms, tmp_path, capsys):
        for name in ("beta", "alpha"):
            (folder / f"{name}.py").write_text(self.FILE.format(name=name, forms=forms))
        page = tmp_path / "README.md"
        page.write_text("a\n<!-- table: support attention backends -->\n<!-- end -->\nb\n")
        (tmp_path / "docs").mkdir()
        assert docs_tables.main(["--docs", str(tmp_path / "docs"), "--check"]) == 1
        assert docs_tables.main(["--docs", str(tmp_path / "docs")]) == 0
        form = " absorbed, expanded |" if forms else ""
        assert page.read_text().splitlines()[4:6] == [
            f"| `alpha` |{form} needs alpha |",
            f"| `beta` |{form} needs beta |",
        ]
        assert docs_tables.main(["--docs", str(tmp_path / "docs"), "--check"]) == 0
        for name in ("alpha", "beta"):
            sys.modules.pop(f"{folder.name}.{name}", None)
        sys.modules.pop(folder.name, None)
