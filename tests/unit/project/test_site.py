"""The site of docs/: mkdocs builds it without a warning, and it needs no other host."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs, pages


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; ``--strict`` makes a page outside the navigation or a dead link an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@needs.installed("material", "mkdocs-material")
class TestSite:
    def test_every_page_is_there(self, site):
        for page in pages.DOCS.rglob("*.md"):
            assert (site / page.relative_to(pages.DOCS)).with_suffix(".html").is_file(), page

    def test_lists_and_tables_are_seen_as_such(self, site):
        """Where Markdown is shown as it is, one may follow text without an empty line between."""
        for page in site.rglob("*.html"):
            assert re.findall(r"^(?:- |\| ).*", page.read_text(), re.MULTILINE) == [], page

    def test_every_block_can_be_copied(self, site):
        """The button is made by the theme for each ``<code>`` of a block."""
        assert "content.code.copy" in (site / "index.html").read_text()
        for page in pages.DOCS.rglob("*.md"):
            made = (site / page.relative_to(pages.DOCS)).with_suffix(".html").read_text()
            highlighted = re.findall(r'<div class="(?:language-\w+ )?highlight">', made)
            assert len(highlighted) == len(pages.blocks(page.read_text())), page

    def test_what_a_page_says_is_found(self, site):
        found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
        places = {one["location"] for one in found if "decode_context_parallel" in one["text"]}
        assert "parallel-serving.html#decode-context-parallelism" in places

    def test_plots_are_there(self, site):
        for page in site.rglob("*.html"):
            for image in re.findall(r'<img [^>]*src="([^":]+)"', page.read_text()):
                assert (page.parent / image).is_file(), (page, image)

    def test_nothing_is_loaded_from_elsewhere(self, site):
        """A page is read where nothing else can be reached, and tells nobody that it is."""
        for page in site.rglob("*.html"):
            loaded = re.findall(
                r"<(?:script|img)\b[^>]*\bsrc=\"(https?:[^\"]+)|"
                r"<link\b[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*href=\"(https?:[^\"]+)",
                page.read_text(),
            )
            assert loaded == [], page
