"""What the commands show beside a continuation: help, progress, prompts of a terminal, the log."""

import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from megatron_infer import Completion, InferError, SamplingParams
from megatron_infer._version import __version__
from megatron_infer.cli import main
from megatron_infer.cli.main import build_parser
from megatron_infer.cli.options import sampling_params
from megatron_models import GPT
from megatron_parallel import Mesh

LOG = "megatron_infer.server"


@pytest.fixture
def model(byte_model: GPT) -> GPT:
    return byte_model


@pytest.fixture
def run(save_run: Callable[..., str]) -> str:
    """Returns the folder of a run with one checkpoint and settings of generation."""
    settings = '{"do_sample": false, "max_new_tokens": 9}'
    return save_run({"huggingface/generation_config.json": settings})


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("generate", ["--temperature X", "--top-p X", "--top-k N", "--seed N", "--load PATH",
                      "tokens to generate [default that of the model, else 128]",
                      "no limit [default that of the model, else 0]",
                      "a new one each time", "PATH folder of a run"]),
        ("chat", ["--temperature X", "[default that of the model, else 1.0]", "--load PATH"]),
        ("serve", ["--host ADDRESS", "--port N", "--max-body-bytes N", "[default 127.0.0.1]",
                   "[default 5000]", "[default 12000]", "[default 1048576]", "--load PATH"]),
    ],
)  # fmt: skip
def test_help_names_the_kind_and_the_default_of_each_option(
    command: str,
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for line in lines:
        assert line in shown
    assert re.search(r"--load PATH [^\[]*\[required\]", shown)
    assert "a new one each time [" not in shown  # the seed has no default


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"megatron-infer {__version__}\n"


class Bar:
    """Records what a progress bar gets."""

    made: "Bar"

    def __init__(self, **settings: Any) -> None:
        Bar.made = self
        self.settings, self.total, self.n, self.closed = settings, None, 0, False

    def update(self, more: int) -> None:
        assert more >= 0
        self.n += more

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True


def test_a_bar_counts_the_bytes_of_the_weights_and_disappears(
    run: str, model: GPT, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    assert main(["generate", "--load", run, "--prompt-tokens", "5"]) == 0
    padding = 15 * 32
    size = 4 * (sum(weight.numel() for weight in model.parameters()) - padding)
    assert (Bar.made.n, Bar.made.total, Bar.made.closed) == (size, size, True)
    shown = {"unit": "B", "unit_scale": True, "leave": False, "disable": None}
    assert Bar.made.settings == {"desc": "loading", **shown}
    words = capsys.readouterr().out.split()
    assert len(words) == 1 + 9  # as many tokens as the model asks for


@pytest.mark.parametrize(("found", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_used_if_there_is_one(
    found: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(path: Path, *, mesh: Mesh, dtype: torch.dtype, **settings: Any) -> None:
        raise InferError(f"{path} on {torch.device(mesh.device).type} in {dtype}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr("megatron_infer.load.load_model", load)
    assert main(["generate", "--load", "here", "--prompt", "x", "--dtype", "bfloat16"]) == 1
    expected = f"megatron-infer: error: here on {device} in torch.bfloat16\n"
    assert capsys.readouterr().err == expected
    assert main(["generate", "--load", "here", "--prompt", "x", "--device", "cpu"]) == 1
    assert "here on cpu in torch.float32" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Standard input of a person."""

    def isatty(self) -> bool:
        return True


def test_a_person_is_asked_for_each_line_and_the_end_begins_a_new_line(
    run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("\n/new\n"))
    assert main(["chat", "--load", run]) == 0
    assert capsys.readouterr().out == "> > > \n"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n/new\n"))
    assert main(["chat", "--load", run]) == 0
    assert capsys.readouterr().out == ""


class Pipe(io.StringIO):
    """Standard output of which a reader sees what is flushed."""

    seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


def test_a_reader_sees_each_piece_of_text_at_once(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: Any, on_token: Callable[[int, int], object], **__: Any) -> None:
        assert pipe.seen == pipe.getvalue()
        for token, text in zip(b"yes", ("y", "ye", "yes"), strict=True):
            on_token(0, token)
            assert pipe.seen.endswith(text)

    def continued(*_: Any, on_text: Callable[[int, str], object], **__: Any) -> list[Completion]:
        on_text(0, " me")
        assert pipe.seen == "Call me"
        on_text(0, " I")
        assert pipe.seen == "Call me I"
        return [Completion("Call", " me I", (1, 2), "length")]

    pipe = Pipe()
    monkeypatch.setattr("sys.stdout", pipe)
    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n"))
    monkeypatch.setattr("megatron_infer.engine.tokens.generate_tokens", answer)
    assert main(["chat", "--load", run]) == 0
    assert pipe.seen == "yes\nyes\n"
    pipe.truncate(0), pipe.seek(0)
    monkeypatch.setattr("megatron_infer.engine.generate.generate", continued)
    assert main(["generate", "--load", run, "--prompt", "Call"]) == 0
    assert pipe.seen == "Call me I\n"


def test_options_of_sampling_are_numbers_of_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    fractions = ["--temperature", "0.5", "--top-p", "0.25"]
    integers = ["--top-k", "3", "--seed", "5", "--tokens-to-generate", "7"]
    given = build_parser().parse_args(["generate", "--load", "x", *fractions, *integers])
    assert sampling_params(given) == SamplingParams(7, 0.5, 3, 0.25, 5)
    none = sampling_params(build_parser().parse_args(["generate", "--load", "x"]))
    assert none == SamplingParams()
    for option in ("--top-k", "--seed", "--max-new-tokens"):
        assert main(["generate", "--load", "x", "--prompt", "y", option, "1.5"]) == 2
        assert f"{option} needs an integer, got '1.5'" in capsys.readouterr().err


@pytest.fixture
def own_log() -> Iterator[None]:
    """Restores the log of the server, which the command sets up for its process."""
    logger = logging.getLogger(LOG)
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


@pytest.mark.usefixtures("own_log")
@pytest.mark.parametrize("quiet", [False, True])
def test_a_server_describes_its_model_and_logs_each_line_once(
    run: str,
    model: GPT,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: bool,
) -> None:
    seen = []

    def serve(app: Any, service: Any, settings: Any, listener: Any, *, on_ready: Any) -> None:
        client = app.test_client()
        token = {"Authorization": f"Bearer {'x' * 20}"}
        seen.append(client.get("/info", headers=token).get_json())
        body = {"prompts": ["a"], "tokens_to_generate": 1}
        seen.append(client.put("/api", json=body, headers=token).get_json()["tokens"])
        logging.getLogger(LOG).error("a mistake")
        on_ready("http://there")
        service.close()

    monkeypatch.setattr("megatron_infer.server.run.serve", serve)
    Path(run, "secret").write_text(f" {'x' * 20}\n")
    options = ["--port", "0", "--token-file", f"{run}/secret", *["--quiet"] * quiet]
    assert main(["serve", "--load", run, *options]) == 0
    info, ((first, _),) = seen
    assert info == {
        "model": "run, iteration 3",
        "parameters": sum(weight.numel() for weight in model.parameters()) - 15 * 32,
        "positions": 48,
        "vocabulary": 257,
        "device": "cpu",
        "dtype": "float32",
    }
    assert first == ord("a")
    clock = r"[0-9]{2}:[0-9]{2}:[0-9]{2} "
    requests = [rf"{clock}GET /info 200, .* s", rf"{clock}PUT /api 200, .* s, 1 prompt"]
    expected = [
        "megatron-infer: note: generation_config.json: applied temperature 0.0, max_new_tokens 9",
        "megatron-infer: note: a request without tokens_to_generate gets 64 tokens; "
        "max_new_tokens of the model is not applied",
        *([] if quiet else requests),
        f"{clock}a mistake",
        r"megatron-infer: serving .*run.* on cpu at http://there \(Ctrl-C stops\)",
        "megatron-infer: stopped",
    ]
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(expected)
    for line, pattern in zip(shown, expected, strict=True):
        assert re.fullmatch(pattern, line), line
