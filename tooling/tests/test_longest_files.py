"""Two processes take the longest files first."""

from pathlib import Path
from types import SimpleNamespace

from longest_files import LONGEST, longest_first

ROOT = Path(__file__).parents[2]


def test_long_files_come_first_and_others_by_their_number_of_tests() -> None:
    last, first = LONGEST[-1], LONGEST[0]
    names = ["few::a", f"{last}::z", "many::b", f"{first}::d", "many::a", f"{first}::c"]
    found = [test.nodeid for test in longest_first([SimpleNamespace(nodeid=n) for n in names])]
    assert found == [f"{first}::d", f"{first}::c", f"{last}::z", "many::b", "many::a", "few::a"]


def test_the_files_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []
    assert len(set(LONGEST)) == len(LONGEST)
