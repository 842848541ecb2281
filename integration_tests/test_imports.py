"""Starting a run does not import what it does not use: that is seconds on every rank."""

import subprocess
import sys

PROGRAM = """
import sys
from megatron_train.cli import main
status = main(sys.argv[1:])
heavy = ("torch._dynamo", "sympy", "torch.distributed.pipelining", "matplotlib", "tensorboard")
print([name for name in heavy if name in sys.modules])
sys.exit(status)
"""


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
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
