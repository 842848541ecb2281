"""The functional matrix names runs whose losses are wrong."""

import pytest
from functional.__main__ import SHOWN, row
from functional.cases import LAYOUTS, MODELS, STEPS, layout_flags


def falling(change: float = 0.0, at: int = 7) -> dict[int, dict[str, float]]:
    """Returns losses that fall from 8 to 6, with a change of one of them."""
    found = {n: {"lm loss": 8 - 2 * n / STEPS, "sop loss": 0.7} for n in range(1, STEPS + 1)}
    found[at]["lm loss"] += change
    return found


NAMES = ("lm loss", "sop loss")


def test_a_row_has_the_losses_of_three_steps_and_the_largest_difference():
    cells, wrong = row(falling(1e-4), falling(), NAMES, "")
    assert len(cells) == len(SHOWN) + 2 and cells[0] == "7.9600, 0.7000"
    assert cells[-2:] == ["1e-04", "bit for bit"] and not wrong


@pytest.mark.parametrize(
    ("found", "wrong", "message"),
    [
        (falling(0.1), "", "a loss differs by 1.0e-01 from one rank"),
        (falling(2.0, STEPS), "", "the lm loss does not fall"),
        (falling(), "losses of the continued run differ", "losses of the continued run differ"),
    ],
)
def test_wrong_runs_are_named(found, wrong, message):
    cells, named = row(found, falling(), NAMES, wrong)
    assert message in named and cells[-1] == ("no" if wrong else "bit for bit")


def test_the_matrix_has_the_layouts_of_megatron_lm():
    assert [*MODELS] == ["gpt", "bert"]
    assert [*LAYOUTS][1:] == ["tp1 pp2", "tp1 pp4", "tp2 pp2", "tp4 pp1"]
    assert layout_flags("one rank") == ""
    assert "--nproc-per-node 4 --tensor-model-parallel-size 2" in layout_flags("tp2 pp2")
