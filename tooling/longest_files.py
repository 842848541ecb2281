"""The order in which two processes take files of tests: the longest first, so both end together.

By itself pytest-xdist begins with the files of the most tests, and leaves files of one or two long
tests to the end, when the other process may have none left.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

LONGEST = (
    "integration_tests/test_layouts.py",
    "integration_tests/test_compiled_layers.py",
    "integration_tests/test_docs_commands.py",
    "integration_tests/test_flags_have_effect.py",
    "integration_tests/test_device.py",
    "integration_tests/test_ranks_fail.py",
    "integration_tests/test_pretrain_on_ranks.py",
    "integration_tests/test_family_layouts.py",
    "integration_tests/test_expert_waits.py",
    "integration_tests/test_precision.py",
    "integration_tests/test_offload_on_ranks.py",
    "integration_tests/test_simulated_device.py",
    "integration_tests/test_pretrain_bert.py",
    "integration_tests/test_ctrl_c.py",
    "integration_tests/test_dry_run.py",
    "integration_tests/test_traffic.py",
    "integration_tests/test_saved_activations.py",
    "integration_tests/test_update_rules.py",
    "integration_tests/test_recurrent_runs.py",
    "integration_tests/test_gpt_stages.py",
    "integration_tests/test_encoder_decoder_stages.py",
    "integration_tests/test_pretrain.py",
    "integration_tests/test_agents.py",
    "integration_tests/test_averages.py",
    "integration_tests/test_gloo_abort.py",
    "packages/megatron-parallel/tests/test_pipeline.py",
    "packages/megatron-parallel/tests/test_collectives_failing.py",
    "packages/megatron-parallel/tests/test_pipeline_memory.py",
    "packages/megatron-parallel/tests/test_pool.py",
    "packages/megatron-parallel/tests/test_vocabulary_loss.py",
    "packages/megatron-parallel/tests/test_imagined_guard.py",
    "packages/megatron-parallel/tests/test_pipeline_failures.py",
    "packages/megatron-parallel/tests/test_collective_failure.py",
)
"""Files of a session that take about 8 s or more, in about the order of their times."""


class Test(Protocol):
    """A collected test."""

    @property
    def nodeid(self) -> str:
        """File and name."""


def longest_first(tests: Sequence[Test]) -> list[Test]:
    """Returns the tests by file: those of `LONGEST`, then the others from most to fewest tests."""
    numbers = {name: number for number, name in enumerate(LONGEST)}
    sizes = Counter(map(file_of, tests))

    def key(test: Test) -> tuple[int, int]:
        name = file_of(test)
        return numbers.get(name, len(LONGEST)), -sizes[name]

    return sorted(tests, key=key)


def file_of(test: Test) -> str:
    return test.nodeid.partition("::")[0]
