"""Pages that are generated from the code are up to date: defaults, choices, tables of models."""

from pathlib import Path

import pytest
from generated_docs import PAGES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_that_of_the_code(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    assert page == PAGES[name](), "run python tooling/generated_docs.py"
