import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxgc.api.comparison import compare
from onnxgc.api.html_pages import page_of_comparison
from tests.api.chains import chain
from tests.api.test_comparison import renamed

pytest.importorskip("fcntl", reason="browsers are driven through pipes of Unix")
from scripts import check_report
from scripts.check_report import NAMES, Page, browser, check_page

PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert PROGRAM is not None
    with browser(PROGRAM) as page:
        yield page


def written(text: str, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(text, encoding="ascii")
    return path


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes longer while other tests run."""
    monkeypatch.setattr(check_report, "MAX_SECONDS", 20.0)


def test_a_page_of_tables_only(page: Page, tmp_path: Path):
    text = page_of_comparison(compare(chain(2), chain(3), each=True, solvers=["acg", "chen-sqrt"]))
    assert "holds" in check_page(page, written(text, tmp_path), None)
    broken = text.replace('data-value="1.0"', 'data-value="x"')
    assert broken != text
    with pytest.raises(AssertionError, match="not sorted by figures: share"):
        check_page(page, written(broken, tmp_path), None)


def test_a_page_of_several_files(page: Page, tmp_path: Path):
    text = page_of_comparison(compare(chain(2, 64), renamed(chain(2, 64))))
    assert "holds" in check_page(page, written(text, tmp_path), None)
    with pytest.raises(AssertionError, match="curves are drawn"):
        check_page(page, written(text.replace('class="memory"', 'class="other"', 1), tmp_path), None)
