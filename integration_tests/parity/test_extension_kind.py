"""The encoder of another distribution (`stranger/`) equals transformers' BERT, both ways."""

import json

import pytest
import torch
from megatron_ckpt import CheckpointStore, ForeignModel, ModelRecord, export_hf
from megatron_models import Placement, config_of, find_kind, parameter_count, record_of
from megatron_parallel import Mesh, collect_shardings, parameter_views

pytest.importorskip("bidirectional", reason="pip install -e integration_tests/stranger")
transformers = pytest.importorskip("transformers")


@pytest.fixture
def bert(tmp_path):
    """Returns a BERT with large weights, and the folder that it is saved in."""
    torch.manual_seed(3)
    shape = {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 61}
    sizes = {"intermediate_size": 40, "max_position_embeddings": 16}
    model = transformers.BertModel(transformers.BertConfig(**shape, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"  # a name that megatron-models does not read
    content = json.loads(file.read_text()) | {"architectures": ["BidirectionalEncoder"]}
    file.write_text(json.dumps(content))
    return model, tmp_path / "theirs"


def loaded(folder):
    foreign = ForeignModel(folder)
    config = config_of(foreign.model)
    (model,) = find_kind(foreign.model.kind).build(config, Placement(Mesh.single()))
    foreign.load_tensors(parameter_views(model, collect_shardings(model), model.mesh))
    return model


def test_it_equals_bert_after_import_and_after_export(bert, tmp_path):
    reference, folder = bert
    model = loaded(folder)
    assert parameter_count(model.config) == sum(p.numel() for p in reference.parameters())
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    segments = (torch.arange(12) > 5).long().expand(3, -1)
    padding = torch.arange(12) >= torch.tensor([[12], [9], [5]])
    with torch.no_grad():
        theirs = reference(tokens, attention_mask=(~padding).long(), token_type_ids=segments)
        ours = model(tokens, segments=segments, padding=padding)
    kept = ~padding
    states = theirs.last_hidden_state[kept]
    torch.testing.assert_close(ours.transpose(0, 1)[kept], states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.pool(ours), theirs.pooler_output, rtol=1e-4, atol=1e-4)

    views = parameter_views(model, collect_shardings(model), model.mesh)
    record = ModelRecord(family="bert-encoder", **record_of(model.config))
    path = CheckpointStore(tmp_path / "run").save(1, dict(views), model=record)
    back = transformers.BertModel.from_pretrained(export_hf(path, tmp_path / "back"))
    for name, parameter in reference.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
