"""Defaults that three functions share, a bar on a terminal, interrupts, and outputs that remain."""

import gzip
import inspect
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    merge,
    preprocess,
    split,
    tokenize_conversations,
)
from megatron_data.preprocessing import tokenize_image_pairs, trace, tracing
from megatron_data.preprocessing.engine import WorkOptions
from megatron_data.preprocessing.image_encoding import ImageLocator, ImagePairEncoder, TextEnding
from megatron_data.preprocessing.manifest import read_manifest
from megatron_data.preprocessing.parts import WorkFolder
from megatron_data.preprocessing.pool import _interrupts_held, _Worker
from megatron_data.sources.protocol import UnreadableError
from megatron_data.tokenizers import NullTokenizer
from megatron_data.tokenizers.fast import FastTokenizer, MismatchError

GIF = b"GIF89a"


@pytest.mark.parametrize("function", [preprocess, tokenize_conversations, tokenize_image_pairs])
def test_options_of_a_run_have_the_same_defaults_everywhere(function: Callable[..., Any]) -> None:
    defaults = {
        name: each.default
        for name, each in inspect.signature(function).parameters.items()
        if name in vars(WorkOptions())
    }
    assert defaults == vars(WorkOptions())
    assert not defaults["progress"] and defaults["overwrite"]


def test_the_smallest_limit_of_a_document_is_a_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (made,) = preprocess(
        [tmp_path / "a.txt"], tmp_path / "o", ByteTokenizer(), max_document_bytes=1
    )
    assert made.counts.tokens == 1


def test_a_bar_on_a_terminal_shows_units_and_is_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    (tmp_path / "a.txt").write_text("a" * 2000)
    for progress in (False, True):
        preprocess([tmp_path / "a.txt"], tmp_path / "o", ByteTokenizer(), progress=progress)
        shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
        assert ("preprocess: " in shown) == ("2.00k" in shown) == progress
    assert not shown.split("\r")[-2].strip() and shown.endswith("\r")


# -- interrupts -------------------------------------------------------------------------------


@pytest.fixture
def other() -> Any:
    """A second thread of this process, which receives signals that the main thread blocks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("other")
def test_an_interrupt_that_another_thread_receives_waits_as_well() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), _interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        done = True
    assert done


def test_workers_may_be_started_by_any_thread() -> None:
    """Only the main thread may set handlers of signals."""
    held: list[bool] = []

    def start() -> None:
        with _interrupts_held():
            held.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        held.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert held == [True, False]


@pytest.mark.parametrize("error", [EOFError, BrokenPipeError])
def test_a_worker_that_has_ended_is_an_error(error: type[Exception]) -> None:
    class Pipe:
        def send(self, item: object) -> None:
            if error is BrokenPipeError:
                raise error

        def recv(self) -> object:
            raise error

    worker = object.__new__(_Worker)
    worker._pipe = Pipe()  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"a worker process died .*; use fewer workers"):
        worker(1)


def test_only_a_tokenizer_with_a_reference_is_replaced_after_a_mismatch(
    tmp_path: Path, tokenizer: HuggingFaceTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gigatoken")

    class Wrong(FastTokenizer):
        def encode_joined(self, texts: Any) -> Any:
            raise MismatchError("other tokens")

    class Plain(ByteTokenizer):
        def encode_batch(self, texts: Any) -> Any:
            raise MismatchError("other tokens")

    (tmp_path / "a.txt").write_text("the whale")
    (made,) = preprocess([tmp_path / "a.txt"], tmp_path / "o", Wrong(tokenizer))
    with IndexedDataset(made.prefix) as dataset:
        assert dataset.tokens.tolist() == tokenizer.encode("the whale")
    assert caplog.messages == ["other tokens; the run starts again without gigatoken"]
    with pytest.raises(MismatchError):
        preprocess([tmp_path / "a.txt"], tmp_path / "o", Plain())


# -- parts ------------------------------------------------------------------------------------


def test_a_folder_is_removed_if_its_job_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        WorkFolder(str(tmp_path / "o"), {"a": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("job", [None, "{", "[]"])
def test_parts_without_a_job_are_of_another_one(
    job: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".o.parts").mkdir()
    for name in ("00000000.part", "00000001.part"):
        (tmp_path / ".o.parts" / name).touch()
    if job is not None:
        (tmp_path / ".o.parts" / "job.json").write_text(job)
    with WorkFolder(str(tmp_path / "o"), {"b": 1, "a": 2}):
        assert "holds 2 parts of another job (a, b differ); they are removed" in caplog.text
    assert not list(tmp_path.iterdir())


# -- images -----------------------------------------------------------------------------------


def test_images_belong_to_single_and_compressed_text_files(tmp_path: Path) -> None:
    texts, images = tmp_path / "texts", tmp_path / "images"
    for folder in (texts, images):
        folder.mkdir()
    (texts / "a.b.txt").write_text("a")
    (texts / "c.txt.gz").write_bytes(gzip.compress(b"c"))
    for name in ("a.b.gif", "c.png"):
        (images / name).write_bytes(GIF)
    for inputs in ([texts / "a.b.txt", texts / "c.txt.gz"], [texts]):
        made = tokenize_image_pairs(inputs, tmp_path / "o", ByteTokenizer(), image_folder=images)
        with IndexedDataset(made.prefix) as dataset:
            assert [bytes(dataset[n].tolist()) for n in (0, 2)] == [b"a", b"c"]
    for folder, message in ((images / "c.png", "c.png is not a folder"), (tmp_path / "no", "no ")):
        with pytest.raises(DataError, match=rf"--input-image .*{message}"):
            tokenize_image_pairs([texts], tmp_path / "f", ByteTokenizer(), image_folder=folder)


@pytest.mark.parametrize("append", [False, True])
def test_a_chunk_of_texts_with_images_has_32_kibibytes(append: bool) -> None:
    ending = TextEnding.from_options(ByteTokenizer(), append, None)
    encoder = ImagePairEncoder(ByteTokenizer(), ending, ImageLocator("i"), ("text", "image"))
    assert encoder.chunk_bytes == (32_768, 32_768)
    assert encoder.options(0) == {
        "images": {"folder": "i", "pad_length": None},
        "append_eod": append,
    }


def test_an_image_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gif")
    with pytest.raises(UnreadableError, match=r"a\.gif"):
        ImageLocator(None).read(str(tmp_path / "a.gif"))


# -- merged datasets --------------------------------------------------------------------------


@pytest.fixture
def corpora(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for number, path in enumerate(paths, start=1):
        path.write_text('{"text": "7"}\n' * number + '{"text": ""}\n{\n')
    return paths


def test_a_merged_dataset_has_the_manifest_of_one_made_at_once(
    corpora: list[Path], tmp_path: Path
) -> None:
    def made(name: str, inputs: list[Path], **options: Any) -> str:
        settings = {"on_error": "skip", "chunk_bytes": 20, **options}
        return preprocess(inputs, tmp_path / name, NullTokenizer(9), **settings)[0].prefix

    parts = [made(path.stem, [path]) for path in corpora]
    whole = read_manifest(made("whole", corpora))
    merge(parts, tmp_path / "m")
    assert read_manifest(tmp_path / "m") == whole
    assert whole is not None and whole["append_eod"] is False
    merge([parts[0], made("e", corpora[1:], append_eod=True)], tmp_path / "m")
    mixed = read_manifest(tmp_path / "m")
    assert mixed is not None and (mixed["append_eod"], mixed["json_key"]) == (None, "text")


def test_a_source_that_cannot_be_read_again_is_named(
    corpora: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = preprocess(corpora[:1], tmp_path / "o", NullTokenizer(9), on_error="skip")[0].prefix

    def fail(*_: object) -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr(tracing, "reopen", fail)
    found = trace(prefix, document=0)
    assert (found.path, found.inexact_reason) == (str(corpora[0]), "not for you")
    assert found.number is None and found.tokens == 1


def test_a_manifest_does_not_stay_beside_other_tokens(
    corpora: list[Path], tmp_path: Path, write_dataset: Callable[..., str]
) -> None:
    prefix = preprocess(corpora, tmp_path / "o", NullTokenizer(9), on_error="skip")[0].prefix
    foreign = write_dataset([[1], [2]], "foreign")
    for run in (
        lambda output: merge([foreign], output),
        lambda output: split(foreign, [output], shares=[1]),
    ):
        merge([prefix], tmp_path / "m")
        assert read_manifest(tmp_path / "m") is not None
        run(tmp_path / "m")
        assert read_manifest(tmp_path / "m") is None
