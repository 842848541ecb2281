"""A launch script of Megatron-LM becomes a run that trains."""

import re

import torch
from megatron_train.cli import main

SCRIPT = """
SAVE=${1:-run}
MODEL=(--use-mcore-models --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --swiglu
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 8
    --seq-length 16 --max-position-embeddings 16 --position-embedding-type rope
    --rotary-base 1000000 --normalization RMSNorm --attention-backend fused
    --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
    --hidden-dropout 0.0 --attention-dropout 0.0 --init-method-std 0.0134)
TRAIN=(--micro-batch-size 1 --global-batch-size 2 --train-samples 10 --lr-decay-samples 10
    --lr 1e-3 --decoupled-lr 5e-4 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion)
if [ -z "$3" ]; then
    DATA=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 50" "--split '99,1,0'"
        "--data-cache-path ${SAVE}/cache" "--tiktoken-pattern v2" "--num-workers 1")
fi
torchrun --nproc_per_node 1 pretrain_gpt.py ${MODEL[@]} ${TRAIN[@]} ${DATA[@]} \\
    --sequence-parallel --fp8-format hybrid --fp8-param-gather --eval-iters 1 --log-interval 1 \\
    --save $SAVE --load $SAVE --overlap-grad-reduce --use-distributed-optimizer \\
    --overlap-param-gather --ckpt-format torch_dist --profile --manual-gc
"""


def test_a_script_becomes_a_run_that_trains(tmp_path, capsys, monkeypatch, plain_runs):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPT)
    dropped = ["--drop", "fp8-param-gather"]
    assert main(["config", "from-megatron", "train.sh", *dropped, "--output", "run.yaml"]) == 0
    assert "dropped       1  --fp8-param-gather" in capsys.readouterr().out
    assert main(["pretrain", "gpt", "--config", "run.yaml", "--no-progress"]) == 0
    printed = capsys.readouterr()
    losses = [float(loss) for loss in re.findall(r"\| lm loss: (\S+)", printed.out)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "validation loss at iteration 5" in printed.out
    assert "--sequence-parallel has no effect" in printed.err
    torch.set_num_threads(threads)
