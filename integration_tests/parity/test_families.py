"""Every family equals its original in transformers, over drawn settings and random weights.

The cases are the files in ``families/``; ``nox -s families`` writes the measured errors into a
table. By default, each family has two draws; costly checks run for one family of each kind of
mathematics, and for all others as slow tests.
"""

from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import fields, parity
from families.case import REFUSED, FamilyCase, cases
from families.draws import drawn
from families.pages import DISTRIBUTION

FEW, MANY = 2, 25


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Makes torch compute with one thread, which is fastest for small models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def draws_of(family: str, count: int) -> list[dict[str, Any]]:
    """Returns draws of a family, which several tests share."""
    return drawn(cases()[family].draws, count)


def draws(few: int = FEW, many: int = MANY, *, representatives: bool = False) -> Any:
    """Parametrizes a test over families and draws.

    The first ``few`` draws are no slow tests; of families that represent no kind of mathematics
    only if ``representatives`` is False.
    """
    params = []
    for name, case in cases().items():
        for at, settings in enumerate(draws_of(name, many)):
            fast = at < few and (case.represents or not representatives)
            marks = () if fast else (pytest.mark.slow,)
            params.append(pytest.param(case, settings, id=f"{name}-{at}", marks=marks))
    return pytest.mark.parametrize(("case", "settings"), params)


def families(*, representatives: bool) -> Any:
    """Parametrizes a test over families, like `draws`."""
    params = [
        pytest.param(
            case,
            id=name,
            marks=() if case.represents or not representatives else (pytest.mark.slow,),
        )
        for name, case in cases().items()
    ]
    return pytest.mark.parametrize("case", params)


def test_every_family_has_a_case() -> None:
    found = entry_points(group="megatron.families")
    ours = {each.name for each in found if each.dist and each.dist.name == DISTRIBUTION}
    assert ours == cases().keys()
    assert {case.mathematics for case in cases().values()} <= cases().keys()


@draws()
def test_outputs_are_equal(case: FamilyCase, settings: dict[str, Any], tmp_path: Path) -> None:
    assert parity.logits(case, settings, tmp_path) <= parity.LIMIT


@draws(few=1)
def test_bfloat16_is_as_accurate_as_theirs(
    case: FamilyCase, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert parity.bfloat16(case, settings, tmp_path) <= parity.RATIO_LIMIT


@draws(few=1, representatives=True)
def test_gradients_are_equal(case: FamilyCase, settings: dict[str, Any], tmp_path: Path) -> None:
    assert parity.gradients(case, settings, tmp_path) <= parity.LIMIT


@draws(few=1, many=5)
def test_export_and_import_are_inverse(
    case: FamilyCase, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert parity.round_trip(case, settings, tmp_path) <= parity.LIMIT


@pytest.mark.sampled(4)
@families(representatives=True)
def test_every_changed_field_gives_equal_outputs_or_is_refused(
    case: FamilyCase, tmp_path: Path
) -> None:
    found = fields.changed_fields(case, tmp_path)
    strange = fields.STRANGE.keys() - found.fields
    assert found.refused == REFUSED | case.refused | strange
    assert found.equal >= found.fields - found.refused


@families(representatives=False)
def test_every_missing_field_has_the_default_of_transformers(case: FamilyCase) -> None:
    assert fields.missing_fields(case) <= case.settings.keys()
