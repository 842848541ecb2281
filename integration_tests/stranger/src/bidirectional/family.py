"""The entry of BERT (Devlin et al., 2019) in the group ``megatron.families``."""

from megatron_models import Family
from megatron_models.families.settings import Constant, Mapped, Translated

_LAYER = "encoder.layer.{i}"
_HEADS = ["$num_attention_heads", "$head_size"]
_ROWS_OF_HEADS = ("reshape", {"shape": [*_HEADS, "$hidden_size"], "source": [-1, "$hidden_size"]})
_BIAS_OF_HEADS = ("reshape", {"shape": _HEADS, "source": [-1]})


def _same(ours: str, theirs: str) -> tuple:
    return tuple((f"{ours}.{part}", (f"{theirs}.{part}",), ()) for part in ("weight", "bias"))


def _projection(ours: str, theirs: str) -> tuple:
    ours, theirs = f"layers.{{i}}.attention.{ours}", f"{_LAYER}.attention.self.{theirs}"
    return (
        (f"{ours}.weight", (f"{theirs}.weight",), (_ROWS_OF_HEADS,)),
        (f"{ours}.bias", (f"{theirs}.bias",), (_BIAS_OF_HEADS,)),
    )


FAMILY = Family(
    name="bert-encoder",
    kind="bidirectional",
    title="BERT",
    architectures=("BidirectionalEncoder",),
    model_type="bert",
    rows=(
        (
            "embedding.word.weight",
            ("embeddings.word_embeddings.weight",),
            (("slice_rows", {"rows": "$vocab_size"}),),
        ),
        ("embedding.position.weight", ("embeddings.position_embeddings.weight",), ()),
        ("segments.weight", ("embeddings.token_type_embeddings.weight",), ()),
        *_same("embedding_norm", "embeddings.LayerNorm"),
        *_projection("q", "query"),
        *_projection("k", "key"),
        *_projection("v", "value"),
        *_same("layers.{i}.attention.out", f"{_LAYER}.attention.output.dense"),
        *_same("layers.{i}.attention_norm_sum", f"{_LAYER}.attention.output.LayerNorm"),
        *_same("layers.{i}.mlp.up", f"{_LAYER}.intermediate.dense"),
        *_same("layers.{i}.mlp.down", f"{_LAYER}.output.dense"),
        *_same("layers.{i}.mlp_norm_sum", f"{_LAYER}.output.LayerNorm"),
        *_same("pooler", "pooler.dense"),
    ),
    settings={
        "num_layers": Mapped("num_hidden_layers"),
        "hidden_size": Mapped("hidden_size"),
        "num_attention_heads": Mapped("num_attention_heads"),
        "ffn_hidden_size": Mapped("intermediate_size"),
        "vocab_size": Mapped("vocab_size"),
        "max_position_embeddings": Mapped("max_position_embeddings"),
        "position_embedding_type": Constant("learned_absolute"),
        "num_segments": Mapped("type_vocab_size", absent=2),
        "normalization": Constant("LayerNorm"),
        "norm_epsilon": Mapped("layer_norm_eps", absent=1e-12),
        "activation": Translated(
            "hidden_act",
            (("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")),
            absent="gelu",
        ),
        "add_bias_linear": Constant(True),
        "init_method_std": Mapped("initializer_range", absent=0.02),
    },
    neutral={"position_embedding_type": ("absolute",), "is_decoder": (False,)},
    without_effect=frozenset(
        {
            "attention_probs_dropout_prob",
            "hidden_dropout_prob",
            "classifier_dropout",
            "tie_word_embeddings",  # the model has no output layer
        }
    ),
    exported_constants={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
)
