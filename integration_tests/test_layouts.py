"""Training in every parallel layout equals training on one rank; fast tests are a sample.

`nox -s layouts` generates the tables of the documentation from the same cases.
"""

import ast
import importlib
import inspect
import pkgutil

import layouts.defects
import pytest
import torch
from layouts.case import Case
from layouts.cases import CASES
from layouts.defects import DEFECTS
from layouts.job import CLIP, batches
from layouts.proof import LEARNING_RATE, STEPS, prove, prove_fp32, reference
from megatron_parallel import Mesh, ParallelLayout

BY_TITLE = {case.title: case for case in CASES}
SAMPLE = {
    "tp2·sp-tied-dropout",
    "pp2-untied-dropout",
    "pp2·vpp2-untied",
    "pp2·vpp2·uniform·zb-v-tied-dropout",
    "dp2·ep2-moe",
    "tp2·sp·ep2·etp1·a2a-grouped",
    "cp2-tied-dropout",
    "dp2·fsdp-tied-dropout",
    "dp2·ep2·a2a·combined-1f1b-moe-dropout",
    "cp2·dp2·hybrid(6)-untied-dropout",
    "pp2·dp2·ep2·a2a·zero-bubble-moe-dropout",
    "dp4·fsdp·ep2·a2a-moe-dropout",
    "cp2·dp2·ep4·a2a-earliest-dropout",
    "tp2·sp·pp2·zero-bubble·few-logits-tied",
    "tp2·sp·pp2·lora-untied",
    "tp2·sp·fp8-untied-dropout",
    "dp2·sharded·lion-untied",
    "tp2·sp·dp2·fsdp·muon-tied",
    "tp2·sp·dp2·sharded·adafactor-untied",
    "tp2·sp·dp2·sharded·ep2·etp1·muon-moe-gated",
    "tp2·sp·cp2·a2a-latent",
    "tp2·sp·cp2·a2a-gated",
    "cp2-unrotated-dropout",
    "pp2-mtp-dropout",
    "tp2·sp-mixed-dropout",
    "tp2·pp2-mup",
    "tp2·sp-delta-dropout",
    "pp2-bert-dropout",
    "pp2-t5-dropout",
    "tp2·sp-bert-post-dropout",
    "cp2-bert-dropout",
    "tp2·sp-sparse-dropout",
    "tp3·selective·ep3·etp1·a2a-thirds-dropout",
    "tp2·sp-mamba-dropout",
    "cp2·ep2·a2a-hybrid-dropout",
    "cp2-axes-dropout",
}
FEW = 3
"""Number of steps in which every planted defect is detected."""
SEVERAL = 10
"""Number of steps of the sample in `nox -s full`; `nox -s layouts` takes 20 in all layouts."""
IN_FLOAT32 = {"tp2·sp-tied-dropout", "pp2·vpp2-untied", "cp2-tied-dropout", "dp2·ep2-moe"}
FLOAT32_SAMPLE = {"tp2·sp-tied-dropout"}
DEFECT_SAMPLE = {
    "the pooler reads the first token of every rank",
    "the gradients of norms are not summed over tensor-parallel ranks",
    "a tied gradient is counted twice",
    "a bucket of gradients is not summed over data-parallel ranks",
    "a product overwrites the gradient that it should add to",
    "weights are read before they are gathered",
    "fully sharded gradients are averaged over micro-batches",
    "the upper stages of a V have the layers of a loop",
    "every micro-batch is divided by its own number of tokens",
    "padding of the vocabulary gets probability",
    "later stages attend across documents",
    "the dropout mask ignores the slice of the sequence",
    "recomputation drops other elements than the forward pass",
    "the blocks of a ring are summed without their log-sum-exp",
    "the norm counts replicated parameters on every rank",
    "the gradient of experts is divided by the ranks that hold them",
    "the micro-batches of a pair receive each other's rows",
    "the gradient of an adapter's A is not summed over ranks",
    "the gradient of a shared key is not summed over heads of other ranks",
    "every depth is divided by the labels of the main loss",
    "the last stage forgets the learning rates of its widths",
    "the states of gated delta nets pass document ends",
}


@pytest.fixture(autouse=True)
def one_thread():
    """Makes the reference compute with the number of threads of a rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_cases_cover_every_feature():
    assert len(BY_TITLE) == len(CASES) >= 40
    assert {case.layout.world_size for case in CASES} == {2, 3, 4, 6, 8}
    assert {defect.case for defect in DEFECTS.values()} <= set(BY_TITLE)
    assert len(DEFECTS) >= 60
    assert set(BY_TITLE) >= SAMPLE | IN_FLOAT32 and set(DEFECTS) >= DEFECT_SAMPLE
    assert IN_FLOAT32 > FLOAT32_SAMPLE


@pytest.mark.parametrize(
    "name", [found.name for found in pkgutil.iter_modules(layouts.defects.__path__)]
)
def test_every_name_of_a_module_that_a_defect_uses_exists(name):
    """A defect runs on ranks of one layout, where `nox -s tests` runs few of them."""
    module = importlib.import_module(f"layouts.defects.{name}")
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    modules = {key: value for key, value in vars(module).items() if inspect.ismodule(value)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used = node.value.id
            if used in modules and used not in local:
                assert hasattr(modules[used], node.attr), f"{used}.{node.attr}"


def test_the_training_that_is_compared_learns_and_clips():
    one = reference(BY_TITLE["dp2-tied-dropout"].reference, STEPS, torch.float64, LEARNING_RATE)
    assert one.losses[-1] < one.losses[0] - 0.1
    assert max(one.norms) > CLIP > min(one.norms)


def test_masks_are_unequal_between_ranks_and_micro_batches():
    case = BY_TITLE["cp2·pp2·dp2-tied-dropout"]
    kept = []
    for rank in (0, 1):
        mesh = Mesh(ParallelLayout(dp=2), rank)  # no process group is used
        (step,) = batches(case, mesh, 0, 1)
        kept.append([int(batch.fields["loss_mask"].sum()) for batch in step])
    assert len({sum(counts) for counts in kept}) == 2
    assert all(len(set(counts)) == case.accumulation == 4 for counts in kept)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("title", [case.title for case in CASES if case.title in SAMPLE])
def test_few_steps_of_a_layout_equal_one_rank(worker_pool, title):
    found = prove(worker_pool, BY_TITLE[title], steps=FEW)
    assert found.equal, found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_layout_equals_one_rank(worker_pool, case: Case):
    found = prove(worker_pool, case, steps=SEVERAL if case.title in SAMPLE else FEW)
    assert found.equal, found


@pytest.mark.parametrize(
    "title",
    [
        pytest.param(title, marks=() if title in FLOAT32_SAMPLE else pytest.mark.slow)
        for title in sorted(IN_FLOAT32)
    ],
)
def test_a_layout_is_close_to_one_rank_in_float32(worker_pool, title):
    found = prove_fp32(worker_pool, BY_TITLE[title])
    assert found.equal, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            defect.name,
            marks=() if defect.name in DEFECT_SAMPLE else pytest.mark.slow,
        )
        for defect in DEFECTS.values()
    ],
)
def test_a_planted_defect_is_detected(worker_pool, name):
    found = prove(worker_pool, BY_TITLE[DEFECTS[name].case], defect=name, steps=FEW)
    assert not found.equal, found
