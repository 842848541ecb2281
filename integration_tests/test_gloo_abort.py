"""A collective of unequal sizes aborts a rank in Gloo's C++ code; the parent prints one line."""

import os
import sys

from megatron_train.launch.launch import launch

RANK = """
import os, sys
from datetime import timedelta
from megatron_train.cli.failure import failure_report
from megatron_train.launch.link import ParentLink

link = ParentLink(int(sys.argv[1]))
link.exit_with_parent()
try:
    import torch
    from megatron_parallel import Mesh, ParallelLayout, all_reduce

    mesh = Mesh.bind(ParallelLayout(tp=2), timeout=timedelta(seconds=10))
    gradient = torch.ones(16 if mesh.rank == 0 else 4_000_000)
    all_reduce(gradient, mesh.axis("tp"), purpose="unequal sizes")
except BaseException as error:
    report = failure_report(error)
    link.send(report)
    os._exit(report.status)
"""


def test_an_abort_inside_gloo_names_rank_axis_and_operation(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "rank.py").write_text(RANK)
    outcome = launch([sys.executable, os.fspath(tmp_path / "rank.py")], [], 2, grace=60)
    assert outcome.status == 134, outcome
    assert outcome.message.startswith("rank 0 was killed by SIGABRT (")
    assert "rank 1: " in outcome.message and "\n" not in outcome.message
    assert "all_reduce of unequal sizes [4000000] float32 on axis 'tp'" in outcome.message
