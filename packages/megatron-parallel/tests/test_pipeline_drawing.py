"""Pictures of simulated steps: where boxes and words are, and what does not fit."""

import xml.etree.ElementTree as ET

import pytest
from megatron_parallel import LayoutError
from megatron_parallel.pipeline import (
    PassDurations,
    Picture,
    Timeline,
    draw_picture,
    draw_schedule,
    simulate,
)
from megatron_parallel.pipeline.drawing import Box, Text

WIDTH = 1300
STEP = simulate("1f1b", 2, 3)


def rows(picture: Picture) -> list[list[Box]]:
    """Returns the boxes of each rank, its background first; the legend has smaller ones."""
    height = picture.boxes[0].height
    of_ranks = [box for box in picture.boxes if box.height == height]
    return [[b for b in of_ranks if b.y == y] for y in sorted({b.y for b in of_ranks})]


def legend(picture: Picture) -> list[Box]:
    return [box for box in picture.boxes if box.height != picture.boxes[0].height]


def texts(picture: Picture, *wanted: str) -> list[Text]:
    return [next(t for t in picture.texts if t.text == text) for text in wanted]


def test_boxes_are_as_long_as_passes_take_and_begin_when_they_do() -> None:
    drawn = draw_picture(STEP, WIDTH)
    assert STEP.end == 12
    for events, (ground, *boxes) in zip(STEP.ranks, rows(drawn), strict=True):
        unit = ground.width / 12
        assert unit > 90 and 50 < ground.x < WIDTH - ground.width < WIDTH
        for event, box in zip(events, boxes, strict=True):
            assert box.x == pytest.approx(ground.x + unit * float(event.start))
            assert box.width == pytest.approx(unit * float(event.end - event.start) - 1)
    assert len({(row[0].x, row[0].width) for row in rows(drawn)}) == 1


def test_words_are_beside_or_in_the_middle_of_what_they_name() -> None:
    drawn = draw_picture(STEP, WIDTH)
    first, second = rows(drawn)
    top, height, left = first[0].y, first[0].height, first[0].x
    assert height < second[0].y - top < 2 * height
    for rank, row in enumerate((first, second)):
        (name,) = texts(drawn, f"rank {rank}")
        assert 0 < name.x < left - 40 and name.y == row[0].y + height / 2
        numbers = [t for t in drawn.texts if t.y == row[0].y + height / 2 and t is not name]
        assert [t.text for t in numbers] == [str(e.action.micro_batch) for e in STEP.ranks[rank]]
        for number, box in zip(numbers, row[1:], strict=True):
            assert number.anchor == "middle"
            assert number.x == pytest.approx(box.x + (box.width + 1) / 2)
    title, summary = drawn.texts[:2]
    assert title.text == "1f1b: 2 ranks, 3 micro-batches"
    assert summary.text == "bubble 25.0%; in-flight micro-batches at most, by rank: 2, 1"
    assert 0 < title.y - title.size / 2 < title.y + title.size / 2 < summary.y - summary.size / 2
    assert summary.y + summary.size / 2 < top and summary.x == title.x > 0
    begin, end = texts(drawn, "0", "time 12")[0], texts(drawn, "time 12")[0]
    begin = next(t for t in drawn.texts if t.text == "0" and t.y == end.y)
    assert (begin.x, begin.anchor) == (left, "start")
    assert (end.x, end.anchor) == (left + first[0].width, "end")
    bottom = second[0].y + height
    assert bottom < end.y - end.size / 2 and end.size >= 10
    for entry in legend(drawn):
        assert end.y + end.size / 2 < entry.y and entry.y + entry.height < drawn.height
    assert drawn.width == WIDTH and 100 < drawn.height < bottom + 60
    assert draw_picture(STEP).width == 1000


@pytest.mark.parametrize(
    ("timeline", "names"),
    [
        (STEP, ["forward", "backward"]),
        (simulate("zb-v", 2, 4, 2), ["forward", "backward, input", "backward, weights"]),
        (
            simulate("dualpipe-v", 2, 4, 2),
            ["forward", "backward", "backward, input", "backward, weights"],
        ),
        (simulate("interleaved-1f1b", 2, 4, 3), ["forward", "backward"]),
    ],
    ids=["1f1b", "zb-v", "dualpipe-v", "interleaved"],
)
def test_the_legend_names_each_kind_of_pass_beside_its_shades(
    timeline: Timeline, names: list[str]
) -> None:
    drawn = draw_picture(timeline, WIDTH)
    entries, words = legend(drawn), texts(drawn, *names)
    assert len(entries) == len(names) * timeline.vpp
    used = {box.fill for row in rows(drawn) for box in row[1:]}
    assert {box.fill for box in entries} == used
    at = rows(drawn)[0][0].x
    for number, word in enumerate(words):
        own = entries[number * timeline.vpp : (number + 1) * timeline.vpp]
        for box in own:
            assert at <= box.x and box.y + box.height / 2 == word.y
            at = box.x + box.width + 1
        assert at <= word.x < at + 10
        at = word.x + 5 * len(word.text)
        shades = [sum(bytes.fromhex(box.fill[1:])) for box in own]
        assert shades == sorted(shades, reverse=True) and len(set(shades)) == len(shades)
        assert own[0].x < word.x
    assert drawn.texts[0].text.count(f" of {timeline.vpp} chunks") == (timeline.vpp > 1)
    notes = [t for t in drawn.texts if t.text.startswith("(light to dark")]
    assert len(notes) == (timeline.vpp > 1)
    for note in notes:
        assert note.text == f"(light to dark: chunks 1 to {timeline.vpp} of a rank)"
        assert note.y == words[-1].y and note.x > at


def test_passes_have_the_shade_of_their_chunk() -> None:
    timeline = simulate("interleaved-1f1b", 2, 2, 3)
    drawn = draw_picture(timeline)
    shades = [box.fill for box in legend(drawn)]
    for events, (_, *boxes) in zip(timeline.ranks, rows(drawn), strict=True):
        for event, box in zip(events, boxes, strict=True):
            chunk = event.action.stage // 2
            assert box.fill == shades[chunk + 3 * (event.action.kind == "B")]
    # Forward passes go from (158, 197, 244) three quarters of the way to (47, 111, 194).
    mixed = [(158, 197, 244), (116.375, 164.75, 225.25), (74.75, 132.5, 206.5)]
    for fill, colour in zip(shades, mixed, strict=False):
        assert list(bytes.fromhex(fill[1:])) == pytest.approx(colour, abs=0.5)
    alone = bytes.fromhex(legend(draw_picture(STEP))[0].fill[1:])
    assert list(alone) == pytest.approx((130.25, 175.5, 231.5), abs=0.5)  # a quarter of the way


def test_short_passes_are_thin_boxes_without_a_number() -> None:
    timeline = simulate("1f1b", 2, 40)
    for width, labelled in ((180, False), (4000, True)):
        drawn = draw_picture(timeline, width)
        (ground, *boxes), _ = rows(drawn)
        assert min(box.width for box in boxes) == pytest.approx(
            max(0.5, ground.width / float(timeline.end) - 1)
        )
        numbers = [t for t in drawn.texts if t.anchor == "middle"]
        assert len(numbers) == (160 if labelled else 0)
    # Two digits need more room than one.
    between = draw_picture(timeline, 78 + 15 * int(timeline.end))
    assert {len(t.text) for t in between.texts if t.anchor == "middle"} == {1, 2}
    drawn = draw_picture(timeline, 78 + 12 * int(timeline.end))
    forward = [b for b in rows(drawn)[0][1:] if b.width < 12]
    at = {t.x for t in drawn.texts if t.anchor == "middle"}
    assert [b.x + (b.width + 1) / 2 in at for b in forward] == [n < 10 for n in range(40)]


def test_svg_has_the_boxes_and_words_of_the_picture() -> None:
    boxes = [Box(1.25, 2, 3.5, 4, "#abcdef"), Box(0, 0, 0.5, 1, "#000000")]
    words = [Text(5, 6.126, "a<b & c", 11, "end"), Text(0, 1, "first", 12.5)]
    text = Picture(120, 80.5, boxes, words).svg()
    assert text.endswith("</svg>\n")
    root = ET.fromstring(text)
    assert root.attrib["viewBox"] == "0 0 120 80.5"
    assert (root.attrib["width"], root.attrib["height"]) == ("120", "80.5")
    tag = "{http://www.w3.org/2000/svg}"
    ground, *found = (element.attrib for element in root.iter(f"{tag}rect"))
    assert ground == {"width": "100%", "height": "100%", "fill": "#ffffff"}
    assert [
        (float(e["x"]), float(e["y"]), float(e["width"]), float(e["height"]), e["fill"])
        for e in found
    ] == [tuple(box) for box in boxes]
    (first, second) = root.iter(f"{tag}text")
    assert first.text == "a<b & c" and second.text == "first"
    named = ("x", "y", "font-size", "text-anchor", "dominant-baseline")
    assert [first.attrib[n] for n in named] == ["5.00", "6.13", "11", "end", "central"]
    assert [second.attrib[n] for n in named] == ["0.00", "1.00", "12.5", "start", "central"]


def test_numbers_and_ranks_of_two_digits_are_aligned() -> None:
    ten, eleven = (draw_schedule("gpipe", 2, count).splitlines() for count in (10, 11))
    assert ten[0].startswith("rank 0 | F0 F1 F2 ") and ten[1].startswith("rank 1 |  . F0 F1 ")
    assert eleven[0].startswith("rank 0 | F0  F1  F2 ")
    assert " F10 " in eleven[0] and eleven[1].startswith("rank 1 |   . F0 ")
    chunks = draw_schedule("interleaved-1f1b", 2, 2, 2).splitlines()
    assert chunks[0].startswith("rank 0 | F0a F1a F0b F1b")
    assert draw_schedule("gpipe", 10, 1).startswith("rank 0 | F0")
    wide = draw_schedule("gpipe", 11, 1).splitlines()
    assert wide[0].startswith("rank 0  | F0") and wide[10].startswith("rank 10 |  . ")
    assert len({line.index("|") for line in wide[:11]}) == 1


def test_pictures_in_text_are_4000_units_wide_at_most() -> None:
    line = draw_schedule("gpipe", 1, 1, times=PassDurations(1, 3999)).splitlines()[0]
    assert len(line) == len("rank 0 |" + " |") + 3 * 4000
    with pytest.raises(LayoutError, match="4001 units of 1 exceed the 4000 of a picture"):
        draw_schedule("gpipe", 1, 1, times=PassDurations(1, 4000))


def test_time_that_ranks_send_is_drawn_as_idle_time() -> None:
    text = draw_schedule("gpipe", 2, 1, times=PassDurations(1, 2, send=0.5))
    assert text.splitlines() == [
        "rank 0 | F0   " + "  ." * 8 + " B0--------- |",
        "rank 1 |" + "  ." * 3 + " F0    B0---------" + "  ." * 5 + " |",
        "bubble 57.1%; in-flight micro-batches at most, by rank: 1, 1",
    ]


def test_the_unit_is_the_largest_that_divides_all_durations() -> None:
    text = draw_schedule("gpipe", 1, 1, times=PassDurations(1.5, 4.5))
    assert text.startswith("rank 0 | F0 B0------ |\n")
