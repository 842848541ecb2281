"""What holds for every test of the repository."""

import pytest


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
