"""What `prove` prints: the small copy, the differences and the first of them."""

import json
import math

import pytest
from megatron_parallel.testing import Failure, WorkerError
from megatron_train.cli.main import build_parser, main
from megatron_train.config.described_run import resolve_run
from megatron_train.errors import TrainError
from megatron_train.prove import proof as proof_module
from megatron_train.prove.compare import Deviation, Differences
from megatron_train.prove.defects import CATALOGUE, find_defect
from megatron_train.prove.proof import Proof
from megatron_train.prove.shrink import shrink_run

SIZES = "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 16"
TINY = f"prove gpt {SIZES} --world-size 2"
EQUAL = Differences(1e-16, 2.5e-15, 3e-13, 0.0)


@pytest.fixture(scope="module")
def shrink():
    """Returns a function that shrinks a run, once for equal arguments."""
    made = {}

    def once(run, *limits):
        key = (str(run.layout), *limits)
        if key not in made:
            made[key] = shrink_run(run, *limits)
        return made[key]

    return once


@pytest.fixture
def proven(monkeypatch, shrink):
    """Returns a function that runs the command with the result of a proof, without training."""
    asked = []
    monkeypatch.setattr("megatron_train.cli.prove.shrink_run", shrink)

    def call(words, found, first=None, parameters=12345, seconds=12.6):
        def prove(small, defect, progress):
            asked.append((small, defect))
            progress(1, 2)
            if isinstance(found, Exception):
                raise found
            return Proof(found, first, seconds, parameters)

        monkeypatch.setattr(proof_module, "prove", prove)
        return main(words.split()), asked

    return call


def test_the_small_copy_and_every_difference_are_printed(proven, capsys):
    status, asked = proven(f"{TINY} --steps 3", EQUAL)
    ((small, defect),) = asked
    assert (status, defect, small.run.train_iters) == (0, None, 3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small copy: tp 1 x cp 1 x dp 2 x pp 1, order tp-cp-ep-dp-pp"
    size, count = small.run.training.micro_batch_size, small.run.global_batch_size
    assert lines[1] == (
        f"3 steps of {count} samples, micro-batches of {size}, {count // size // 2} on each data "
        "parallel rank; float64; optimizer adam"
    )
    assert lines[2].startswith("shrunk: --num-layers 4 -> 2; ")
    assert lines[3].startswith("not covered: ") and ", NCCL, the corpus, " in lines[3]
    assert lines[4:] == [
        "",
        "largest difference from one rank          found    limit",
        "loss of each step                         1e-16    1e-09",
        "gradient norm of each step              2.5e-15    1e-09",
        "all gradients of each step, relative      3e-13    1e-09",
        "all parameters after the last step            0    1e-09",
        "",
        "the layout equals one rank: 12,345 parameters, 13 s",
    ]


def test_stages_of_a_pipeline_are_printed_with_their_layers(proven, capsys):
    assert proven(f"{TINY} --pipeline-model-parallel-size 2", EQUAL)[0] == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "layers of each pipeline stage: 2 2"


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (
            Deviation(2, "gradient", "a.b", 0.25, (1,), 3),
            "first: step 2, gradient of a.b by 0.25 on rank 1, and 3 others",
        ),
        (Deviation(1, "loss", "", 1.0, (0, 1)), "first: step 1, loss by 1 on all ranks"),
        (
            Deviation(1, "parameter", "a", math.inf, (), 1),
            "first: step 1, parameter of a by inf on ranks , and 1 others",
        ),
        (None, None),
    ],
)
def test_the_first_difference_is_located(first, line, proven, capsys):
    wrong = Differences(0.25, math.inf, 1.0, 0.0, rerouted=7)
    status, asked = proven(f"{TINY} --defect bucket-left-out", wrong, first)
    assert status == 1 and asked[0][1] == "bucket-left-out"
    lines = capsys.readouterr().out.splitlines()
    assert "gradient norm of each step                  inf    1e-09" in lines
    assert "tokens with other experts                     7        0" in lines
    assert [each for each in lines if each.startswith("first")] == ([line] if line else [])
    assert lines[-1] == (
        "the layout with the planted defect bucket-left-out DOES NOT EQUAL one rank: "
        "12,345 parameters, 13 s"
    )


def test_ranks_of_a_first_difference_are_named_if_they_are_not_all(proven, capsys):
    words = f"prove gpt {SIZES} --world-size 4 --tensor-model-parallel-size 2"
    first = Deviation(1, "norm", "", 0.5, (0, 3))
    assert proven(words, Differences(1.0, 0.0, 0.0, 0.0), first)[0] == 1
    assert "first: step 1, norm by 0.5 on ranks 0, 3\n" in capsys.readouterr().out


def test_json_has_every_number_and_none_for_infinite_ones(proven, capsys):
    wrong = Differences(0.25, math.inf, math.nan, 0.0, rerouted=7)
    first = Deviation(2, "gradient", "a.b", math.inf, (1,), 3)
    assert proven(f"{TINY} --json", wrong, first, seconds=1.26)[0] == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["defect"], found["ranks"]) == (False, None, 2)
    assert found["differences"] == {
        "loss of each step": {"found": 0.25, "limit": 1e-9},
        "gradient norm of each step": {"found": None, "limit": 1e-9},
        "all gradients of each step, relative": {"found": None, "limit": 1e-9},
        "all parameters after the last step": {"found": 0.0, "limit": 1e-9},
        "tokens with other experts": {"found": 7, "limit": 0},
    }
    assert found["first"] == {
        "step": 2,
        "what": "gradient",
        "name": "a.b",
        "size": None,
        "ranks": [1],
        "others": 3,
    }
    assert (found["parameters"], found["seconds"]) == (12345, 1.3)
    assert {"setting": "--num-layers", "before": 4, "after": 2} in found["shrunk"]
    assert "NCCL" in found["not_covered"] and found["layout"].startswith("tp 1 x cp 1 x dp 2")
    assert proven(f"{TINY} --json", EQUAL)[0] == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True and found["first"] is None


def test_a_rank_that_fails_gives_one_line_after_its_output(proven, capsys):
    error = WorkerError([Failure(1, "raised", "raised ValueError", "Traceback of rank 1")], 2)
    assert proven(TINY, error)[0] == 1
    assert capsys.readouterr().err == (
        "---- rank 1 raised ValueError\nTraceback of rank 1\n"
        "megatron-train: error: the proof did not end: rank 1 of 2 raised ValueError\n"
    )


@pytest.mark.parametrize(
    ("flag", "text", "accepted"),
    [
        *(("--steps", "1", True), ("--steps", "0", False), ("--steps", "x", False)),
        *(("--max-ranks", "2", True), ("--max-ranks", "0", False), ("--max-ranks", "1.5", False)),
    ],
)
def test_numbers_of_steps_and_ranks_are_positive(flag, text, accepted, proven, capsys):
    status, asked = proven(f"{TINY} {flag} {text}", EQUAL)
    assert status == (0 if accepted else 2) and len(asked) == accepted
    message = f"megatron-train: error: {flag} needs a positive integer, got {text!r}\n"
    assert capsys.readouterr().err == ("" if accepted else message)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--world-size 2", "bucket-left-out"),
        ("--world-size 2 --use-torch-fsdp2", ""),
        (
            "--world-size 2 --global-batch-size 4",
            "mask-of-first-micro-batch micro-batch-not-counted bucket-left-out",
        ),
        ("--tensor-model-parallel-size 2", "input-not-summed norm-counts-copies"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "norms-not-summed input-not-summed norm-counts-copies",
        ),
        ("--context-parallel-size 2", "mask-of-next-rank bucket-left-out"),
        ("--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights", ""),
        ("--pipeline-model-parallel-size 2", "tied-not-summed"),
        (  # one rank has both copies
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --global-batch-size 4 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "mask-of-first-micro-batch micro-batch-not-counted",
        ),
        (
            "--num-experts 2 --expert-model-parallel-size 2 --world-size 2",
            "bucket-left-out experts-divided experts-in-other-order",
        ),
    ],
)
def test_defects_apply_to_layouts_that_can_have_them(words, names):
    command = f"prove gpt {SIZES} --micro-batch-size 1 {words}"
    if "--global-batch-size" not in words:
        command += f" --global-batch-size {2 if '--world-size' in words else 1}"
    run = resolve_run(build_parser().parse_args(command.split()))
    assert [each.name for each in CATALOGUE if each.applies(run)] == names.split()
    for each in CATALOGUE:
        if each.applies(run):
            assert find_defect(each.name, run) is each
            continue
        with pytest.raises(TrainError) as caught:
            find_defect(each.name, run)
        there = ", ".join(names.split()) or "none"
        assert str(caught.value) == (
            f"--defect {each.name} needs {each.needs}; for this layout there are {there}"
        )


def test_a_bar_counts_the_steps_of_both_trainings(proven, bars):
    assert proven(f"{TINY} --steps 3 --json", EQUAL)[0] == 0
    assert [(bar.unit, bar.n, bar.total) for bar in bars] == [("step", 1, 6)]
