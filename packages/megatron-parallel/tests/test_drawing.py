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
