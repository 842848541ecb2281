"""Every family trains equally in every layout and generates equally with a cache.

The models are those of the cases in ``parity/families``; transformers is not needed. By default,
one family of each kind of mathematics trains in two layouts.
"""

from collections.abc import Iterator

import pytest
import torch
from families.case import FamilyCase, cases
from families.ranks import (
    AXES,
    DECODE_LIMIT,
    config_of,
    decodes,
    decoding,
    every_layout,
    layout,
    layouts,
)
from layouts.models import LAYERS
from layouts.proof import STEPS
from megatron_models import ConfigError
from megatron_parallel.testing import WorkerPool

FEW = 2
"""Steps of the sample."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Makes the reference compute with the number of threads of a rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sampled() -> list[tuple[FamilyCase, str]]:
    """Returns the fast layouts: the mixed one, and ``ep`` or one of the others in turn."""
    found = []
    for at, case in enumerate(each for each in cases().values() if each.represents):
        fitting = [axis for axis in ("tp", "cp", "pp") if axis not in case.refused_axes]
        other = "ep" if config_of(case).expert_parallel else fitting[at % len(fitting)]
        found += [(case, "mixed"), (case, other)]
    return found


def named(pairs: list[tuple[FamilyCase, str]]) -> list[object]:
    return [pytest.param(case, axis, id=f"{case.family}-{axis}") for case, axis in pairs]


EVERY = [(case, axis) for case in cases().values() for axis in layouts(case)]


@pytest.mark.parametrize("case", cases().values(), ids=cases())
def test_the_settings_of_a_case_fit_the_layouts(case: FamilyCase) -> None:
    config = config_of(case)
    assert config.depth == LAYERS and config.embedding.vocab_size == 150
    assert set(every_layout(case)) == set(AXES) - (set() if config.expert_parallel else {"ep"})
    for axis in case.refused_axes:
        with pytest.raises(ConfigError, match=rf"\b{axis} \d cannot cut"):
            config.check_layout(every_layout(case)[axis].layout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "axis"), named(sampled()))
def test_few_steps_equal_one_rank(worker_pool: WorkerPool, case: FamilyCase, axis: str) -> None:
    found = layout(worker_pool, case, axis, FEW)
    assert found.equal, found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "axis"), named(EVERY))
def test_a_layout_equals_one_rank(worker_pool: WorkerPool, case: FamilyCase, axis: str) -> None:
    found = layout(worker_pool, case, axis, STEPS)
    assert found.equal, found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if case.represents else pytest.mark.slow)
        for name, case in cases().items()
        if decodes(case)
    ],
)
def test_cached_logits_equal_those_of_one_pass(worker_pool: WorkerPool, case: FamilyCase) -> None:
    found = decoding(worker_pool, case)
    assert found is not None and found <= DECODE_LIMIT
