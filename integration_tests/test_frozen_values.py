"""Values of all packages are frozen; the dataclasses that change are listed."""

import dataclasses
import importlib
import pkgutil

PACKAGES = ("ckpt", "data", "infer", "kernels", "models", "optim", "parallel", "train")
OPTIONAL = ("megatron_kernels", "triton")
"""Parts of names of modules that may need libraries which are not installed."""

CHANGING = {
    "megatron_data.datasets.build_ict._BlockBuilder",
    "megatron_data.datasets.build_sentences.MapBuilder",
    "megatron_data.datasets.build_sentences._SentenceBuilder",
    "megatron_data.datasets.build_sft._CutConversations",
    "megatron_data.datasets.build_sft._PackedConversations",
    "megatron_data.datasets.build_sft._Rows",
    "megatron_data.datasets.build_sft._SFTBuilder",
    "megatron_data.datasets.builders.Builder",
    "megatron_data.datasets.builders.CompatBuilder",
    "megatron_data.datasets.builders.GPTBuilder",
    "megatron_data.datasets.builders.GreedyBuilder",
    "megatron_data.datasets.builders.PackedBuilder",
    "megatron_data.datasets.builders.StatelessBuilder",
    "megatron_data.preprocessing.assembly.Assembly",
    "megatron_data.preprocessing.origins.Origins",
    "megatron_data.tokenizers.generation_blocks.Blocks",
    "megatron_data.tokenizers.template_limits.Budget",
    "megatron_parallel.pipeline.stage._MicroBatch",
    "megatron_parallel.recompute.saved_activations.SavedActivations",
    "megatron_parallel.testing.pool._Worker",
    "megatron_parallel.testing.worker.Rank",
    "megatron_train.callbacks.log_line.IntervalSums",
    "megatron_train.megatron_lm.bash.assigned.Changes",
    "megatron_train.megatron_lm.translate.TranslatedFlags",
}
"""Dataclasses whose fields are assigned after they are made."""


def dataclasses_of_all_modules():
    """Yields each class by its full name, and whether it is frozen."""
    for short in PACKAGES:
        package = importlib.import_module(f"megatron_{short}")
        for found in pkgutil.walk_packages(package.__path__, f"megatron_{short}."):
            if found.name.endswith("__main__"):
                continue
            try:
                module = importlib.import_module(found.name)
            except ImportError:
                assert any(part in found.name for part in OPTIONAL), found.name
                continue
            for name, value in vars(module).items():
                own = isinstance(value, type) and value.__module__ == module.__name__
                if own and dataclasses.is_dataclass(value):
                    yield f"{module.__name__}.{name}", value.__dataclass_params__.frozen


def test_dataclasses_are_frozen_unless_they_are_listed():
    found = dict(dataclasses_of_all_modules())
    assert len(found) > 300
    assert {name for name, frozen in found.items() if not frozen} == CHANGING
