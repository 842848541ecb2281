"""Fuzzing of file readers: a damaged file is read or refused, in bounded time and memory.

    def test_damaged_manifests_are_refused(tmp_path, fuzz_count):
        def read(content: bytes) -> None:
            path.write_bytes(content)
            Manifest.read(path)

        fuzz(read, [manifest.read_bytes()], CheckpointError, count=fuzz_count, mutate=mutate_json)

`fuzz` derives each case from a real file of the same format, so that cases pass the first checks of
a reader. A case depends only on the seed files, the seed and its index. A failure names the index,
and the same call repeats it. All cases run in the process of the test, because a process for each
would cost more than the reader. The kernel limits memory (``RLIMIT_DATA``) and counts processor
time, so neither limit depends on the load of the machine.
"""

import contextlib
import copy
import faulthandler
import json
import random
import resource
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

Mutation = Callable[[random.Random, bytes], bytes]
"""Returns a damaged copy of a file's content."""

HANG_SECONDS = 300
"""Real seconds after which a case that does not return to Python ends the process."""
LONGEST_MESSAGE = 2_000
"""Characters that one line of error may have."""

_NUMBERS = (0, 1, 0x7F, 0xFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**12, -(10**9), 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "0", "-1", "x" * 100_000, "\0", "\ud800", "é",
    "../../../etc/passwd", "/etc/passwd", "a/../../b", "file:///etc/passwd", "a::b", "[" * 5_000,
    [], {}, [[]], [0], [-1, 2**40], [None], {"": {}}, ["a", "a"],
)  # fmt: skip
_SCRAPS = (
    b"\0", b"\n", b"\r\n", b"\t", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"{", b"}", b"]",
    b'"', b"'", b"\\", b":", b",", b"- ", b"#", b"&a ", b"*a", b"!!python/name:os.system ", b"<<: ",
    b"---\n", b"{{", b"{%", b"%}", b"[" * 5_000, b'{"a":' * 5_000, b"&a [*a, *a]", b"9" * 5_000,
    b"1e999", b"-1", b".inf", b"null", b"x" * 70_000,
)  # fmt: skip


class TookTooLong(BaseException):
    """A case used more processor time than allowed; ``except Exception`` must not catch it."""


@dataclass(frozen=True)
class Tally:
    """Results of the cases.

    Attributes:
        read: Number of cases that the reader accepted.
        refused: Number of refusals by the name of their error.
    """

    read: int
    refused: Counter[str]


def fuzz(
    read: Callable[[bytes], object],
    seeds: Sequence[bytes],
    refusals: type[BaseException] | tuple[type[BaseException], ...],
    *,
    count: int,
    mutate: Mutation | None = None,
    seed: int = 0,
    cpu_seconds: float = 10.0,
    megabytes: int = 512,
) -> Tally:
    """Passes damaged files to ``read``, which must accept or refuse them with a one-line message.

    Args:
        read: Reads a file with the given content, including everything that is read lazily.
        seeds: Contents of whole files. ``read`` must accept them.
        refusals: Errors that the reader may raise.
        count: Number of cases.
        mutate: Damages a file. Defaults to `mutate_bytes`.
        seed: Seed of the cases.
        cpu_seconds: Limit of processor time for one case.
        megabytes: Limit of memory that a case may allocate beyond that of the process.

    Returns:
        The number of accepted cases, and the number of refused cases for each error.

    Raises:
        AssertionError: Another error, too much time or memory, a message of several lines, a
            refused seed file, or no refused case at all, which would test nothing.
    """
    mutate = mutate or mutate_bytes
    for content in seeds:
        read(content)
    accepted, refused = 0, Counter[str]()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        case = mutate(rng, rng.choice(seeds))
        where = f"case {number} of seed {seed} ({len(case)} bytes, {case[:60]!r}...)"
        try:
            with bounded(cpu_seconds=cpu_seconds, megabytes=megabytes):
                read(case)
            accepted += 1
        except refusals as error:
            message = str(error)
            if not message.strip() or "\n" in message or len(message) > LONGEST_MESSAGE:
                raise AssertionError(f"{where}: no line of error but {message[:300]!r}") from error
            refused[type(error).__name__] += 1
        except BaseException as error:  # pyo3 panics are no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"{where}: {type(error).__name__}: {str(error)[:300]}") from error
    if not refused:
        raise AssertionError(f"of {count} cases none was refused: the mutations reach nothing")
    return Tally(accepted, refused)


@contextlib.contextmanager
def bounded(*, cpu_seconds: float, megabytes: int) -> Iterator[None]:
    """Limits processor time and memory within the context, on the main thread.

    Raises:
        TookTooLong: The processor time is spent.
        MemoryError: The interpreter or NumPy asked for more memory. torch raises RuntimeError.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"more than {cpu_seconds} s of processor time")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + megabytes * 2**20, hard))
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def mutate_bytes(rng: random.Random, content: bytes) -> bytes:
    """Flips bits, or overwrites numbers, cuts, repeats, inserts or truncates, one to four times."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        _damage(rng, data)
    return bytes(data)


def mutate_text(rng: random.Random, content: bytes) -> bytes:
    """Damages lines, inserts scraps of markup, or damages bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    lines = content.splitlines(keepends=True) or [b""]
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0 and len(lines) > 1:
            del lines[at]
        elif kind == 1:
            lines.insert(other, lines[at])
        elif kind == 2:
            lines[at], lines[other] = lines[other], lines[at]
        else:
            cut = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:cut] + rng.choice(_SCRAPS) + lines[at][cut:]
    return b"".join(lines)


def mutate_json(rng: random.Random, content: bytes) -> bytes:
    """Replaces, drops, renames or nests values of a JSON document, or damages its text."""
    if rng.random() < 0.2:
        return mutate_text(rng, content)
    document = json.loads(content)
    for _ in range(rng.randint(1, 3)):
        document = _replace_one(rng, document)
    text = json.dumps(document)
    if rng.random() < 0.05:
        text = "[" * 100_000 + text + "]" * 100_000
    return text.encode()


def _damage(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 64, 1024)))
    kind = rng.randrange(6)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        width = rng.choice((1, 2, 4, 8))
        value = rng.choice(_NUMBERS) % 2 ** (8 * width)
        data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
    elif kind == 2:
        del data[at:end]
    elif kind == 3:
        data[at:at] = data[at:end]
    elif kind == 4:
        data[at:at] = rng.choice(_SCRAPS)
    else:
        del data[at:]


def _replace_one(rng: random.Random, document: object) -> object:
    """Changes one value of a document at any depth; returns the document."""
    places = list(_places(document))
    if not places:
        return copy.deepcopy(rng.choice(_VALUES))
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[str(key) + rng.choice(("x", "\0", "/../x"))] = holder.pop(key)
    elif kind == 2 and isinstance(holder, list):
        holder.insert(0, copy.deepcopy(holder[key]))
    elif kind == 3:
        holder[key] = [holder[key]]
    elif kind == 4 and type(holder[key]) is int:
        holder[key] += rng.choice((-1, 1, 2**31, -(2**33), 10**12))
    elif kind == 5:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else None
    else:
        holder[key] = copy.deepcopy(rng.choice(_VALUES))  # later changes are made in it
    return document


def _keys(holder: "dict[str, object] | list[object]") -> Sequence[object]:
    return list(holder) if isinstance(holder, dict) else range(len(holder))


def _places(document: object) -> "Iterator[tuple[object, object]]":
    """Yields every (container, key) of a document, without recursion."""
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict | list):
            for key in _keys(holder):
                yield holder, key
                waiting.append(holder[key])


def _data_bytes() -> int:
    """Returns the size of this process's private writable memory, which RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmData")
