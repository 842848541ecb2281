"""What holds for every test of the repository."""

from importlib.util import find_spec

import pytest


def pytest_configure() -> None:
    """Give Hypothesis no deadline: no test is bounded by the clock."""
    if find_spec("hypothesis") is None:  # not every package's tests have it
        return
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile(
        "clockless", settings.default, deadline=None, suppress_health_check=slow
    )
    settings.load_profile("clockless")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where torch sees no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.fixture(params=[200, pytest.param(10_000, marks=pytest.mark.slow)], ids="{}cases".format)
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """Return how many damaged files a fuzz test tries."""
    return request.param
