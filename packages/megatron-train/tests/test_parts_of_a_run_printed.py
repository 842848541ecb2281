"""What a run prints and writes from its first line to its last, in small runs."""

from pathlib import Path

import pytest
import torch
from megatron_train.broadcast_batches import open_batches
from megatron_train.cli import main
from megatron_train.config.files import read_file
from megatron_train.config.run_sections import run_options

RUN = (
    "pretrain gpt --num-layers 1 --hidden-size 8 --num-attention-heads 2 --vocab-size 9 "
    "--seq-length 8 --micro-batch-size 2 --lr 0.1 --lr-decay-style constant --eval-iters 0 "
    "--mock-data --device cpu --no-progress --hidden-dropout 0 --attention-dropout 0 "
    "--log-interval 1"
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Returns a function that runs flags in a folder; gives the lines and the warnings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_train.callbacks.recording.plot.plot_losses", lambda *_: None)

    def start(flags):
        assert main(f"{RUN} {flags}".split()) == 0
        shown = capsys.readouterr()
        return shown.out.splitlines(), shown.err.splitlines()

    yield start
    torch.set_num_threads(threads)


def test_a_run_describes_itself_and_continues_where_it_was_stopped(run):
    lines, warnings = run("--train-iters 2 --save run")
    assert warnings == [] and "" not in lines
    assert lines[0].startswith("environment: python ")
    assert "  training.train_iters: 2  [--train-iters]" in lines
    start = lines.index("parameter groups:")
    assert lines[start - 1].startswith("model: ")  # nothing is loaded
    fused = next(n for n, line in enumerate(lines) if line.startswith("gradient accumulation is "))
    assert fused > start + 1 and all(line.startswith("  ") for line in lines[start + 1 : fused])
    assert lines[fused].startswith("gradient accumulation is fused for ")
    first, second, saved = lines[fused + 1 :]
    assert " iteration        1/       2 | " in first
    assert " iteration        2/       2 | " in second
    assert saved == "saved checkpoint run/iter_0000002"
    given = read_file(Path("run/config.yaml"), run_options())
    assert (given.get("training.train_iters"), given.get("checkpoint.save")) == (2, "run")

    lines, warnings = run("--train-iters 5 --save run --load run --exit-interval 3")
    assert warnings == [] and lines.count("continuing from run after step 2") == 1
    assert " iteration        3/       5 | " in lines[-3]
    assert lines[-2:] == [
        "saved checkpoint run/iter_0000003",
        "stopped after step 3 of 5: --exit-interval 3; saved in run/iter_0000003; the same command "
        "continues it",
    ]


def test_adapters_alone_are_trained_on_weights_of_a_checkpoint(run):
    adapters = "--linear-product lora --train-iters 1"
    _, (warning,) = run(f"{adapters} --save run")
    assert warning == (
        "megatron-train: warning: --linear-product lora freezes weights that are initialized from "
        "--seed; begin with those of a checkpoint, with finetune or with --finetune --load"
    )
    assert run(f"{adapters} --load run --finetune --save again")[1] == []
    assert run(f"{adapters} --load run")[1] == []


def test_a_run_prints_its_low_precision_long_steps_and_missing_test(run, monkeypatch):
    def opened(*arguments):
        batches = open_batches(*arguments)
        batches.no_test_reason = "an empty split"
        return batches

    monkeypatch.setattr("megatron_train.pretrain.open_batches", opened)
    monkeypatch.setattr("megatron_train.pretrain.check_step_time", lambda *_: "steps are long")
    lines, warnings = run("--train-iters 1 --fp8-format hybrid --hidden-size 32")
    assert warnings == ["megatron-train: warning: steps are long"]
    fused = next(n for n, line in enumerate(lines) if line.startswith("gradient accumulation is "))
    assert lines[fused + 1].startswith("linear layers multiply in fp8 delayed (hybrid), with ")
    assert lines[fused + 2] == "no test after the last step: an empty split"
