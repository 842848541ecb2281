"""A pytest plugin: the device of tests marked `gpu`, real or simulated.

    pytest -m gpu                       # on the CUDA device
    pytest -m gpu --device simulated    # without a CUDA device, see `simulated_device`

A test that runs on both takes the fixture `device`. A test that needs a real GPU gives the reason:
`@pytest.mark.gpu(real="NCCL")`.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from simulated_device.tensors import Dispatch

CHOICES = ("cuda", "simulated")
_NOT_SIMULATED = pytest.StashKey[str]()

Waits = Callable[[], AbstractContextManager[Counter[str]]]
"""Counts, in a block, how often the host waits for the device, by place."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--device",
        choices=CHOICES,
        default="cuda",
        help="device of tests marked gpu: a CUDA device (the default) or a simulated one",
    )
    # Now, before a conftest imports torch: it looks for devices once.
    config = pluginmanager.get_plugin("pytestconfig")
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--device")
    if ours.parse_known_args(config.invocation_params.args)[0].device == "simulated":
        from simulated_device import NoGuardError, load_guard  # needs megatron-parallel

        try:
            load_guard()
        except NoGuardError as error:
            config.stash[_NOT_SIMULATED] = str(error)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("device") != "simulated":
        return None
    missing = config.stash.get(_NOT_SIMULATED, None)
    return f"DEVICE NOT SIMULATED: {missing}" if missing else "device: simulated, on the CPU"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` that cannot run here, with the reason."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    for item in marked:
        reason = _not_simulated(item) if config.getoption("device") == "simulated" else _no_cuda()
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device; torch sees none"


def _not_simulated(item: pytest.Item) -> str:
    missing = item.config.stash.get(_NOT_SIMULATED, None)
    if missing:
        return f"no simulated device: {missing}"
    reasons = [mark.kwargs["real"] for mark in item.iter_markers("gpu") if "real" in mark.kwargs]
    if reasons:
        return f"needs a real CUDA device: {reasons[0]}"
    taken = "device" in getattr(item, "fixturenames", ())
    return "" if taken else "needs a real CUDA device: it does not take the fixture `device`"


@pytest.fixture
def _dispatch(request: pytest.FixtureRequest) -> "Iterator[Dispatch | None]":
    """The simulation during a test; None on a real device."""
    if request.config.getoption("device") != "simulated":
        yield None
        return
    from simulated_device import simulated

    with simulated() as dispatch:
        yield dispatch


@pytest.fixture
def device(_dispatch: "Dispatch | None") -> "torch.device":
    """The CUDA device of a test marked `gpu`, simulated under `--device simulated`."""
    import torch

    return torch.device("cuda:0")


@pytest.fixture
def device_waits(_dispatch: "Dispatch | None") -> Waits:
    """Counts the waits for the device: torch's own warnings, or the count of the simulation."""

    @contextmanager
    def warned() -> Iterator[Counter[str]]:
        import torch

        found: Counter[str] = Counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in said if "synchronizing CUDA operation" in str(each.message)]
        found.update(f"{each.filename}:{each.lineno}" for each in waits)

    @contextmanager
    def noted() -> Iterator[Counter[str]]:
        assert _dispatch is not None
        before = _dispatch.waits + _dispatch.blocking_copies
        found: Counter[str] = Counter()
        yield found
        found.update(_dispatch.waits + _dispatch.blocking_copies - before)

    return warned if _dispatch is None else noted
