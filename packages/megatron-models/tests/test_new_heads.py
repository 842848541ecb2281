"""Which parameters a model with another head cannot take from a checkpoint."""

from dataclasses import replace

from megatron_models import BertConfig, head_fields, new_head_parameters

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
PRETRAINED = BertConfig(**SIZES, max_position_embeddings=8)
OUT = ["sequence_head.out.bias", "sequence_head.out.weight"]
POOLER = ["sequence_head.pooler.bias", "sequence_head.pooler.weight"]


def test_equal_models_share_all_parameters():
    assert new_head_parameters(PRETRAINED, PRETRAINED) == []


def test_a_head_of_two_classes_is_not_the_binary_head_but_has_its_pooler():
    tuned = replace(PRETRAINED, task_head="classification", num_labels=2)
    assert new_head_parameters(tuned, PRETRAINED) == OUT
    shapes = [config.parameters()[OUT[1]].sharding.shape for config in (tuned, PRETRAINED)]
    assert shapes[0] == shapes[1]  # which does not make them the same
    assert new_head_parameters(replace(tuned, num_labels=3), tuned) == OUT


def test_a_model_without_a_pooler_has_none_to_take():
    bare = replace(PRETRAINED, bert_binary_head=False, masked_lm_head=False)
    assert new_head_parameters(replace(bare, task_head="classification"), bare) == OUT + POOLER
    assert {name.split(".")[0] for name in new_head_parameters(PRETRAINED, bare)} == {
        "lm_head",
        "sequence_head",
    }


def test_fields_of_heads_do_not_change_the_trunk():
    changes = {"task_head": "regression", "bert_binary_head": False, "masked_lm_head": False}
    assert {*changes, "bert_pooler"} < {*head_fields(BertConfig)}
    trunks = [
        config.trunk().parameters().keys()
        for config in (PRETRAINED, replace(PRETRAINED, **changes))
    ]
    assert trunks[0] == trunks[1]
