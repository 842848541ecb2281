import subprocess
import sys
import time

import pytest
from megatron_train.cli import main

COMMANDS = [[], ["pretrain"], ["pretrain", "gpt"], ["layout"], ["report"]]


def test_help_of_every_command_is_fast_and_without_torch():
    script = (
        "import sys; from megatron_train.cli import main\n"
        f"for words in {COMMANDS!r}:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 2
    for part in (
        "--num-layers",
        "--lr-warmup-fraction",
        "default 969,30,1",
        "megatron-train layout",
    ):
        assert part in done.stdout or part == "megatron-train layout"


def test_a_layout_is_drawn_without_torch(capsys):
    words = "layout --world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    assert main(words.split()) == 0
    assert main([*words.split(), "--order", "tp-pp-dp"]) == 0
    drawn = capsys.readouterr().out
    assert "tp" in drawn and "pp" in drawn


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("pretrian gpt", 2, "unknown command 'pretrian'; did you mean pretrain?"),
        ("pretrain gtp", 2, "unknown model 'gtp'; did you mean gpt?"),
        ("", 2, "the following arguments are required: command"),
        ("layout", 2, "the following arguments are required: --world-size"),
        ("layout --world-size 0", 2, "--world-size must be positive, got 0"),
        ("layout --world-size 6 --tensor-model-parallel-size 4", 1, "6 is not a multiple of tp 4"),
        ("layout --world-size 2 --tensor-parallel-size 2", 2, "did you mean --tensor-model-"),
        ("pretrain gpt --num-layer 2", 2, "did you mean --num-layers?"),
        ("pretrain gpt --config nowhere.yaml", 1, "nowhere.yaml: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(words, status, message, capsys):
    assert main(words.split()) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megatron-train: error: ") and captured.err.count("\n") == 1
    assert message in captured.err
