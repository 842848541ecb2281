"""Wrong configurations of encoders and encoder-decoders."""

from collections.abc import Mapping
from typing import Any

from refusals.cases.case import ROPE, Case

_RELATIVE: Mapping[str, Any] = {"position_embedding_type": "relative"}

_POSITIONS = "position_embedding_type 'relative'"

ENCODER_DECODERS = {
    "positions of another kind": Case(
        _RELATIVE,
        f"a model of kind 'gpt' does not support {_POSITIONS}; use 'learned_absolute'",
        {"position_embedding_type": "learned_absolute"},
    ),
    "axes of an encoder-decoder": Case(
        {"position_embedding_type": "mrope", "mrope_section": (1, 1, 1)},
        "a model of kind 't5' does not support position_embedding_type 'mrope'; use 'rope'",
        {"position_embedding_type": "rope", "mrope_section": ()},
        kind="t5",
    ),
    "buckets without biases": Case(
        {"relative_attention_num_buckets": 16},
        "relative_attention_num_buckets 16 has no effect with position_embedding_type|leave it out",
        {"relative_attention_num_buckets": None},
        kind="t5",
    ),
    "few buckets": Case(
        {**_RELATIVE, "relative_attention_num_buckets": 3},
        "relative_attention_num_buckets 3 leaves no bucket|use relative_attention_num_buckets 4",
        {"relative_attention_num_buckets": 4},
        kind="t5",
    ),
    "a short maximum": Case(
        {**_RELATIVE, "relative_attention_max_distance": 16},
        "relative_attention_max_distance 16 must be more than half of "
        "relative_attention_num_buckets 32; use relative_attention_max_distance 17 or more",
        {"relative_attention_max_distance": 17},
        kind="t5",
    ),
    "an output of two embeddings": Case(
        {"separate_decoder_embedding": True},
        "separate_decoder_embedding leaves open|set untie_embeddings_and_output_weights too",
        {"untie_embeddings_and_output_weights": True},
        kind="t5",
    ),
    "sinks": Case(
        {"softmax_type": "learnable"},
        "an encoder-decoder has no attention sinks: softmax_type learnable",
        {"softmax_type": "vanilla"},
        kind="t5",
    ),
    "norms of queries": Case(
        {"qk_layernorm": True},
        "an encoder-decoder does not support qk_layernorm; leave it out",
        {"qk_layernorm": None},
        kind="t5",
    ),
    "linear biases": Case(
        {"position_embedding_type": "alibi"},
        "an encoder-decoder does not support position_embedding_type alibi; leave it out",
        {"position_embedding_type": None},
        kind="t5",
    ),
    "windows": Case(
        {"sliding_window": 4},
        "an encoder-decoder has no windows: sliding_window 4",
        {"sliding_window": 0},
        kind="t5",
    ),
    "context parallelism": Case(
        {},
        "cp 2 cannot cut the sequences of an encoder-decoder|use cp 1",
        layout={"cp": 2},
        fixed_layout={"cp": 1},
        kind="t5",
    ),
}

HEADS: Mapping[str, Case] = {
    "a width that a head does not have": Case(
        {"task_head": "reward", "num_labels": 3},
        "num_labels 3 does not fit task_head reward, whose width is 1|use task_head "
        "'classification'",
        {"task_head": "classification"},
    ),
    "a pooling that no head reads": Case(
        {"head_pooling": "mean"},
        "head_pooling mean has no effect without task_head; leave it out",
        {"head_pooling": None},
    ),
    "a norm of another head": Case(
        {"task_head": "regression", "normalize_embedding": False},
        "normalize_embedding has an effect only with task_head 'embedding', not 'regression'; "
        "leave it out",
        {"normalize_embedding": None},
    ),
    "later tokens of a head": Case(
        {"task_head": "classification", "mtp_num_layers": 1},
        "mtp_num_layers 1 needs logits of tokens, which a model with task_head classification does "
        "not have; leave mtp_num_layers out",
        {"mtp_num_layers": None},
    ),
}

ENCODERS: Mapping[str, Case] = {
    "an offset of other positions": Case(
        {**ROPE, "position_offset": 2},
        "position_offset 2 needs position_embedding_type 'learned_absolute', not 'rope'",
        {"position_embedding_type": "learned_absolute"},
        kind="bert",
    ),
    "an offset after all positions": Case(
        {"position_offset": 16},
        "position_offset 16 leaves no position of max_position_embeddings 16; use position_offset "
        "15 or less",
        {"position_offset": 15},
        kind="bert",
    ),
    "two poolers": Case(
        {"bert_pooler": True},
        "bert_pooler has no effect with a binary head, which has a pooler; leave it out",
        {"bert_pooler": None},
        kind="bert",
    ),
}
