"""What holds for every test of the repository."""

import os
from importlib.util import find_spec

import pytest
from longest_files import longest_first
from sampled_cases import mark_unsampled

# Outputs of a custom operation that share memory are an error of compiled code, as they are where
# CI is set; elsewhere torch 2.13 only warns. torch reads this when it is imported.
os.environ.setdefault("TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING", "1")

pytest_plugins = ["early_failures", "gpu_device"]


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


@pytest.hookimpl(tryfirst=True)  # before tests are selected by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks cases of tests that are `sampled`; orders the files for processes of pytest-xdist."""
    mark_unsampled(items)
    if hasattr(config, "workerinput"):  # with --no-loadscope-reorder
        items[:] = longest_first(items)


@pytest.fixture(params=[200, pytest.param(10_000, marks=pytest.mark.slow)], ids="{}cases".format)
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """Return how many damaged files a fuzz test tries."""
    return request.param
