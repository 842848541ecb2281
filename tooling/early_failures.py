"""A pytest plugin: names each failed test at once, since the traceback comes when all have run."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers the lines, in the process that prints."""
    config.pluginmanager.register(_Lines(config), "early failures")


class _Lines:
    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a line for a failed test; pytest-xdist calls this in its first process, too."""
        terminal = self._plugins.get_plugin("terminalreporter")  # the others have none
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            terminal.write_line(f"FAILED {report.nodeid}: {' '.join(text.split())[:200]}")
