"""The start of a run does not import unneeded modules, which would take seconds on every rank."""

import os
import subprocess
import sys

PROGRAM = """
import sys, time
import torch
needed = time.process_time()
from megatron_train.cli import main
status = main(sys.argv[1:])
heavy = ("torch._dynamo", "sympy", "torch.distributed.pipelining", "matplotlib", "tensorboard")
print([name for name in heavy if name in sys.modules], len(sys.modules))
print(needed, time.process_time())
sys.exit(status)
"""


MODULES = 2600
"""Maximum number of modules that a run on one rank imports; most of them are torch's."""

TIMES = 5
"""Maximum CPU seconds of such a run as a multiple of those of importing torch."""


def test_a_run_on_one_rank_imports_neither_the_compiler_nor_the_pipeline(corpus):
    flags = (
        "--data-path train_text_document --tokenizer-model tokenizer --num-layers 1 "
        "--hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
        "--train-iters 2 --lr 1e-3 --eval-iters 0"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "pretrain", "gpt", *flags.split()],
        cwd=corpus,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert done.returncode == 0, done.stderr
    *_, imported, seconds = done.stdout.splitlines()
    heavy, _, modules = imported.rpartition(" ")
    assert heavy == "[]" and int(modules) <= MODULES
    needed, used = map(float, seconds.split())
    assert used < TIMES * needed
