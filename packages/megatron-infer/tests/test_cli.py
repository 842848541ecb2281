import errno
import io
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer
from megatron_infer import InferError, SamplingParams, generate, generate_tokens
from megatron_infer.cli import main
from megatron_models import GPT, record_of
from megatron_parallel import Mesh, collect_shardings, parameter_views


@pytest.fixture
def model(byte_model: GPT) -> GPT:
    return byte_model


@pytest.fixture
def run(save_run: Callable[..., str]) -> str:
    """Returns the folder of a run with one checkpoint."""
    return save_run()


def test_generate_prints_the_prompt_and_its_continuation(
    run: str,
    model: GPT,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=iter([10.0, 12.0]).__next__)
    monkeypatch.setattr("megatron_infer.cli.generate.time", clock)
    arguments = ["--prompt", "Call me", "--max-new-tokens", "9", "--seed", "4", "--top-k", "50"]
    assert main(["generate", "--load", run, *arguments]) == 0
    shown = capsys.readouterr()
    params = SamplingParams(max_new_tokens=9, seed=4, top_k=50)
    expected = generate(model, ByteTokenizer(), ["Call me"], params)[0]
    assert shown.out == f"Call me{expected.text}\n"
    assert "iter_0000003" in shown.err
    assert "9 tokens in 2.0 s (4.5 tokens/s), --max-new-tokens reached; " in shown.err
    assert shown.err.endswith(" on cpu\n")


def test_several_prompts_are_printed_in_order(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "One", "--prompt", "Two", "--max-new-tokens", "3"]
    assert main(["generate", "--load", run, *arguments, "--temperature", "0"]) == 0
    first, second = capsys.readouterr().out.split("--- 2 ---\n")
    assert first.startswith("--- 1 ---\nOne")
    assert second.startswith("Two")


def test_every_way_in_which_texts_ended_is_printed_once(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "a", "--prompt", "b", "--prompt", "x" * 46, "--max-new-tokens", "3"]
    assert main(["generate", "--load", run, *arguments, "--temperature", "0"]) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("8 tokens in ")  # the last prompt leaves two positions
    ends = "--max-new-tokens reached and the model has no more positions; "
    assert ends in shown


@pytest.fixture
def bare(model: GPT, tmp_path: Path) -> str:
    """Returns the folder of a run with one checkpoint without a tokenizer."""
    CheckpointStore(tmp_path / "bare").save(
        3,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord(family="gpt2", **record_of(model.config)),
    )
    return str(tmp_path / "bare")


def test_token_ids_are_continued_without_a_tokenizer(
    bare: str,
    model: GPT,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=iter([10.0, 12.0, 20.0, 30.0]).__next__)
    monkeypatch.setattr("megatron_infer.cli.generate.time", clock)
    common = ["generate", "--load", bare, "--max-new-tokens", "6", "--temperature", "0"]
    params = SamplingParams(max_new_tokens=6, temperature=0.0)
    first, second = generate_tokens(model, [[67, 97, 108], [5]], params)
    assert main([*common, "--prompt-tokens", "67 97,108"]) == 0
    shown = capsys.readouterr()
    assert shown.out == " ".join(map(str, (67, 97, 108, *first.tokens))) + "\n"
    assert "6 tokens in 2.0 s (3.0 tokens/s)" in shown.err
    assert main([*common, "--prompt-tokens", "67 97 108", "--prompt-tokens", "5"]) == 0
    assert capsys.readouterr().out == (
        "--- 1 ---\n" + " ".join(map(str, (67, 97, 108, *first.tokens))) + "\n"
        "--- 2 ---\n" + " ".join(map(str, (5, *second.tokens))) + "\n"
    )


@pytest.mark.parametrize(
    "words", [["--tokenizer-model", "{folder}"], ["--tokenizer-type", "ByteTokenizer"]]
)
def test_a_tokenizer_may_be_given_by_flags(
    bare: str, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    ByteTokenizer().save(tmp_path / "elsewhere")
    given = [word.format(folder=tmp_path / "elsewhere") for word in words]
    common = ["--prompt", "Call", "--max-new-tokens", "5", "--temperature", "0"]
    assert main(["generate", "--load", bare, *common, *given]) == 0
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    expected = generate(model, ByteTokenizer(), ["Call"], params)[0]
    assert capsys.readouterr().out == f"Call{expected.text}\n"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--prompt", "x"], "holds no tokenizer; give one with --tokenizer-model"),
        (["--prompt-tokens", "1 x"], "--prompt-tokens needs token ids such as '1 15 7', got 'x'"),
        (["--prompt-tokens", "1 -2"], "got '-2'"),
        (["--prompt-tokens", " "], "prompt 1 is empty"),
        (["--prompt-tokens", "300"], "has 257 tokens"),
        (["--prompt", "x", "--tokenizer-type", "Llama2Tokenizer"], "--tokenizer-model; give both"),
        (["--prompt", "x", "--vocab-file", "v.json"], "--merge-file"),
        (["--prompt", "x", "--tokenizer-model", "absent.json"], "absent.json"),
    ],
)
def test_what_is_missing_for_a_bare_checkpoint_is_one_line(
    bare: str, capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    assert main(["generate", "--load", bare, *arguments]) == 1
    shown = capsys.readouterr().err.strip()
    assert names in shown and "\n" not in shown


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
        (["--load", "absent", "--prompt", "x", "--top-p", "2"], "top_p"),  # before it is loaded
        (["--load", "{run}", "--prompt", "x", "--device", "cuda"], "use --device cpu or auto"),
        (["--load", "{run}", "--prompt-file", "{run}/empty.txt"], "empty.txt is empty"),
        (["--load", "{run}", "--prompt-file", "{run}/latin.txt"], "latin.txt is not UTF-8"),
    ],
)
def test_expected_errors_are_one_line_with_status_1(
    run: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    names: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (Path(run) / "empty.txt").touch()
    (Path(run) / "latin.txt").write_bytes(b"\xe9")
    assert main(["generate", *(word.format(run=run) for word in arguments)]) == 1
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("megatron-infer: error: ")
    assert names in shown
    assert "\n" not in shown


@pytest.mark.parametrize("prompt", [["--prompt", "x" * 48], ["--prompt-tokens", "7 " * 48]])
def test_nothing_is_printed_before_an_error_about_the_prompt(
    run: str, capsys: pytest.CaptureFixture[str], prompt: list[str]
) -> None:
    assert main(["generate", "--load", run, *prompt]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "48 positions" in shown.err


@pytest.mark.parametrize(
    ("error", "status", "out", "named"),
    [
        (InferError("no memory"), 1, "The end\n", "error: no memory"),
        (KeyboardInterrupt(), 130, "The end", "interrupted"),  # the terminal shows ^C behind it
    ],
)
def test_an_error_starts_a_line_after_a_continuation_that_began(
    run: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    out: str,
    named: str,
) -> None:
    def fail(*arguments: object, on_text: Callable[[int, str], object], **_: object) -> None:
        on_text(0, " end")
        raise error

    monkeypatch.setattr("megatron_infer.engine.generate.generate", fail)
    assert main(["generate", "--load", run, "--prompt", "The"]) == status
    shown = capsys.readouterr()
    assert shown.out == out and named in shown.err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--host", "0.0.0.0"], "give --token-file FILE"),
        (["--host", "0.0.0.0", "--token-file", "{run}/short"], "16 or more"),
        (["--token-file", "{run}/empty"], "is empty"),
        (["--token-file", "{run}/accents"], "must be ASCII"),
        (["--token-file", "{run}/absent"], "absent"),
        (["--host", "no address"], "--host no address"),
        (["--host", "nowhere.invalid", "--token-file", "{run}/good"], "--host nowhere.invalid"),
        (["--host", "192.0.2.1", "--token-file", "{run}/good"], "does not belong to this machine"),
        (["--port", "{port}"], "the port is in use; use another --port"),
        (["--port", "-1"], "--port -1"),
        (["--port", "0", "--iteration", "8"], "iteration 8"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    run: str, capsys: pytest.CaptureFixture[str], arguments: list[str], names: str
) -> None:
    for name, token in (("short", "x"), ("empty", "\n"), ("accents", "é" * 20), ("good", "x" * 20)):
        (Path(run) / name).write_text(token, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = [word.format(run=run, port=other.getsockname()[1]) for word in arguments]
        assert main(["serve", "--load", run, *words]) == 1
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("megatron-infer: error: ")
    assert names in shown
    assert "\n" not in shown


def test_a_port_without_permission_is_one_line(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(listener: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbid)
    assert main(["serve", "--load", run, "--port", "80"]) == 1
    assert capsys.readouterr().err == (
        "megatron-infer: error: cannot listen on 127.0.0.1:80: no permission for this port; use a "
        "--port above 1023\n"
    )


def test_an_answer_that_is_interrupted_does_not_end_the_chat(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, on_token: Callable[[int, int], object], **__: object) -> None:
        on_token(0, ord("y"))
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_infer.engine.tokens.generate_tokens", interrupt)
    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n"))
    assert main(["chat", "--load", run]) == 0
    assert capsys.readouterr().out == "y [stopped]\ny [stopped]\n"


def test_wrong_settings_of_a_chat_are_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "--load", "absent", "--top-p", "2"]) == 1
    assert "top_p must lie in (0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_missing_checkpoint_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--port", "0"] if command == "serve" else []
    assert main([command, "--load", str(tmp_path / "absent"), *words]) == 1
    assert "absent" in capsys.readouterr().err


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
    assert main(arguments) == 2
    shown = capsys.readouterr().err.strip()
    assert shown.startswith("megatron-infer: error: ")
    assert names in shown
    assert "\n" not in shown


@pytest.mark.parametrize(
    ("command", "flag"),
    [("generate", "--max-new-tokens"), ("chat", "--format"), ("serve", "--token-file")],
)
def test_help_does_not_import_torch(command: str, flag: str) -> None:
    code = (
        "import sys; from megatron_infer.cli import main\n"
        f"try: main(['{command}', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules and 'flask' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert flag in done.stdout
