"""Texts that assign layers to pipeline stages are parsed as by megatron-core."""

import pytest
from megatron_parallel import LayoutError
from megatron_parallel.pipeline import count_stages, parse_pipeline_layout

layer_layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
LayerType = pytest.importorskip("megatron.core.transformer.enums").LayerType


@pytest.mark.parametrize(
    ("text", "pp"),
    [
        ("Et*3|(tt|)*29,t|L", 16),
        ("Ett|t|(t|)*2,L", 5),
        ("E,t|(tt|)*2t*4|L", 5),
        ("E|(t|tt|)*3L", 4),
        ("E|(t*2|)*3L", 5),
        ("Ett|ttL", 2),
    ],
)
def test_stages_are_those_of_megatron_core(text, pp, monkeypatch):
    theirs = layer_layout.PipelineParallelLayerLayout(text, pp)
    # It considers model chunks only if its global state has several.
    monkeypatch.setattr(
        layer_layout.parallel_state,
        "get_virtual_pipeline_model_parallel_world_size",
        lambda: theirs.virtual_pipeline_model_parallel_size,
    )
    layers = theirs.flatten_layout.count(LayerType.decoder)
    theirs.validate_layer_layout(layers, None)
    ours = parse_pipeline_layout(text, layers, pp)
    assert count_stages(text) == len(ours) == pp * theirs.virtual_pipeline_model_parallel_size
    for stage, own in enumerate(ours):
        found = theirs.get_layer_id_list(vp_stage=stage // pp, pp_rank=stage % pp)
        assert found == list(own)


@pytest.mark.parametrize("text", ["Ett|t", "tE|tL", "Et|xL", "Et|EtL", "EtL|"])
def test_what_megatron_core_refuses_is_refused(text):
    def theirs():
        layer_layout.PipelineParallelLayerLayout(text, 2).validate_layer_layout(2, None)

    with pytest.raises(AssertionError):
        theirs()
    with pytest.raises(LayoutError):
        parse_pipeline_layout(text, 2, 2)
