import io
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer
from megatron_infer import SamplingParams, generate
from megatron_infer.cli import main
from megatron_models import GPT
from megatron_parallel import Mesh, collect_shardings, parameter_views


@pytest.fixture
def model(make_model: Callable[..., GPT]) -> GPT:
    return make_model(vocab_size=257, dtype=torch.float32)


@pytest.fixture
def run(model: GPT, tmp_path: Path) -> str:
    """A run's folder with one checkpoint."""
    ByteTokenizer().save(tmp_path / "tokenizer")
    CheckpointStore(tmp_path / "run").save(
        3,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord("gpt2", model.config.to_dict()),
        files={"tokenizer": tmp_path / "tokenizer"},
    )
    return str(tmp_path / "run")


def test_generate_prints_the_prompt_and_its_continuation(
    run: str, model: GPT, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "Call me", "--max-new-tokens", "9", "--seed", "4", "--top-k", "50"]
    assert main(["generate", "--load", run, *arguments]) == 0
    shown = capsys.readouterr()
    params = SamplingParams(max_new_tokens=9, seed=4, top_k=50)
    expected = generate(model, ByteTokenizer(), ["Call me"], params)[0]
    assert shown.out == f"Call me{expected.text}\n"
    assert "iter_0000003" in shown.err
    assert "9 tokens in" in shown.err
    assert "--max-new-tokens reached" in shown.err


def test_several_prompts_are_printed_in_order(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "One", "--prompt", "Two", "--max-new-tokens", "3"]
    assert main(["generate", "--load", run, *arguments, "--temperature", "0"]) == 0
    first, second = capsys.readouterr().out.split("--- 2 ---\n")
    assert first.startswith("--- 1 ---\nOne")
    assert second.startswith("Two")


def test_a_prompt_may_come_from_a_file_or_standard_input(
    run: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("From a file", encoding="utf-8")
    common = ["generate", "--load", run, "--max-new-tokens", "2", "--temperature", "0"]
    assert main([*common, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out.startswith("From a file")
    monkeypatch.setattr("sys.stdin", io.StringIO("From a pipe"))
    assert main([*common, "--prompt-file", "-"]) == 0
    assert capsys.readouterr().out.startswith("From a pipe")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--load", "absent", "--prompt", "x"], "absent"),
        (["--load", "{run}", "--prompt", ""], "prompt 1 is empty"),
        (["--load", "{run}", "--prompt", "x" * 48], "48 positions"),
        (["--load", "{run}", "--prompt-file", "absent.txt"], "absent.txt"),
        (["--load", "{run}", "--prompt", "x", "--iteration", "8"], "iteration 8"),
        (["--load", "{run}", "--prompt", "x", "--top-p", "2"], "top_p"),
    ],
)
def test_expected_errors_are_one_line_with_status_1(
    run: str, capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    assert main(["generate", *(word.format(run=run) for word in arguments)]) == 1
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("megatron-infer: error: ")
    assert names in shown
    assert "\n" not in shown


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["generte"], "did you mean generate?"),
        (["generate", "--load", "x", "--promt", "y"], "did you mean --prompt?"),
        (["generate", "--load", "x", "--prompt", "y", "--temprature=1"], "--temperature?"),
        (["generate", "--prompt", "y"], "--load"),
        (["generate", "--load", "x", "--prompt", "y", "--top-k", "many"], "many"),
        (["generate", "--load", "x", "--prompt", "y", "--device", "gpu"], "gpu"),
        ([], "COMMAND"),
    ],
)
def test_usage_errors_name_the_nearest_spelling_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("megatron-infer: error: ")
    assert names in shown
    assert "\n" not in shown


def test_help_is_quick_and_does_not_import_torch() -> None:
    code = (
        "import sys; from megatron_infer.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--max-new-tokens" in done.stdout
    assert time.monotonic() - started < 5
