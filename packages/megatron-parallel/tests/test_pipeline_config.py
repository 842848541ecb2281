"""Megatron's layout strings for uneven stages, and pipeline settings that exclude one another."""

from dataclasses import fields

import pytest
from megatron_parallel import LayoutError, ParallelLayout
from megatron_parallel.pipeline import SCHEDULES, PipelineConfig, parse_pipeline_layout

PP2 = ParallelLayout(pp=2)
VPP2 = ParallelLayout(pp=2, vpp=2)


def sizes(split: tuple[range, ...]) -> list[int]:
    return [len(layers) for layers in split]


@pytest.mark.parametrize(
    ("text", "layers", "pp", "wanted"),
    [
        ("Ett|tL", 3, 2, [2, 1]),
        ("Et*3|(tt|)*29,t|L", 62, 16, [3, *[2] * 29, 1, 0]),
        ("E|t*2|(t|)*3,L", 5, 3, [0, 2, 1, 1, 1, 0]),
        ("E|(t|t|)*2L", 4, 3, [0, 1, 1, 1, 1, 0]),
    ],
)
def test_a_layout_string_gives_the_layers_of_every_stage(
    text: str, layers: int, pp: int, wanted: list[int]
) -> None:
    split = parse_pipeline_layout(text, layers, pp)
    assert sizes(split) == wanted
    assert [i for stage in split for i in stage] == list(range(layers))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|t", "'Ett|t': L (loss) must occur once, at the outer end of the last stage"),
        ("|EttL", "'|EttL': E (embedding) must occur once, at the outer end of the first stage"),
        ("Et|ELtt", "E (embedding) must occur once"),
        ("Et|tL", "has 2 layers ('t'), but the model has 3"),
        ("Et|t|tL", "has 3 stages, which is not a multiple of pp=2"),
        ("Ett|tmL", "has 1 layers of multi-token prediction ('m'), but the model has 0"),
        ("Ett|dL", "has 'd': use E, t, m and L"),
        ("Ett|(tL", "has '('"),
    ],
)
def test_an_invalid_layout_string_is_refused_with_its_numbers(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        parse_pipeline_layout(text, 3, 2)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_layers_of_multi_token_prediction_stand_before_the_output_layer() -> None:
    assert sizes(parse_pipeline_layout("Ett|tm*2L", 3, 2, 2)) == [2, 1]
    assert sizes(parse_pipeline_layout("Ettt|mL", 3, 2, 1)) == [3, 0]
    for text, message in (
        ("Ett|tL", "has 0 layers of multi-token prediction ('m'), but the model has 1"),
        ("Ettm|tL", "m (multi-token prediction) must stand just before L"),
        ("Ett|mtL", "m (multi-token prediction) must stand just before L"),
    ):
        with pytest.raises(LayoutError) as refused:
            parse_pipeline_layout(text, 3, 2, 1)
        assert message in str(refused.value)


def test_layers_that_do_not_divide_are_refused_or_laid_out_unevenly_but_never_dropped() -> None:
    """Megatron-Core has silently built a model with fewer layers than asked for."""
    with pytest.raises(LayoutError, match="5 layers cannot be split evenly over 2 stages"):
        PipelineConfig().stage_layers(5, PP2)
    for settings, wanted in (
        ({"first": 2}, [2, 3]),
        ({"last": 1}, [4, 1]),
        ({"count_embedding": True}, [2, 3]),
        ({"count_loss": True}, [3, 2]),
        ({"stages": "Ettt|ttL"}, [3, 2]),
    ):
        split = PipelineConfig(**settings).stage_layers(5, PP2)
        assert sizes(split) == wanted
        assert [i for stage in split for i in stage] == list(range(5))
    for layers in range(1, 40):
        for layout in (PP2, VPP2, ParallelLayout(pp=4), ParallelLayout(pp=4, vpp=3)):
            for config in (PipelineConfig(), PipelineConfig(count_embedding=True, count_loss=True)):
                try:
                    split = config.stage_layers(layers, layout)
                except LayoutError:
                    continue
                assert [i for stage in split for i in stage] == list(range(layers))
                assert len(split) == layout.pp * layout.vpp


def test_a_schedule_selects_its_stage_mapping() -> None:
    assert PipelineConfig(schedule="zb-v").resolve_layout(VPP2).stage_mapping == "v"
    assert PipelineConfig(schedule="zero-bubble").resolve_layout(VPP2) == VPP2
    assert PipelineConfig().resolve_layout(VPP2) == VPP2
    assert PipelineConfig().resolve_schedule(VPP2) == "interleaved-1f1b"
    overlapping = PipelineConfig(overlap_experts=True)
    for layout in (ParallelLayout(), PP2, VPP2):
        assert overlapping.resolve_schedule(overlapping.resolve_layout(layout)) == "combined-1f1b"
    v = PipelineConfig(schedule="zb-v", stages="Et|tt|t|L")
    assert sizes(v.stage_layers(4, v.resolve_layout(VPP2))) == [1, 2, 1, 0]


@pytest.mark.parametrize(
    ("settings", "layout", "message"),
    [
        ({"schedule": "zb-v"}, PP2, "'zb-v' does not support vpp=1: it needs exactly 2 chunks"),
        ({"schedule": "gpipe"}, ParallelLayout(), "schedule=gpipe needs a pipeline of at least 2"),
        ({"first": 2}, ParallelLayout(), "first=2 needs a pipeline"),
        ({"schedule": "zb-v", "first": 2}, VPP2, "first and last have no effect: use stages"),
        (
            {"schedule": "gpipe", "overlap_experts": True},
            PP2,
            "excludes schedule=gpipe: leave",
        ),
        ({"schedule": "combined-1f1b"}, PP2, "needs more than a name: use overlap_experts instead"),
        ({"stages": "Et|t|t|tL"}, PP2, "has 4 stages, but 2 ranks x 1 chunks = 2 stages"),
    ],
)
def test_contradicting_pipeline_settings_are_refused(
    settings: dict[str, object], layout: ParallelLayout, message: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        config = PipelineConfig(**settings)  # type: ignore[arg-type]
        config.stage_layers(4, config.resolve_layout(layout))
    assert message in str(refused.value)


def test_schedules_are_chosen_by_name_but_for_the_one_that_a_setting_of_its_own_selects() -> None:
    (field,) = (each for each in fields(PipelineConfig) if each.name == "schedule")
    assert field.metadata["choices"] == tuple(n for n in SCHEDULES if not n.startswith("combined"))


def test_a_layout_string_excludes_other_sizes() -> None:
    with pytest.raises(LayoutError, match=r"stages=Et\|tL sets .* leave out first, last"):
        PipelineConfig(stages="Et|tL", count_loss=True)
