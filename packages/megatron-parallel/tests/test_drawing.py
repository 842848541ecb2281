"""Pictures of layouts."""

from megatron_parallel import ParallelLayout
from megatron_parallel.mesh import draw_layout

EIGHT = """\
8 ranks: tp 2 x cp 1 x dp 2 x pp 2, order tp-cp-ep-dp-pp

        dp 0   dp 1
      ┌──────┬──────┐
pp 0  │ 0 1  │ 2 3  │
pp 1  │ 4 5  │ 6 7  │
      └──────┴──────┘

tp                   4 x 2     [0 1] [2 3] [4 5] [6 7]
    tensor parallel: one layer cut over its ranks; also tp_cp
dp                   4 x 2     [0 2] [1 3] [4 6] [5 7]
    data parallel: replicas with different samples; also dp_cp
pp                   4 x 2     [0 4] [1 5] [2 6] [3 7]
    pipeline parallel: the stages of one replica; also embedding
tp_dp                2 x 4     [0 1 2 3] [4 5 6 7]
    one pipeline rank at one cp coordinate; also tp_dp_cp
model                2 x 4     [0 1 4 5] [2 3 6 7]
    one replica of the model
one rank each: cp"""


def test_eight_ranks() -> None:
    drawn = draw_layout(ParallelLayout(tp=2, pp=2).resolve(8))
    assert drawn == EIGHT
    assert [line.rstrip() for line in drawn.splitlines()] == drawn.splitlines()


def test_stages_and_experts_are_shown() -> None:
    drawn = draw_layout(ParallelLayout(tp=2, ep=4, etp=1, pp=2, vpp=2).resolve(8))
    assert "pp 1 (stages 1 3)" in drawn
    assert "experts etp 1 x ep 4" in drawn
    assert "ep                   2 x 4     [0 1 2 3] [4 5 6 7]" in drawn


def test_a_large_layout_fits_the_width_and_shows_how_much_is_left_out() -> None:
    layout = ParallelLayout(tp=8, pp=32).resolve(16384)
    for width in (70, 100, 160):
        drawn = draw_layout(layout, width)
        assert max(map(len, drawn.splitlines())) <= width
        assert "more" in drawn and "⋮" in drawn


WIDE = """\
12 ranks: tp 2 x cp 2 x dp 1 x pp 3, 5 chunks per pipeline rank, order tp-cp-ep-dp-pp

                          dp 0 cp 0   dp 0 cp 1
                        ┌───────────┬───────────┐
pp 0 (stages 0 3 … 12)  │    0  1   │    2  3   │
pp 1 (stages 1 4 … 13)  │    4  5   │    6  7   │
pp 2 (stages 2 5 … 14)  │    8  9   │   10 11   │
                        └───────────┴───────────┘
"""


def test_columns_are_data_and_context_parallel_ranks_and_many_stages_are_cut() -> None:
    drawn = draw_layout(ParallelLayout(tp=2, cp=2, pp=3, vpp=5).resolve(12))
    assert drawn.startswith(WIDE)
    four = draw_layout(ParallelLayout(pp=2, vpp=4).resolve(2))
    assert "pp 1 (stages 1 3 5 7)" in four
    assert draw_layout(ParallelLayout().resolve(1)).startswith("1 rank: tp 1 x")


def test_a_table_is_cut_only_if_it_does_not_fit() -> None:
    layout = ParallelLayout(tp=2).resolve(40)
    lines = draw_layout(layout, 1000).splitlines()
    width = len(lines[3])
    assert lines[3].count("┬") == 19
    assert draw_layout(layout, width).splitlines()[2:6] == lines[2:6]
    for narrow in (width - 1, width // 2, 40):
        lines = draw_layout(layout, narrow).splitlines()
        shown = lines[3].count("┬") + 1
        assert lines[4].endswith(f"│ … {20 - shown} more") and len(lines[4]) <= narrow
        assert lines[2].split() == [word for n in range(shown) for word in ("dp", str(n))]
        assert lines[4].count("│") == shown + 1


def test_sixteen_rows_are_shown_at_most() -> None:
    for pp, names in ((16, range(16)), (17, [*range(8), *range(9, 17)]), (40, None)):
        lines = draw_layout(ParallelLayout(pp=pp).resolve(pp)).splitlines()
        rows = [int(line.split()[1]) for line in lines if line.startswith("pp ") and "│" in line]
        assert rows == [*(names or [*range(8), *range(32, 40)])]
        assert sum("⋮" in line for line in lines) == (pp > 16)


def test_lists_of_groups_are_cut_only_if_they_do_not_fit() -> None:
    layout = ParallelLayout(tp=2, pp=2).resolve(8)
    line = "tp                   4 x 2     [0 1] [2 3] [4 5] [6 7]"
    assert line in draw_layout(layout, len(line)).splitlines()
    cut = "tp                   4 x 2     [0 1] [2 3] [4 5] …"
    assert cut in draw_layout(layout, len(line) - 1).splitlines()
    assert cut in draw_layout(layout, len(cut)).splitlines()
    assert cut[:-7] + "…" in draw_layout(layout, len(cut) - 1).splitlines()
    # A long group shows its first two ranks and its last.
    long = draw_layout(ParallelLayout(tp=64).resolve(64), 80)
    assert "│ 0 1 … 63 │" in long and "[0 1 … 63]" in long


def test_groups_of_experts_are_listed_with_expert_parallelism_only() -> None:
    assert "expert" not in draw_layout(ParallelLayout(tp=2).resolve(4))
    drawn = draw_layout(ParallelLayout(tp=2, ep=2, etp=1).resolve(4))
    assert "ep                   2 x 2     [0 1] [2 3]" in drawn
    assert "expert_dp            2 x 2     [0 2] [1 3]" in drawn
    assert drawn.endswith("one rank each: cp, pp, embedding, expert_tp")


def test_columns_leave_room_for_the_number_of_hidden_ones() -> None:
    """A margin of 6, columns of 8, a border and 12 characters for the number of those left out."""
    layout = ParallelLayout().resolve(99)
    for width, shown in ((35, 2), (34, 1), (27, 1), (8, 1)):
        lines = draw_layout(layout, width).splitlines()
        assert lines[4].count("│") == shown + 1 and lines[4].endswith(f"│ … {99 - shown} more")


def test_ranks_of_a_cell_or_group_take_half_the_width() -> None:
    layout = ParallelLayout(tp=8).resolve(8)
    for width, cell in ((30, "│  0 1 2 3 4 5 6 7  │"), (29, "│  0 1 … 7  │")):
        assert cell.replace("  ", " ") in draw_layout(layout, width).splitlines()[4]
    for width, group in ((61, "[0 1 2 3 4 5 6 7]"), (60, "[0 1 … 7]")):  # of 31 less
        assert draw_layout(layout, width).splitlines()[7].endswith(group)
