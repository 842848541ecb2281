import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    IndexedDatasetBuilder,
    preprocess,
    read_texts,
    verify,
)
from megatron_data.preprocessing import Counts
from megatron_data.preprocessing.manifest import write_manifest
from megatron_data.preprocessing.pool import _interrupts_held, _serve, ordered_map
from megatron_data.sources.json_lines import JsonLines, LinesChunk
from megatron_data.sources.protocol import Item
from megatron_data.tokenizers import NullTokenizer


def test_documents_decode_to_the_texts_they_came_from(
    corpus: Path, texts: list[str], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    started = time.perf_counter()
    (made,) = preprocess([corpus], tmp_path / "out", tokenizer, append_eod=True)
    assert 0 < made.seconds <= time.perf_counter() - started
    assert made.prefix == str(tmp_path / "out_text_document")
    dataset = IndexedDataset(made.prefix)
    assert dataset.num_documents == len(texts) == made.counts.documents
    assert dataset.dtype == np.uint16
    for number, text in enumerate(texts):
        tokens = dataset.document(number).tolist()
        assert tokens[-1] == tokenizer.eod_id
        assert tokenizer.decode(tokens[:-1]) == text
    assert verify(made.prefix).has_manifest


def test_files_are_equal_for_any_number_of_workers_and_chunk_size(
    corpus: Path, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    pairs, manifests = set(), set()
    for workers, chunk_bytes in ((1, None), (1, 1000), (2, 1000)):
        folder = tmp_path / f"{workers}-{chunk_bytes}"
        (made,) = preprocess(
            [corpus, corpus],
            folder / "o",
            tokenizer,
            append_eod=True,
            workers=workers,
            chunk_bytes=chunk_bytes,
        )
        assert (made.chunks > 2) == (chunk_bytes is not None)
        names = sorted(path.name for path in folder.iterdir())
        assert names == [f"o_text_document.{end}" for end in ("bin", "idx", "meta.json")]
        *pair, manifest = ((folder / name).read_bytes() for name in names)
        pairs.add(tuple(pair))
        manifests.add(manifest)
    assert len(pairs) == 1
    assert len(manifests) == 2, "only the chunks differ, not the workers"


def test_chunks_end_with_lines_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = b"".join(b'{"text": "%s"}\n' % (b"x" * (i * 7 % 40)) for i in range(50))[:-1]
    path.write_bytes(data)
    source = JsonLines(str(path))
    for size in (1, 10, 100, 10_000):
        chunks = [chunk for chunk in source.chunks(size) if isinstance(chunk, LinesChunk)]
        assert b"".join(chunk.data for chunk in chunks) == data
        assert all(chunk.data.endswith(b"\n") for chunk in chunks[:-1])
        assert chunks[-1].line + chunks[-1].lines == 51
        assert source.record()["lines"] == 50
        items = [item for chunk in chunks for item in chunk.items(("text",))]
        assert [item.number for item in items] == list(range(1, 51))
        for item in items:
            assert isinstance(item, Item) and item.offset is not None
            assert json.loads(data[item.offset :][: item.size])["text"] == item.texts[0][0]
        for chunk in chunks:
            again = source.chunk_at(chunk.span)
            assert (again.data, again.digest) == (chunk.data, chunk.digest)


def test_several_keys_sentences_blank_lines_and_empty_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "1 2", "other": "7"}\r\n'
        "\n"
        '{"other": "8 9", "text": ["3", "", "4 5"], "unused": 1}\n'
        "   \n"
        '{"text": "", "other": "6"}'
    )
    text, other = preprocess(
        [path], tmp_path / "o", NullTokenizer(10), json_keys=["text", "other"], append_eod=True
    )
    dataset = IndexedDataset(text.prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[1, 2, 10], [3], [4, 5, 10]]
    assert dataset.document_indices.tolist() == [0, 1, 3, 3]
    assert (text.counts.documents, text.counts.empty_documents) == (3, 1)
    assert IndexedDataset(other.prefix).tokens.tolist() == [7, 10, 8, 9, 10, 6, 10]
    assert other.prefix.endswith("o_other_document")


BROKEN = [
    (b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl:2: not JSON"),
    (b'{"text": "a"}\n\n{"body": "b"}\n', r"a\.jsonl:3: no key 'text' \(keys here: 'body'\)"),
    (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: byte 10 of the line, 0xff, is not UTF-8"),
    (b'{"text": 5}\n', r"a\.jsonl:1: 'text' holds a number"),
    (b'{"text": ["a", 5]}\n', r"a\.jsonl:1: 'text' holds a list of other values"),
    (b'["text"]\n', r"a\.jsonl:1: a list, not an object"),
    (b"", r"a\.jsonl is empty"),
    (b"\n \n", r"no document with text under 'text' in .*a\.jsonl"),
    (b'{"text": ""}\n', r"no document with text under 'text' in .*a\.jsonl"),
]


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_of_the_input_are_reported(tmp_path: Path, workers: int) -> None:
    for content, message in BROKEN if workers == 1 else BROKEN[:1]:
        path = tmp_path / "a.jsonl"
        path.write_bytes(content)
        with pytest.raises(DataError, match=message) as raised:
            preprocess([path], tmp_path / "out" / "o", ByteTokenizer(), workers=workers)
        assert "\n" not in str(raised.value)
        assert not list((tmp_path / "out").glob("*")), "something half-written was left"
    with pytest.raises(DataError, match="no input file or folder at"):
        preprocess([tmp_path / "none.jsonl"], tmp_path / "o", ByteTokenizer())
    with pytest.raises(DataError, match="no input file given"):
        preprocess([], tmp_path / "o", ByteTokenizer())


def test_appending_needs_an_end_of_document_token(
    tokenizer: HuggingFaceTokenizer, corpus: Path, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path)
    definition = (tmp_path / "tokenizer.json").read_text().replace("<|endoftext|>", "<|stop|>")
    with pytest.raises(DataError, match="has no end-of-document token"):
        preprocess([corpus], tmp_path / "o", HuggingFaceTokenizer(definition), append_eod=True)


def test_a_failed_run_keeps_the_older_dataset(corpus: Path, tmp_path: Path) -> None:
    (made,) = preprocess([corpus], tmp_path / "o", ByteTokenizer())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(corpus.read_bytes() + b"{")
    with pytest.raises(DataError, match=r"broken\.jsonl:301"):
        preprocess([broken], tmp_path / "o", ByteTokenizer())
    broken.unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    verify(made.prefix)


def test_a_killed_run_leaves_no_complete_dataset(corpus: Path, tmp_path: Path) -> None:
    """The next run reuses the temporary names and writes the bytes of an uninterrupted run."""
    script = (
        "import sys, time\n"
        "from megatron_data import ByteTokenizer, preprocess\n"
        "class Slow(ByteTokenizer):\n"
        "    def encode_batch(self, texts):\n"
        "        print('started', flush=True)\n"
        "        time.sleep(60)\n"
        "preprocess([sys.argv[1]], sys.argv[2], Slow())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(corpus), str(tmp_path / "o")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    with pytest.raises(DataError, match="no dataset at"):
        IndexedDataset(tmp_path / "o_text_document")
    preprocess([corpus], tmp_path / "o", ByteTokenizer())
    preprocess([corpus], tmp_path / "undisturbed" / "o", ByteTokenizer())
    for path in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_verify_finds_a_flipped_bit_a_swapped_file_and_a_token_too_large(
    corpus: Path, tmp_path: Path
) -> None:
    prefix = preprocess([corpus], tmp_path / "o", ByteTokenizer())[0].prefix
    data = Path(f"{prefix}.bin")
    whole = data.read_bytes()
    data.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(DataError, match=r"\.bin differs from its manifest"):
        verify(prefix)
    data.write_bytes(whole)
    manifest = Path(f"{prefix}.meta.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"tokenizer": {"vocab_size": 50}}))
    with pytest.raises(DataError, match="the vocabulary has 50"):
        verify(prefix)
    with IndexedDatasetBuilder(tmp_path / "n", "int32") as builder:
        builder.add_document([1, -7, 3], [3])
        written = builder.finalize()
    counts = Counts(1, 0, 1, 3)
    described = {"tokenizer": content["tokenizer"], "sources": [], "dtype": "int32"}
    write_manifest(str(tmp_path / "n"), described, written=written, counts=counts, origins=None)
    with pytest.raises(DataError, match=r"n\.bin holds token -7, but the vocabulary has 257"):
        verify(tmp_path / "n")
    manifest.write_text("{")
    with pytest.raises(DataError, match=r"meta\.json is not JSON"):
        verify(prefix)
    manifest.unlink()
    assert not verify(prefix).has_manifest


def test_the_manifest_records_sources_tokenizer_and_counts(
    corpus: Path, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    import hashlib

    prefix = preprocess([corpus], tmp_path / "o", tokenizer)[0].prefix
    content = json.loads(Path(f"{prefix}.meta.json").read_text())
    (source,) = content["sources"]
    assert source["sha256"] == hashlib.sha256(corpus.read_bytes()).hexdigest()
    assert (source["bytes"], source["lines"]) == (corpus.stat().st_size, 300)
    assert content["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert content["counts"]["documents"] == 300
    for suffix in ("bin", "idx"):
        data = Path(f"{prefix}.{suffix}").read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        assert content["files"][suffix] == {
            "bytes": len(data),
            "sha256": digest,
            "blocks": [digest],
        }


def test_texts_can_be_read_without_preprocessing(corpus: Path, texts: list[str]) -> None:
    assert list(read_texts([corpus, corpus])) == texts * 2


def _late_first(number: int) -> int:
    time.sleep(0.2 if number == 0 else 0)
    return number * number


def _die(number: int) -> int:
    os._exit(1)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Enables Ctrl-C, which is ignored in background processes of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_until_a_worker_has_started_and_does_not_reach_it() -> None:
    blocked = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    done = ""
    with pytest.raises(KeyboardInterrupt), _interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        done = subprocess.check_output([sys.executable, "-c", blocked], text=True)
    assert done == "True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_results_keep_the_order_of_the_input() -> None:
    assert list(ordered_map(_late_first, range(20), workers=2)) == [i * i for i in range(20)]


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(DataError, match="a worker process died"):
        list(ordered_map(_die, range(3), workers=2))
    with pytest.raises(DataError, match="0 workers"):
        list(ordered_map(_die, range(3), workers=0))


def _shared_memory(number: int) -> list[str]:
    """Returns named shared memory of this process and its parent, which outlives them."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), os.getppid())]
    lines = [line for text in maps for line in text.splitlines() if "/dev/shm/" in line]
    return [line for line in lines if not line.endswith("(deleted)")]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_pool_leaves_nothing_in_shared_memory_however_it_ends() -> None:
    assert list(ordered_map(_shared_memory, range(3), workers=2)) == [[], [], []]


def _fail(number: int) -> int:
    raise DataError(f"item {number}")


def test_an_error_of_the_function_comes_back_with_its_place() -> None:
    with pytest.raises(DataError, match="item 0") as caught:
        list(ordered_map(_fail, range(3), workers=2))
    assert "in _fail" in "".join(caught.value.__notes__)


def _unsendable(number: int) -> object:
    return lambda: number


def test_an_answer_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(DataError, match="answer cannot be sent"):
        list(ordered_map(_unsendable, range(3), workers=2))


def test_a_text_that_cannot_be_tokenized_names_its_line() -> None:
    from megatron_data.preprocessing.encoding import TextEncoder

    data = b'{"text": "1"}\n{"text": "x"}\n{"text": "3"}'
    found = TextEncoder(NullTokenizer(9), ("text",), append_eod=False)(
        LinesChunk("a.jsonl", 100, 5, data, len(data))
    )
    (fault,) = found.faults
    reason = "NullTokenizer reads numbers separated by spaces, got 'x'"
    assert str(fault).startswith(f"a.jsonl:6: {reason}") and "int()" not in str(fault)
    assert (fault.offset, fault.size, fault.kind) == (114, 13, "tokens")
    assert found.outputs[0].tokens.tolist() == [1, 3]
    assert found.refused == [1]


@pytest.mark.parametrize("end", [EOFError, ConnectionResetError])
def test_a_worker_ends_silently_if_its_parent_has_ended(end, monkeypatch):
    """An interrupted parent may leave an item in the pipe, which resets it."""
    pool = sys.modules[_serve.__module__]
    for name in ("signal", "pthread_sigmask"):
        monkeypatch.setattr(pool.signal, name, lambda *_: None)

    class Pipe:
        def recv(self) -> None:
            raise end

    _serve(Pipe(), len)


@pytest.mark.parametrize("result", ["plain", lambda: None], ids=["answer", "cannot be pickled"])
def test_a_worker_ends_silently_if_its_parent_does_not_read_the_answer(result, monkeypatch):
    """The parent was interrupted between sending an item and reading the answer."""
    pool = sys.modules[_serve.__module__]
    for name in ("signal", "pthread_sigmask"):
        monkeypatch.setattr(pool.signal, name, lambda *_: None)
    sent = []

    class Pipe:
        def recv(self) -> str:
            assert not sent, "it goes on"
            return "item"

        def send(self, answer: object) -> None:
            pickle.dumps(answer)
            sent.append(answer)
            raise BrokenPipeError

    _serve(Pipe(), lambda _: result)
    assert len(sent) == 1
