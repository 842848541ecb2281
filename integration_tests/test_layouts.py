"""Every parallel layout trains what one rank trains; a sample here, all in `nox -s layouts`."""

import pytest
import torch
from layouts.cases import CASES, Case
from layouts.defects import DEFECTS
from layouts.job import CLIP
from layouts.proof import LEARNING_RATE, STEPS, prove, prove_fp32, reference

BY_TITLE = {case.title: case for case in CASES}
SAMPLE = {
    "tp2·sp-tied-dropout",
    "pp2-untied-dropout",
    "pp2·vpp2-untied",
    "pp2·vpp2·uniform·zb-v-tied-dropout",
    "dp2-tied-dropout",
    "tp2·pp2-tied",
    "tp2·sp·dp2-untied-dropout",
    "dp2·ep2-moe",
    "tp2·sp·ep2·etp1·a2a-moe",
    "tp2·sp·selective-tied-dropout",
    "tp2·cut-tied-dropout",
    "cp2-tied-dropout",
}


@pytest.fixture(autouse=True)
def one_thread():
    """The reference computes with as many threads as the ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_proof_covers_what_it_should():
    assert len(BY_TITLE) == len(CASES) >= 14
    assert {case.layout.world_size for case in CASES} == {2, 4, 8}
    assert {defect.case for defect in DEFECTS.values()} <= set(BY_TITLE)
    assert len(DEFECTS) >= 12


def test_the_training_that_is_compared_learns_and_clips():
    one = reference(BY_TITLE["dp2-tied-dropout"].reference, STEPS, torch.float64, LEARNING_RATE)
    assert one.losses[-1] < one.losses[0] - 0.1
    assert max(one.norms) > CLIP > min(one.norms)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.title, marks=() if case.title in SAMPLE else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_layout_equals_one_rank(worker_pool, case: Case):
    found = prove(worker_pool, case)
    assert found.equal, found


@pytest.mark.parametrize(
    "title", sorted(title for title in SAMPLE if not BY_TITLE[title].recompute)
)
def test_a_layout_is_close_to_one_rank_in_float32(worker_pool, title):
    found = prove_fp32(worker_pool, BY_TITLE[title])
    assert found.equal, found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            defect.name,
            marks=() if BY_TITLE[defect.case].layout.world_size == 2 else pytest.mark.slow,
        )
        for defect in DEFECTS.values()
    ],
)
def test_a_planted_defect_is_seen(worker_pool, name):
    found = prove(worker_pool, BY_TITLE[DEFECTS[name].case], defect=name, steps=3)
    assert not found.equal, found
