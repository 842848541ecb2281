"""The entry of sequence classification in the entry-point group ``megatron.tasks``."""

from megatron_parallel.extensions import Section

from megatron_train.tasks.classification_settings import (
    SECTION,
    ClassificationSettings,
    check_classification,
    with_classification_defaults,
)
from megatron_train.tasks.kinds import TaskKind

TASK = TaskKind(
    name="classification",
    summary="predict the label of one or two texts",
    task="megatron_train.tasks.classification:classification_task",
    data="megatron_train.tasks.classification_data:ClassificationData",
    proof_data="megatron_train.prove.samples:BidirectionalProof",
    model_kinds=("bert", "gpt", "mamba", "hybrid"),
    sections=(Section(SECTION, ClassificationSettings, "labelled texts"),),
    checks=(check_classification,),
    derive=with_classification_defaults,
)
