"""Tests of which `nox -s tests` runs one case in n: `@pytest.mark.sampled(n)`."""

from collections import Counter
from collections.abc import Sequence

import pytest


def mark_unsampled(tests: Sequence[pytest.Item]) -> None:
    """Marks all but each n-th case of a sampled test as slow.

    The cases of a test are counted in the order of collection, from the first. A case with marks of
    its own that is slow already is not counted.

    Raises:
        pytest.UsageError: The number of a mark is not an integer above 1.
    """
    counted: Counter[str] = Counter()
    for test in tests:
        mark = test.get_closest_marker("sampled")
        if mark is None or test.get_closest_marker("slow") is not None:
            continue
        if len(mark.args) != 1 or type(mark.args[0]) is not int or mark.args[0] < 2:
            raise pytest.UsageError(f"{test.nodeid}: sampled needs an integer of at least 2")
        name = test.nodeid.partition("[")[0]
        if counted[name] % mark.args[0]:
            test.add_marker(pytest.mark.slow)
        counted[name] += 1
