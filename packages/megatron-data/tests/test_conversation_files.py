"""Tests of datasets of conversations: formats, workers, restarts, skipped rows, and the mask."""

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_data import (
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    IndexedDatasetBuilder,
    build_sft_datasets,
    merge,
    split,
    tokenize_conversations,
    verify,
)
from megatron_data.cli import main
from megatron_data.preprocessing import trace
from megatron_data.preprocessing.manifest import read_manifest
from megatron_data.tokenizers import ChatTemplate

pytest.importorskip("jinja2")

SOURCE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}|"
    "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}|{% endif %}{% endfor %}"
)
TEMPLATE = ChatTemplate(SOURCE)
CALL = [{"function": {"name": "look", "arguments": "{}"}}]
LOOKING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": CALL}


def talk(number: int, conversations: int = 1) -> dict[str, Any]:
    messages = []
    for part in range(conversations):
        if conversations > 1:
            messages.append({"role": "system", "content": f"Be number {part}."})
        messages.append({"role": "user", "content": f"What is {number} and {number * 7919 % 97}?"})
        messages.append({"role": "assistant", "content": "It is " + "a whale. " * (number % 9)})
    return {"messages": messages}


ROWS = [talk(number, 1 + number % 3) for number in range(300)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    return write(tmp_path / "talks.jsonl", ROWS)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def one_by_one(
    rows: list[Any], prefix: Path, tokenizer: HuggingFaceTokenizer, most: int
) -> dict[str, bytes]:
    """Writes the files with a plain loop over rows, without chunks."""
    with (
        IndexedDatasetBuilder(prefix, "uint16") as tokens,
        IndexedDatasetBuilder(f"{prefix}_loss", "uint8") as masks,
    ):
        for row in rows:
            starts = [n for n, m in enumerate(row["messages"]) if m["role"] == "system"] or [0]
            for first, last in zip(starts, [*starts[1:], None], strict=True):
                text, answers = TEMPLATE.render(row["messages"][first:last])
                ((ids, places),) = tokenizer.encode_with_offsets([text])
                mask = [any(b < e2 and e > b2 for b2, e2 in answers) for b, e in places]
                ids, mask = [*ids, tokenizer.eod_id][:most], [*mask, True][:most]
                if any(mask[1:]):
                    tokens.add_item(ids)
                    masks.add_item(np.array(mask, np.uint8))
            tokens.end_document()
            masks.end_document()
        tokens.finalize()
        masks.finalize()
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir()}


def test_files_equal_those_of_a_plain_loop_for_any_number_of_workers(
    talks: Path, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "loop").mkdir()
    wanted = one_by_one(ROWS, tmp_path / "loop" / "o_conversation", tokenizer, 60)
    manifests = set()
    for workers, chunk_bytes in ((1, 4000), (3, 4000), (1, None)):
        folder = tmp_path / f"made{workers}{chunk_bytes}"
        report = tokenize_conversations(
            [talks], folder / "o", tokenizer, TEMPLATE, max_tokens=60, workers=workers,
            chunk_bytes=chunk_bytes,
        )  # fmt: skip
        assert 0 < report.truncated < report.conversations
        assert (report.dataset.chunks > 20) == (chunk_bytes is not None)
        made = files_in(folder)
        assert {name: data for name, data in made.items() if ".meta" not in name} == wanted
        manifests.add(made["o_conversation_loss.meta.json"])
        for name in ("o_conversation", "o_conversation_loss"):
            assert verify(folder / name).has_manifest
    assert len(manifests) == 2, "chunks stand in the manifest, the number of workers does not"


JOB = """
import sys, time
from collections.abc import Callable
from pathlib import Path
import megatron_data
from megatron_data import load_tokenizer, tokenize_conversations
from megatron_data.tokenizers import ChatTemplate

class HuggingFaceTokenizer(megatron_data.HuggingFaceTokenizer):
    def encode_with_offsets(self, texts):
        time.sleep(0.01)
        return super().encode_with_offsets(texts)

    def __reduce__(self):
        return type(self), (self.definition, {})

if __name__ == "__main__":
    talks, output, tokenizer, template, workers = sys.argv[1:]
    tokenizer = HuggingFaceTokenizer(Path(tokenizer).read_bytes())
    print("ready", flush=True)
    report = tokenize_conversations(
        [talks], output, tokenizer, ChatTemplate(template), chunk_bytes=1000, workers=int(workers)
    )
    print("done", report.dataset.resumed_chunks, flush=True)
"""
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 13))]


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_killed_at_random_moments_resume_to_the_same_bytes(
    seed: int,
    talks: Path,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    check_resume_after_kills: Callable[..., None],
) -> None:
    tokenize_conversations([talks], tmp_path / "calm" / "o", tokenizer, TEMPLATE, chunk_bytes=1000)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.definition)
    out = tmp_path / "out" / "o"
    out.parent.mkdir()
    program = [str(tmp_path / "job.py"), str(talks), str(out)]
    program += [str(tmp_path / "tokenizer.json"), SOURCE]
    check_resume_after_kills(seed, program, out, files_in(tmp_path / "calm"))


def test_all_formats_of_rows_are_read(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    """Messages, turns with `from`, and Alpaca with its published prompts."""
    said = {"instruction": "Add.", "input": "", "output": "3"}
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, LOOKING, {"role": "tool", "content": "!"},
                      {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        said,
        {**said, "input": "1 {2}"},
    ]  # fmt: skip
    texts = [
        "user: Hi|<look>|tool: !|A|",
        "user: Hi|Ho|",
        "user: Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nAdd.\n\n### Response:|3|",
        "user: Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 {2}\n\n### Response:|3|",
    ]
    write(tmp_path / "a.jsonl", rows)
    tokenize_conversations([tmp_path / "a.jsonl"], tmp_path / "o", tokenizer, TEMPLATE)
    end = tokenizer.decode([tokenizer.eod_id or 0])
    with IndexedDataset(tmp_path / "o_conversation") as made:
        assert [tokenizer.decode(made.get(n).tolist()) for n in range(4)] == [
            text + end for text in texts
        ]


def test_parquet_gives_the_files_of_json_lines(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """A table has every field in every struct; null fields are removed from messages."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [*ROWS[:20], {"messages": [ROWS[0]["messages"][0], LOOKING]}]
    table = pyarrow.Table.from_pylist([{**row, "id": 7, "conversations": None} for row in rows])
    assert "tool_calls" in table.to_pylist()[0]["messages"][0]
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in" / "a.parquet")
    write(tmp_path / "a.jsonl", rows)
    template = ChatTemplate(SOURCE.replace("m.tool_calls or []", "m.tool_calls"))
    for name, source in (("p", tmp_path / "in"), ("j", tmp_path / "a.jsonl")):
        tokenize_conversations([source], tmp_path / name, tokenizer, template, chunk_bytes=500)
        verify(tmp_path / f"{name}_conversation")
    for suffix in (".bin", ".idx", "_loss.bin", "_loss.idx"):
        made = [(tmp_path / f"{name}_conversation{suffix}").read_bytes() for name in "pj"]
        assert made[0] == made[1]
    found = trace(tmp_path / "p_conversation", document=20)
    assert (Path(found.path).name, found.number, found.inexact_reason) == ("a.parquet", 21, None)
    parquet.write_table(table.select(["id"]), tmp_path / "in" / "a.parquet")
    with pytest.raises(
        DataError, match=r"row 1: none of the columns 'messages', 'conversations', .*'id'"
    ):
        tokenize_conversations([tmp_path / "in"], tmp_path / "f", tokenizer, template)


WRONG: list[tuple[Any, str, str]] = [
    ({"text": "Hi"}, "message", "no conversation; a line must be like"),
    ({"messages": [{"role": "user"}]}, "message", r"message 1 \(user\) has no content; only"),
    ({"messages": [talk(1)["messages"][0], {**LOOKING, "tool_calls": []}]}, "message",
     r"message 2 \(assistant\) has no content"),
    ({"conversations": [{"from": "human", "value": None}]}, "message", "message 1 .* no content"),
    ({"conversations": [{"from": ["x"], "value": "y"}]}, "message", "message 1 is not like"),
    ({**talk(1), "tools": "{"}, "message", "its tools are not JSON"),
    ({"messages": [{"role": "user", "content": "no!"}]}, "template", "refuses the messages: no!"),
    (5, "json", "a number, not an object; every line must be an object"),
    ({"instruction": "a", "input": [1], "output": "b"}, "message", r"its input is \[1\], not a"),
    ({**talk(1), "tools": 5}, "message", "its tools are 5, not a list"),
]  # fmt: skip


def test_an_invalid_line_is_reported_skipped_or_quarantined(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = ChatTemplate(
        "{% if messages[0].content == 'no!' %}{{ raise_exception('no!') }}{% endif %}" + SOURCE
    )
    for row, _, message in WRONG:
        path = write(tmp_path / "a.jsonl", [talk(1), row, talk(2)])
        with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
            tokenize_conversations([path], tmp_path / "o", tokenizer, refusing)
    assert not list(tmp_path.glob("o*"))
    mixed = [row for wrong, _, _ in WRONG for row in (wrong, talk(len(str(wrong))))]
    path = write(tmp_path / "a.jsonl", mixed)
    for chunk_bytes in (None, 300):
        report = tokenize_conversations(
            [path], tmp_path / "q", tokenizer, refusing, on_error="quarantine",
            chunk_bytes=chunk_bytes,
        )  # fmt: skip
        assert (report.rows, report.dataset.skipped.documents) == (len(WRONG), len(WRONG))
        assert "no conversation" in (report.dataset.first_skipped or "")
        records = [json.loads(line) for line in (tmp_path / "q.quarantine.jsonl").open()]
        assert [row["kind"] for row in records] == [kind for _, kind, _ in WRONG]
        assert [row["number"] for row in records] == list(range(1, 2 * len(WRONG), 2))
        for document in range(len(WRONG)):
            found = trace(tmp_path / "q_conversation_loss", document=document)
            assert (found.number, found.inexact_reason) == (2 * document + 2, None)
    tokenizer.save(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text(refusing.source)
    command = ["tokenize-conversations", "--input", str(path), "--on-error", "skip"]
    command += ["--tokenizer-model", str(tmp_path / "t"), "--output-prefix", str(tmp_path / "s")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "10 skipped (1 not a JSON object, 8 without a conversation, 1 refused by the" in shown
    assert "; the first: " in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "assistants"}, "loss='assistants'; give one of assistant, all"),
        ({"over_length": "cut"}, "over_length='cut'; give one of truncate, drop"),
        ({"on_error": "pass"}, "on_error='pass'; give one of fail, skip, quarantine"),
        ({"chunk_bytes": 0}, "chunk_bytes=0; give at least 1"),
    ],
)
def test_unknown_values_of_options_are_refused(
    talks: Path,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(DataError, match=message):
        tokenize_conversations([talks], tmp_path / "o", tokenizer, TEMPLATE, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["talks.jsonl"]


def test_the_manifest_records_the_day_that_a_template_writes(
    tokenizer: HuggingFaceTokenizer, talks: Path, tmp_path: Path
) -> None:
    """A run that is resumed on another day encodes its chunks again, so all have one date."""
    template = ChatTemplate("{{ strftime_now('%d') }}" + TEMPLATE.source, TEMPLATE.variables)
    options: dict[str, Any] = {"chunk_bytes": 4000}
    then = template.with_time(datetime(1999, 12, 31))
    first = tokenize_conversations([talks], tmp_path / "o", tokenizer, then, **options)
    manifest = read_manifest(first.dataset.prefix)
    assert manifest is not None
    assert manifest["conversations"]["time"] == "1999-12-31T00:00:00"
    with IndexedDataset(first.dataset.prefix) as made:
        assert tokenizer.decode(made.get(0).tolist()).startswith("31")
    broken = talks.with_name("broken.jsonl")
    broken.write_text(talks.read_text() + "{}\n")
    for day in (31, 30):
        with pytest.raises(DataError, match="no conversation"):
            tokenize_conversations(
                [broken],
                tmp_path / "p",
                tokenizer,
                template.with_time(datetime(1999, 12, day)),
                **options,
            )
    broken.write_text(talks.read_text())
    again = template.with_time(datetime(1999, 12, 30))
    made = tokenize_conversations([broken], tmp_path / "p", tokenizer, again, **options).dataset
    assert made.resumed_chunks
    with IndexedDataset(made.prefix) as dataset:
        texts = [tokenizer.decode(dataset.get(number).tolist()) for number in range(len(dataset))]
    assert all(text.startswith("30") for text in texts)
    now = tokenize_conversations([talks], tmp_path / "q", tokenizer, template).dataset.prefix
    manifest = read_manifest(now)
    assert manifest is not None
    assert manifest["conversations"]["time"].endswith("T00:00:00")


def test_null_is_not_rendered_as_text(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": [talk(1)["messages"][0], LOOKING]}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: .* writes null as text"):
        tokenize_conversations(
            [path], tmp_path / "o", tokenizer, ChatTemplate("{{ messages[1].content }}")
        )


def test_a_token_is_traced_to_its_line(
    talks: Path, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    prefix = str(tmp_path / "o_conversation")
    tokenize_conversations([talks], tmp_path / "o", tokenizer, TEMPLATE, chunk_bytes=3000)
    split(prefix, [tmp_path / "a", tmp_path / "b"], shares=(1, 1))
    split(f"{prefix}_loss", [tmp_path / "a_loss", tmp_path / "b_loss"], shares=(1, 1))
    merge([tmp_path / "b", tmp_path / "a"], tmp_path / "m")
    merge([tmp_path / "b_loss", tmp_path / "a_loss"], tmp_path / "m_loss")
    with IndexedDataset(prefix) as made, IndexedDataset(tmp_path / "m") as turned:
        place = int(made.sequence_lengths[: made.document_indices[200]].sum())
        found = trace(prefix, place + 3)
        assert (found.path, found.number, found.document) == (str(talks), 201, 200)
        assert talks.read_bytes()[found.offset :].startswith(json.dumps(ROWS[200]).encode())
        place = int(turned.sequence_lengths[: turned.document_indices[50]].sum())
    assert trace(tmp_path / "m", place).number == trace(tmp_path / "m_loss", place).number == 201
    for name in ("a", "a_loss", "m", "m_loss"):
        assert verify(tmp_path / name).has_manifest
    assert build_sft_datasets(str(tmp_path / "m"), "1,0,0", sequence_length=64).train


def test_a_mask_of_another_run_is_detected(
    talks: Path, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    """It has the same lengths, so only the manifests differ."""
    for name, loss in (("a", "assistant"), ("b", "all")):
        tokenize_conversations([talks], tmp_path / name, tokenizer, TEMPLATE, loss=loss)
        build_sft_datasets(str(tmp_path / f"{name}_conversation"), "1,0,0", sequence_length=64)
    for suffix in (".bin", ".idx", ".meta.json"):
        other = tmp_path / f"b_conversation_loss{suffix}"
        other.rename(tmp_path / f"a_conversation_loss{suffix}")
    message = r"a_conversation_loss is not the mask of .*a_conversation: another run made it"
    for name in ("a_conversation", "a_conversation_loss"):
        with pytest.raises(DataError, match=message):
            verify(tmp_path / name)
    with pytest.raises(DataError, match=message):
        build_sft_datasets(str(tmp_path / "a_conversation"), "1,0,0", sequence_length=64)


def test_the_values_of_a_mask_are_verified_and_shown(
    talks: Path,
    tokenizer: HuggingFaceTokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenize_conversations([talks], tmp_path / "o", tokenizer, TEMPLATE)
    tokenizer.save(tmp_path / "t")
    command = ["inspect", str(tmp_path / "o_conversation_loss"), "--tokens", "3"]
    assert main([*command, "--tokenizer-model", str(tmp_path / "t")]) == 0
    records = capsys.readouterr().out
    assert "vocabulary: 2 of 2 (100.0%) tokens occur" in records and "\n0 0 0\n" in records
    path = tmp_path / "o_conversation_loss.meta.json"
    manifest = json.loads(path.read_text())
    assert manifest["values"] == 2 and manifest["tokenizer"]["vocab_size"] > 2
    path.write_text(json.dumps({**manifest, "values": 1}))
    with pytest.raises(DataError, match=r"loss\.bin holds token 1, but values are below 1"):
        verify(tmp_path / "o_conversation_loss")


def test_text_files_are_refused_as_conversations(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Hi")
    with pytest.raises(DataError, match=r"a\.txt: a text file has no objects; give JSON lines"):
        tokenize_conversations([tmp_path / "a.txt"], tmp_path / "o", tokenizer, TEMPLATE)


def test_a_mask_is_never_visible_beside_tokens_of_another_run(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that replaces a dataset is stopped before each rename or removal of a file."""
    path, out = write(tmp_path / "a.jsonl", ROWS[:4]), tmp_path / "out"
    names = [f"o_conversation{middle}{end}" for middle in ("", "_loss") for end in (".bin", ".idx")]

    def run(folder: Path, most: int) -> dict[str, bytes]:
        tokenize_conversations([path], folder / "o", tokenizer, TEMPLATE, max_tokens=most)
        return files_in(folder)

    manifests = [f"o_conversation{middle}.meta.json" for middle in ("", "_loss")]
    versions = {"older": run(tmp_path / "older", 40), "newer": run(tmp_path / "newer", 50)}
    assert all(versions["older"][name] != versions["newer"][name] for name in names)
    moments = 0

    def stopping(really: Callable[..., Any]) -> Callable[..., Any]:
        def operation(place: Path, *rest: Any, **named: Any) -> Any:
            nonlocal moments
            if "o_conversation" in place.name:
                moments -= 1
                if moments == 0:
                    raise KeyboardInterrupt
            return really(place, *rest, **named)

        return operation

    seen = []
    for moment in range(1, 30):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "older", out)
        moments, ended = moment, False
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", stopping(Path.unlink))
            patched.setattr(Path, "replace", stopping(Path.replace))
            try:
                run(out, 50)
            except KeyboardInterrupt:
                ended = True
        there = files_in(out)
        opened = [name for name in names if name.endswith(".idx") and name in there]
        seen.append(len(opened))
        if len(opened) == 2:
            whole = [*names, *(name for name in manifests if name in there)]
            made = {next(v for v in versions if versions[v][n] == there[n]) for n in whole}
            assert len(made) == 1, f"stopped before operation {moment}"
        if not ended:
            break
    assert len(seen) > 10 and {1, 2} <= set(seen), "stopped in the midst of it, too"
    assert files_in(out) == versions["newer"]
