"""The pages without running them: commands parse, Python names what exists, links lead somewhere.

``tests/readme`` runs what can run.
"""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from absorbed_mla.export import hf_weights
from absorbed_mla.registry import ATTENTION_BACKENDS
from tests.support import pages
from tests.support.commands import require_command
from tests.support.fragments import require_fragment

README = pages.ROOT / "README.md"
PAGE = README.read_text()
BLOCKS = pages.blocks(PAGE)
GUIDES = sorted(pages.DOCS.glob("*.md"))
TEXTS = {page: page.read_text() for page in pages.all_pages()}
# Lists, not guides: they begin with what they list.
LISTS = ("limitations.md", "support.md")


def name(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


def found(*kinds: str) -> list:
    """Every block of these kinds in the pages, each as a parameter with its page and line."""
    return [
        pytest.param(block, id=f"{name(page)}:{block.line}")
        for page, text in TEXTS.items()
        for block in pages.blocks(text)
        if block.kind in kinds
    ]


def words_of(kinds: tuple[str, ...]) -> list[list[str]]:
    """Every command of README.md's blocks of these kinds, split at spaces, comments left out."""
    commands = [c for block in BLOCKS if block.kind in kinds for c in block.commands()]
    return [command.split(" #")[0].split() for command in commands]


class TestLength:
    def test_readme(self):
        """One page: what is longer belongs into docs/."""
        assert PAGE.count("\n") <= 150

    @pytest.mark.parametrize("page", GUIDES, ids=name)
    def test_a_page_can_be_read(self, page):
        assert len(TEXTS[page].split()) <= 1500

    def test_all_pages_can_be_read(self):
        """Measurements are looked up, and written by scripts."""
        assert sum(len(TEXTS[page].split()) for page in GUIDES) <= 25_990


class TestBlocksOfPages:
    @pytest.mark.parametrize("page", TEXTS, ids=name)
    def test_whether_a_block_runs_is_seen_from_it(self, page):
        """It runs, or a comment says why not; what has a prompt cannot be pasted into a shell."""
        blocks = pages.blocks(TEXTS[page])
        kinds = (*pages.EXECUTED, *pages.DRAWN)
        if page.parent == pages.ROOT:
            kinds += pages.SHOWN
        assert {block.kind for block in blocks} <= set(kinds)
        assert TEXTS[page].count("```") == 2 * len(blocks)
        assert all(block.reason for block in blocks if block.kind in pages.SHOWN)
        comments = re.findall(r"^ *<!-- not run", TEXTS[page], re.MULTILINE)
        assert len(comments) == sum(block.reason is not None for block in blocks)

    @pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in LISTS], ids=name)
    def test_a_guide_begins_with_what_is_typed(self, page):
        assert pages.blocks(TEXTS[page])
        before = TEXTS[page][: TEXTS[page].index("```")]
        assert "\n## " not in before and len(before.split()) <= 60

    def test_commands_are_in_blocks(self):
        """Indented ones would be tested by nobody, and cannot be copied with a click."""
        for page, text in TEXTS.items():
            assert not re.findall(r"^ {4,}(?:\$ )?(?:python|torchrun|pip) ", text, re.M), name(page)

    @pytest.mark.parametrize("block", found("bash"))
    def test_bash_parses(self, block):
        done = subprocess.run(["bash", "-n", "-c", block.text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("block", found("bash", "console"))
    def test_commands_have_options_that_exist(self, block, monkeypatch):
        for command in block.commands():
            require_command(command, monkeypatch)

    @pytest.mark.parametrize("block", found("python"))
    def test_python_names_what_exists(self, block):
        require_fragment(block.text)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("python scripts/nothing.py", "no file"),
        ("python scripts/generate.py --no-such-option 1", "no-such-option"),
        ("torchrun --nproc-per-node 2 scripts/train.py --no-such-option 1", "no-such-option"),
        ("absorbed-mla-serve FOLDER --no-such-option", "no-such-option"),
        ("absorbed-mla-convert turn A B", "turn"),
        ("bash scripts/run_tests.sh --no-such-option", "no-such-option"),
        ("pip install '.[nothing]'", "nothing"),
        ("absorbed-mla-nothing", "no program"),
    ],
)
def test_a_wrong_command_is_found(command, fault, monkeypatch, capfd):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=fault):
        require_command(command, monkeypatch)


@pytest.mark.parametrize(
    "code",
    [
        "from absorbed_mla import Nothing",
        "AbsorbedMLAOptions(no_such_option=1)",
        "LLM('folder', no_such_option=1)",
        "from absorbed_mla.export import hf_weights\nhf_weights(model, no_such_option=1)",
    ],
)
def test_a_wrong_name_is_found(code):
    with pytest.raises(AssertionError):
        require_fragment(code)


class TestLinks:
    """Headings have the same anchors on the site and where Markdown is shown as it is."""

    @staticmethod
    def slugs(text: str) -> list[str]:
        text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles)
        kept = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in plain)
        return [title.replace(" ", "-") for title in kept]

    @pytest.mark.parametrize("page", TEXTS, ids=name)
    def test_anchors_are_the_same_everywhere(self, page):
        slugs = self.slugs(TEXTS[page])
        assert [slug for slug in slugs if re.search(r"--|^-|-$", slug)] == []
        assert len(slugs) == len(set(slugs))

    @pytest.mark.parametrize("page", TEXTS, ids=name)
    def test_links_lead_somewhere(self, page):
        for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            if anchor:
                assert anchor in self.slugs(target.read_text()), link

    @pytest.mark.parametrize("page", TEXTS, ids=name)
    def test_paths_lead_somewhere(self, page):
        # A program of a commit need not be here any more.
        text = re.sub(r"`[^`]+` of [0-9a-f]{8}\b|commit [\w-]+: `[^`]+`", "", TEXTS[page])
        paths = re.findall(r"\b((?:absorbed_mla|docs|scripts|specs|tests)/[\w./-]+\w)", text)
        missing = [path for path in paths if not (pages.ROOT / path).exists()]
        # What a command writes is not there yet.
        assert [path for path in missing if "json" not in path] == []

    @pytest.mark.parametrize("page", TEXTS, ids=name)
    def test_dotted_names_exist(self, page):
        for dotted in set(re.findall(r"\b(?:absorbed_mla|specs)(?:\.\w+)+", TEXTS[page])):
            # These need Megatron-Bridge and Python 3.12.
            if not dotted.startswith(("absorbed_mla.bridge", "specs.absorbed_mla_gpt_builder")):
                pkgutil.resolve_name(dotted)

    def test_pages_that_code_names(self):
        folders = ("absorbed_mla", "checkpoint_conversion", "specs", "scripts")
        for file in (file for folder in folders for file in (pages.ROOT / folder).rglob("*.py")):
            for page in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text()):
                assert (pages.ROOT / page).is_file(), (name(file), page)

    @pytest.mark.parametrize(
        "index", [pages.DOCS / "index.md", pages.DOCS / "measurements" / "index.md"], ids=name
    )
    def test_every_page_is_in_its_index(self, index):
        """A page that the index does not name is lost."""
        linked = {
            (index.parent / p).resolve() for p in re.findall(r"\]\(([\w./-]+\.md)", TEXTS[index])
        }
        assert {page.resolve() for page in index.parent.glob("*.md")} - {index.resolve()} <= linked


def test_backends_of_the_page_are_those_that_are_there():
    """Their table says more than the registry knows, so that no script writes it."""
    rows = re.findall(
        r"^\| `(\w+)` \| (?:absorbed|expanded|both)", TEXTS[pages.DOCS / "attention.md"], re.M
    )
    assert sorted(rows) == sorted(ATTENTION_BACKENDS.names())


class TestReadme:
    def test_the_two_commands_come_first(self):
        first, second = BLOCKS[:2]
        assert first.commands()[0].startswith("bash scripts/quickstart.sh")
        assert first.commands()[1].startswith("source .venv/bin/activate")
        assert second.commands()[0].startswith("bash scripts/run_tests.sh")

    def test_commands_of_every_program(self):
        programs = {words[0] for words in words_of(("bash", "console"))}
        assert {"torchrun", "absorbed-mla-convert", "absorbed-mla-serve"} <= programs

    def test_model_of_the_page_can_be_exported(self):
        """What a newcomer begins with is one of DeepSeek's layers, so that all of this fits."""
        lines = ast.parse(next(block.text for block in BLOCKS if block.kind == "python")).body
        # Calls that make process groups, which the tests have, and all behind the model.
        last = next(i for i, line in enumerate(lines) if ast.unparse(line).startswith("model = "))
        made = [line for line in lines[: last + 1] if not isinstance(line, ast.Expr)]
        names: dict = {}
        exec(compile(ast.Module(made, []), "README.md", "exec"), names)
        weights = dict(hf_weights(names["model"]))
        assert weights["model.layers.0.self_attn.kv_a_layernorm.weight"].shape == (32,)
        assert weights["lm_head.weight"].shape == (256, 128)

    def test_inputs_come_from_the_quickstart_or_an_earlier_command(self):
        """Nothing is loaded that nobody wrote."""
        quickstart = (pages.ROOT / "scripts/quickstart.py").read_text()
        written = {f"quickstart_output/{n}" for n in re.findall(r'output / "(\w+)"', quickstart)}
        assert "quickstart_output/trained" in written
        for words in words_of(("bash",)):
            if "torchrun" in words[0]:
                used = {words[i + 1] for i, w in enumerate(words) if w in ("--load", "--data")}
                made = {words[i + 1] for i, w in enumerate(words) if w == "--save"}
            elif words[0] == "absorbed-mla-convert":
                folders = [w for w in words[2:] if w.startswith("quickstart_output/")]
                convert = words[1] == "convert"
                used, made = set(folders[:1] if convert else folders), set(folders[1:])
            else:
                continue
            assert used <= written, words
            written |= made


class TestBlocks:
    def test_blocks_and_script(self):
        text = "a\n```bash\nx \\\n  y  # z\n```\n```console\n$ no\n```\n```python\np = 1\n```\n"
        bash, console, python = pages.blocks(text)
        assert (bash.kind, bash.line, bash.commands()) == ("bash", 2, ["x    y  # z"])
        assert console.commands() == ["no"]
        script = pages.script([bash, console, python])
        assert script.index("x \\") < script.index("p = 1")
        assert "no" not in script
        assert "=== README.md:2'" in script

    def test_a_reason_is_that_of_the_block_behind_it(self):
        text = "- a\n\n  <!-- not run: a GPU -->\n  ```bash\n  one\n  ```\n\n```bash\ntwo\n```\n"
        one, two = pages.blocks(text)
        assert (one.reason, one.text, one.line, one.runs) == ("a GPU", "one\n", 4, False)
        assert (two.reason, two.runs) == (None, True)
        assert "one" not in pages.script([one, two])

    def test_a_command_that_fails_ends_the_script(self):
        page = pages.blocks("```bash\nfalse\n```\n")
        done = subprocess.run(["bash", "-c", pages.script(page)], capture_output=True, text=True)
        assert done.returncode == 1
        assert "end" not in done.stdout


def test_a_command_in_a_folder_with_a_space(tmp_path):
    """The interpreter's path stands in the command's first line, where a space would end it."""
    pytest.importorskip("pip._vendor.distlib")
    folder = tmp_path / "a new user"
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    pages.make_command(folder, "find = shlex:quote")
    done = subprocess.run([folder / "find"], capture_output=True, text=True)
    # It was found and called, without what it needs.
    assert "quote() missing 1 required positional argument" in done.stderr
