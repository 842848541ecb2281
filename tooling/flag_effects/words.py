"""Flags of the small run to which others are added, and contexts that some flags need."""

from flags_on_ranks import Words

BASE: Words = {
    "--num-layers": "2",
    "--hidden-size": "16",
    "--num-attention-heads": "2",
    "--seq-length": "16",
    "--micro-batch-size": "2",
    "--global-batch-size": "4",
    "--train-iters": "4",
    "--data-path": "text",
    "--tokenizer-model": "bytes",
    "--split": "6,3,1",
    "--eval-iters": "1",
    "--log-interval": "2",
    "--lr": "1e-2",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
    "--device": "cpu",
    "--save": "out",
}
ROPE: Words = {"--position-embedding-type": "rope"}
LINEAR = {"--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": "2"}
LATENT = ROPE | {
    "--multi-latent-attention": "",
    "--normalization": "RMSNorm",
    "--kv-lora-rank": "8",
    "--qk-head-dim": "8",
    "--qk-pos-emb-head-dim": "4",
    "--v-head-dim": "8",
}
SPARSE = LATENT | {
    "--experimental-attention-variant": "dsa",
    "--dsa-indexer-n-heads": "2",
    "--dsa-indexer-head-dim": "8",
    "--dsa-indexer-topk": "2",
}
TEMPERATURE: Words = {**ROPE, "--no-rope-freq": "2", "--attn-temperature-scale": "5"}
EXPERTS: Words = {"--num-experts": "4"}
PRE_SOFTMAX: Words = {**EXPERTS, "--moe-router-pre-softmax": ""}
GROUPS: Words = {"--moe-router-num-groups": "2", "--moe-router-group-topk": "1"}
SIGMOID: Words = {**EXPERTS, "--moe-router-score-function": "sigmoid"}
LLAMA3: Words = {**ROPE, "--rope-scaling-type": "llama3", "--rope-scaling-original-length": "8"}
YARN: Words = {**ROPE, "--rope-scaling-type": "yarn", "--rope-scaling-original-length": "64"}
LONGROPE: Words = {
    **ROPE,
    "--rope-scaling-type": "longrope",
    "--rope-scaling-short-factors": "1,2,3,4",
    "--rope-scaling-long-factors": "5,6,7,8",
}
CLIPPED: Words = {"--qk-clip": "", "--qk-clip-threshold": "1e-6"}
WSD: Words = {"--lr-decay-style": "WSD", "--lr-wsd-decay-iters": "2"}
GROWING: Words = {
    "--start-weight-decay": "0",
    "--end-weight-decay": "5",
    "--weight-decay-incr-style": "linear",
}
ADAFACTOR: Words = {"--optimizer": "adafactor"}
MUON: Words = {"--optimizer": "muon"}
MUP: Words = {"--use-mup": ""}
AWARE: Words = {"--use-precision-aware-optimizer": ""}
SCALED: Words = {"--fp16": ""}
LORA: Words = {"--linear-product": "lora"}
SAMPLES: Words = {"--train-iters": None, "--train-samples": "16"}
BY_SPLIT: Words = {
    "--data-path": None,
    "--split": None,
    "--train-data-path": "text",
    "--valid-data-path": "text",
}
GPT2: Words = {"--tokenizer-model": None, "--vocab-file": "vocab", "--merge-file": "merges"}
BERT: Words = {
    "--tokenizer-model": None,
    "--tokenizer-type": "BertWordPieceCase",
    "--vocab-file": "words",
}
TIKTOKEN: Words = {"--tokenizer-model": "ranks", "--tokenizer-type": "TikTokenizer"}
SHARDED: Words = {"--use-distributed-optimizer": ""}
SELECTIVE: Words = {"--recompute-granularity": "selective"}
FULL: Words = {
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": "1",
}
TALKS: Words = {"--data-path": "talks", "--reset-position-ids": "", "--reset-attention-mask": ""}
LINES: Words = {
    **TALKS,
    "--sft": "",
    "--data-path": "lines.jsonl",
    "--tokenizer-model": "chat",
    "--seq-length": "96",
}
CHAT: Words = {**LINES, "--tokenizer-type": "SFTTokenizer"}
IMAGES: Words = {**LINES, "--tokenizer-prompt-format": "qwen2p0"}
FIM: Words = {
    "--fim-data": "",
    "--fim-prefix-token": "a",
    "--fim-middle-token": "b",
    "--fim-suffix-token": "c",
}
FILES: Words = {**FIM, "--fim-split-sample": "#"}
COMPAT: Words = {"--sample-order": "compat"}
ROOM = "--max-seqlen-per-dp-cp-rank"
POOL: Words = {
    "--reset-attention-mask": "",
    "--micro-batch-size": "1",
    "--hybrid-context-parallel": "",
    ROOM: "16",
}
LOAD: Words = {"--load": "trained", "--train-iters": "6", "--lr-decay-iters": "8"}

FP8 = {"--fp8-format": "hybrid"}
ENDS = {**FP8, "--num-layers": "3", "--first-last-layers-bf16": ""}
