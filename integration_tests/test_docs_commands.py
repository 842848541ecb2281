"""Runs every command line of the documentation, in the order of its page.

The commands of a page run in one folder, which contains the files that its reader has at that point
(`GIVEN`). Flags for smaller sizes are appended to commands that would take minutes (`SMALLER`);
``--print-config`` must accept the command as it is written. Commands that are not run are in
`NOT_RUN`, with the reason and with a check that replaces the run.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from doc_commands import (
    DATA,
    GIVEN,
    NEEDS,
    NOT_RUN,
    SMALLER,
    TYPED,
    as_written,
    smaller,
)
from doc_pages import PAGES, ROOT, Command, blocks, commands, save_titled
from parsers import console_scripts
from preloaded import Preloaded

TIMEOUT = 240


class Server:
    """A running server and the address that it prints."""

    def __init__(
        self, words: list[str], folder: Path, environment: dict[str, str], preloaded: Preloaded
    ) -> None:
        words = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        self._process = preloaded.start(
            words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        self._log: list[str] = []
        self._ready = threading.Event()
        self.port = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready.wait(TIMEOUT)
        assert self.port, "the server does not start: " + "".join(self._log)

    def _read(self) -> None:
        for line in self._process.stderr or ():
            self._log.append(line)
            if found := re.search(r"serving .* at http://[^ ]+:(\d+) ", line):
                self.port = found[1]
                self._ready.set()
        self._ready.set()

    def end(self) -> None:
        """Stops the server with SIGTERM, as an init system does; it must exit cleanly."""
        self._process.terminate()
        status = self._process.wait(timeout=TIMEOUT)
        self._reader.join(timeout=TIMEOUT)
        assert status == 0, "".join(self._log)


class Reader:
    """Runs the commands of a page in a folder of its own."""

    def __init__(
        self, page: Path, folder: Path, run_as_processes: set[str], preloaded: Preloaded
    ) -> None:
        self.commands = commands(page)
        self.folder = folder
        self._seen = run_as_processes
        self._preloaded = preloaded
        self._server: Server | None = None
        self._results: list[str] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}

    def result(self, number: int) -> str:
        """Returns the failure of a command, or an empty string; runs earlier commands first."""
        while len(self._results) <= number:
            command = self.commands[len(self._results)]
            try:
                self._run(command)
                self._results.append("")
            except (AssertionError, ValueError, subprocess.TimeoutExpired) as error:
                self._results.append(f"{command.location}: $ {command.text}\n{error}")
        return self._results[number]

    def close(self) -> None:
        """Stops servers that are still running."""
        if self._server is not None:
            server, self._server = self._server, None
            server.end()

    def _run(self, command: Command) -> None:
        text = command.text
        if "pretrain gpt" in text:
            self._read_only(*as_written(text))
        if listed := next((one for one in NOT_RUN if one.covers(text)), None):
            return listed.check(text)
        if NEEDS.get(text) and importlib.util.find_spec(NEEDS[text]) is None:
            return None
        text = smaller(text)
        if text.startswith("megatron-infer serve "):
            self.close()
            self._server = Server(
                shlex.split(text), self.folder, self._environment, self._preloaded
            )
            return self._in_shell(f"curl {self._address()}/health", "")
        typed = command.typed or TYPED.get(" ".join(text.split()[:2]), "")
        plain = text.startswith("megatron-") and not set(text) & set("|&;<>$`")
        name = text.split(maxsplit=1)[0]
        if plain and name in self._seen:
            if not typed and "--nproc-per-node" not in text:
                return self._in_this_process(name, shlex.split(text)[1:])
            return self._forked(shlex.split(text), typed)
        if plain:
            self._seen.add(name)
        return self._in_shell(text, typed)

    def _address(self) -> str:
        assert self._server is not None, "no server is running"
        return f"http://127.0.0.1:{self._server.port}"

    def _read_only(self, text: str, ranks: int) -> None:
        name, *words = shlex.split(text)
        with pytest.MonkeyPatch.context() as patch:
            if ranks > 1:
                patch.setenv("WORLD_SIZE", str(ranks))
            try:
                self._in_this_process(name, words)
            except AssertionError as error:
                raise AssertionError(f"as it is written: {error}") from None

    def _in_this_process(self, name: str, words: list[str]) -> None:
        output = io.StringIO()
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                status = console_scripts()[name].load()(words)
            except SystemExit as left:  # --help
                status = left.code
        assert status == 0, output.getvalue()

    def _forked(self, words: list[str], typed: str) -> None:
        words = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        done = self._preloaded.run(words, input=typed, timeout=TIMEOUT, **self._options())
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr

    def _options(self) -> dict[str, Any]:
        options = {"cwd": self.folder, "env": self._environment}
        return {**options, "capture_output": True, "text": True}

    def _in_shell(self, text: str, typed: str) -> None:
        if text.startswith("curl "):
            text = text.replace("http://localhost:5000", self._address())
            text = text.replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(
            ["bash", "-c", text], input=typed, timeout=TIMEOUT, check=False, **self._options()
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files that pages need: texts, tokens, tokenizer, run, export."""
    folder = tmp_path_factory.mktemp("shelf")
    book = (ROOT / "corpus" / "moby_dick.jsonl").read_text(encoding="utf-8")[:200_000]
    (folder / "texts").mkdir()
    for number in range(60):
        text = book[3000 * number : 3000 * (number + 1)]
        (folder / "texts" / f"{number:02}.txt").write_text(text, encoding="utf-8")
    (folder / "more.jsonl").write_text('{"text": "Call me Ishmael."}\n')
    lay_corpus(folder)
    for line in (
        "megatron-data train-tokenizer --input texts --vocab-size 512 --output tokenizer",
        "megatron-data preprocess --input texts --tokenizer-model tokenizer --output-prefix book",
        smaller(f"megatron-train pretrain gpt {DATA} --save runs/book"),
        "megatron-ckpt convert --to-hf runs/book gpt2",
    ):
        name, *words = line.split()
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
            assert console_scripts()[name].load()(words) == 0, line
    lay_megatrons(folder)
    return folder


def lay_corpus(folder: Path) -> None:
    """Writes the first chapters of the repository's corpus under the same name."""
    name = "corpus/world_english_bible.jsonl"
    (folder / name).parent.mkdir()
    with (ROOT / name).open(encoding="utf-8") as lines:
        (folder / name).write_text("".join(islice(lines, 40)), encoding="utf-8")


def lay_megatrons(folder: Path) -> None:
    """Writes the files of Megatron-LM's README, a conversation, and pairs of both kinds."""
    shutil.copy(folder / "more.jsonl", folder / "my-corpus.json")
    turns = [{"role": role, "content": "Call me Ishmael."} for role in ("user", "assistant")]
    (folder / "talks.jsonl").write_text(40 * (json.dumps({"messages": turns}) + "\n"))
    for language, text in (("en", "A whale.\n"), ("de", "Ein Wal.\n")):
        (folder / f"tales.{language}").write_text(text)
    (folder / "whale.gif").write_bytes(b"GIF89a")
    for name, content in (("titles/whale.txt", b"A whale."), ("pictures/whale.gif", b"GIF89a")):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(content)
    rows = "".join(f"a {word} tale\t{word}\n" for word in 40 * ["good", "bad"])
    (folder / "reviews.tsv").write_text(f"text\tlabel\n{rows}")
    (folder / "captions.jsonl").write_text('{"text": "A whale.", "image": "whale.gif"}\n')
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (folder / "bert-vocab.txt").write_text("\n".join(pieces) + "\n")
    model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")


def lay_out(page: Path, shelf: Path, folder: Path) -> None:
    """Copies the files that the reader has, and those that the page shows, into its folder."""
    save_titled(page, folder)
    for name in GIVEN.get(str(page.relative_to(ROOT)), "").split():
        here, _, there = name.partition("=")
        if here.endswith(".yaml"):  # the page shows the file
            found = [block.text for block in blocks(page.read_text()) if block.language == "yaml"]
            (folder / here).write_text(found[0])
            continue
        for source in shelf.glob(f"{there or here}*"):
            if source.name.partition(".")[0] == Path(there or here).name:
                target = (
                    folder
                    / here.replace(Path(here).name, "")
                    / source.name.replace(Path(there or here).name, Path(here).name)
                )
                copy = shutil.copytree if source.is_dir() else shutil.copy
                target.parent.mkdir(parents=True, exist_ok=True)
                copy(source, target)


@pytest.fixture(scope="session")
def run_as_processes() -> set[str]:
    """Returns the console scripts that have run as processes; further runs are in this process."""
    return set()


@pytest.fixture(scope="module")
def reader_of(
    shelf: Path,
    run_as_processes: set[str],
    preloaded: Preloaded,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], Reader]]:
    """Returns a function that returns the reader of a page, one for all its commands.

    A parametrized fixture would be recreated for every test and run all earlier commands again.
    """
    going: dict[Path, Reader] = {}

    def find(page: Path) -> Reader:
        if page not in going:
            for other in going.values():
                other.close()
            folder = tmp_path_factory.mktemp("page")
            lay_out(page, shelf, folder)
            going[page] = Reader(page, folder, run_as_processes, preloaded)
        return going[page]

    yield find
    for reader in going.values():
        reader.close()


CASES = [(page, number) for page in PAGES for number, _ in enumerate(commands(page))]
# The first pages of a newcomer run with all tests, the others with the slow tests.
FIRST = {
    "README.md",
    "docs/getting-started.md",
    "docs/serving.md",
    "docs/packages/megatron-data.md",
    "docs/packages/megatron-data/preprocessing.md",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(
            page,
            number,
            id=commands(page)[number].location,
            marks=() if str(page.relative_to(ROOT)) in FIRST else pytest.mark.slow,
        )
        for page, number in CASES
    ],
)
def test_a_command_of_the_documentation_runs(
    page: Path, number: int, reader_of: Callable[[Path], Reader]
) -> None:
    reader = reader_of(page)
    wrong = reader.result(number)
    assert not wrong, wrong
    text = reader.commands[number].text
    if listed := next((one for one in NOT_RUN if one.covers(text)), None):
        pytest.skip(f"not run: {listed.reason}; {(listed.check.__doc__ or '').lower()}")
    if NEEDS.get(text) and importlib.util.find_spec(NEEDS[text]) is None:
        pytest.skip(f"{NEEDS[text]} is not installed")


@pytest.mark.slow
def test_every_console_script_has_run_as_a_process(run_as_processes: set[str]) -> None:
    if not run_as_processes:
        pytest.skip("no command of the documentation has run before")
    assert run_as_processes == set(console_scripts())


def test_the_lists_have_no_unused_entry() -> None:
    texts = [command.text for page in PAGES for command in commands(page)]
    for listed in NOT_RUN:
        assert any(map(listed.covers, texts)), f"no command matches {listed.pattern}"
    for part in SMALLER:
        assert any(f" {part} " in f" {text} " for text in texts), part
    for page, names in GIVEN.items():
        shown = " ".join(smaller(command.text) for command in commands(ROOT / page))
        for name in names.split():
            assert name.partition("=")[0] in shown, f"{page} does not name {name}"


def test_command_lines_look_like_command_lines() -> None:
    """Checks that a console block has a line after ``$``, and that no other block is shell code."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            assert block.language not in ("sh", "bash", "shell"), f"{page}:{block.line}"
            if block.language == "console":
                assert "$ " in block.text, f"{page}:{block.line}: no line starts with $"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("megatron-data inspect nowhere", "no dataset at nowhere"),
        ("megatron-data verify --hlep", "did you mean --help?"),
        ("megatron-nothing", "not found"),
        ("megatron-train pretrain gpt ... --global-batch-size 3 --nproc-per-node 2", "3"),
        ("megatron-train pretrain gpt ... --num-layer 3", "did you mean --num-layers?"),
        ("torchrun --nnodes 2 --nproc-per-nodes 8 -m megatron_train pretrain gpt ...", "nproc"),
        ("torchrun ... -m megatron_train pretrain gpt ... --tensor-parallel-size 2", "unknown"),
        ("megatron-ckpt convert --from-hf SmolLM2.gguf runs/x --dtyp x", "dtyp"),
        ("pip install nox && nox -s quickstrat", "quickstrat"),
        ("pip install packages/megatron-nothing", "megatron-nothing"),
        ('pip install "packages/megatron-data[nothing]"', "nothing"),
        ("megatron-infer serve --load nowhere", "nowhere"),
        ("curl http://localhost:5000/api", "no server is running"),
        ("python", "x"),
    ],
)
def test_a_wrong_command_fails(
    line: str, message: str, shelf: Path, tmp_path: Path, preloaded: Preloaded
) -> None:
    page = tmp_path / "page.md"
    typed = "\n>>> raise ValueError('x')" if line == "python" else ""
    page.write_text(f"Text\n\n```console\n$ true\n$ {line}{typed}\n```\n")
    if line == "python" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    seen = {"megatron-data", "megatron-train", "megatron-ckpt"}
    reader = Reader(page, shelf, seen, preloaded)
    assert reader.result(0) == ""
    wrong = reader.result(1)
    reader.close()
    assert wrong.startswith(f"{page}:5: $ {line}\n") and message in wrong
