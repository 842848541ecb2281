"""A pytest plugin for bare machines: skips test files that import a missing third-party package."""

from collections.abc import Iterator

import pytest

OURS = "megatron_"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Iterator[None]:
    """Turns "no module named X" during collection into a skip that names X."""
    report: pytest.CollectReport = yield
    error = report.call.excinfo.value if report.failed and report.call.excinfo else None
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__
    if error is not None and error.name and not error.name.startswith(OURS):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {error.name} is not installed")
    return report
