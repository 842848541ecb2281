"""Limits of GGUF headers, exactly, in files packed by hand from the format's description."""

import re
import struct

import pytest
from megatron_ckpt import CheckpointError
from megatron_ckpt.formats.gguf_header import check_header

# Types of docs/gguf.md: uint8, int8, uint16, int16, uint32, int32, float32, bool, uint64, ...
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


def text(content):
    return struct.pack("<Q", len(content)) + content


def values(kind, *numbers):
    """Returns a list value of a scalar type."""
    data = struct.pack(f"<{len(numbers)}{SCALARS[kind]}", *numbers)
    return 9, struct.pack("<IQ", kind, len(numbers)) + data


def tensor(name=b"w", shape=(2,)):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)


def header(*keys, tensors=(), counts=None):
    counts = counts or (len(tensors), len(keys))
    body = b"".join(text(b"key") + struct.pack("<I", kind) + data for kind, data in keys)
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + body + b"".join(tensors)


@pytest.fixture
def check(tmp_path):
    path = tmp_path / "model.gguf"

    def run(content, error=None):
        path.write_bytes(content)
        if error is None:
            check_header(path)
            return
        with pytest.raises(CheckpointError, match=re.escape(error)) as caught:
            check_header(path)
        assert str(caught.value).startswith(f"{path} is damaged or not a GGUF file: ")

    return run


@pytest.mark.parametrize("kind", SCALARS)
def test_a_header_ends_exactly_with_its_last_value(check, kind):
    number = struct.pack(f"<{SCALARS[kind]}", 1)
    for whole in (header((kind, number)), header(values(kind, 1, 0, 1)), header((8, text(b"ab")))):
        check(whole)
        check(whole[:-1], "ends within" if whole[24 + 11] != 9 else "but only")
    # What follows is found, so no value is longer or shorter than its type.
    check(header((kind, number), (8, text(b"x")), tensors=[tensor()]))
    check(header(values(kind, 1, 0, 1, 1), values(kind), tensors=[tensor()]))


def test_lists_have_at_most_two_million_elements_together(check):
    most = 1 << 21
    half = struct.pack("<IQ", 0, most // 2) + bytes(most // 2)
    check(header((9, half), (9, half)))
    check(header((9, half), values(0, 1), (9, half)), f"have more than {most} elements")


def test_names_dims_and_shapes_have_limits(check):
    longest = 1 << 16
    check(header(tensors=[tensor(b"n" * longest)]))
    check(header(tensors=[tensor(b"n" * (longest + 1))]), f"has {longest + 1} bytes; the limit is")
    check(header(tensors=[tensor(shape=(1, 1, 1, 1))]))
    check(header(tensors=[tensor(shape=(1,) * 5)]), "has 5 dims; the limit is 4")
    size = len(header(tensors=[tensor(shape=(1, 1))]))
    check(header(tensors=[tensor(shape=(8, size))]))
    check(header(tensors=[tensor(shape=(8, size + 1))]), f"more than {size} bytes can hold")
    check(header(tensors=[tensor(shape=(0, 8 * size + 8))]), "bytes can hold")
    check(header(tensors=[tensor(shape=(1, 8 * size))]))


def test_counts_fit_into_the_file(check):
    check(header(counts=(0, 1)), "it declares 1 metadata keys, but only 0 bytes follow")
    check(header(counts=(1, 0)) + bytes(23), "it declares 1 tensors, but only 23 bytes follow")
    check(header(counts=(1, 0)) + bytes(24))  # a tensor without name and dims
    check(header(counts=(0, 1)) + bytes(12), "it declares 1 metadata keys, but only 12")
    check(header(counts=(0, 1)) + bytes(13))  # an empty key with one byte


def test_lists_of_strings_are_walked_and_lists_of_lists_refused(check):
    strings = struct.pack("<IQ", 8, 2) + text(b"one") + text(b"")
    check(header((9, strings), tensors=[tensor()]))
    check(header((9, struct.pack("<IQ", 9, 1) + bytes(16))), "has type 9, which is not valid there")
    check(header((9, struct.pack("<IQ", 8, 9) + text(b"") * 9)))  # nothing but lengths
    short = header((9, struct.pack("<IQ", 8, 2) + bytes(15)))
    check(short, "it declares 2 elements of metadata key 0, but only 15 bytes follow")
    check(header((13, b"")), "has type 13, which is not valid there")
    check(header((9, struct.pack("<IQ", 8, 2) + text(b"one"))), "but only")


def test_the_other_byte_order_is_left_to_the_reader(check):
    check(b"GGUF" + struct.pack(">IQQ", 3, 1 << 40, 1 << 40))
    check(b"GGU", "it ends within the magic number")
    check(b"GGUF\3\0", "it ends within version")
