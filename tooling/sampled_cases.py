"""Tests of which `nox -s tests` runs one case in n: `@pytest.mark.sampled(n)`."""

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

import pytest


def mark_unsampled(tests: Sequence[pytest.Item]) -> None:
    """Marks all but each n-th case of a sampled test as slow.

    Which of the first n cases comes first depends on the name of the test, so that the tests of a
    file together run all values of a fixture that they share. A case that is slow by a mark of its
    own is not counted.

    Raises:
        pytest.UsageError: The number of a mark is not an integer above 1.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for test in tests:
        if test.get_closest_marker("sampled") and not test.get_closest_marker("slow"):
            cases[test.nodeid.partition("[")[0]].append(test)
    for name, group in cases.items():
        mark = group[0].get_closest_marker("sampled")
        if mark is None or len(mark.args) != 1 or type(mark.args[0]) is not int or mark.args[0] < 2:
            raise pytest.UsageError(f"{name}: sampled needs an integer of at least 2")
        first = crc32(name.encode()) % min(mark.args[0], len(group))
        for index, test in enumerate(group):
            if index % mark.args[0] != first:
                test.add_marker(pytest.mark.slow)
