#!/usr/bin/env bash
# Package:   transformers 5.23.0 with safetensors 0.8.0; seen on 2026-11-27.
# Guess:     the weight_map of an index says which file a tensor is read from, and shards with an index
#            take precedence over a single file that lies beside them.
# Behaviour: the weight_map is read as a list of files only. Of a tensor that two shards hold, the one
#            in the last file by name is loaded, without a warning. A single file takes precedence
#            over the index, so that an older single file hides newer shards.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 transformers==5.23.0 safetensors==0.8.0
cat >"$folder/load.py" <<'PY'
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
folder = Path(sys.argv[1]) / "model"
config = transformers.LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
)
transformers.LlamaForCausalLM(config).save_pretrained(folder)
single = folder / "model.safetensors"
weights = load_file(single)
norm = "model.norm.weight"


def loaded() -> float:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    return float(model.state_dict()[norm][0])


single.unlink()
save_file(weights | {norm: torch.full((8,), 2.0)}, folder / "a.safetensors", {"format": "pt"})
save_file({norm: torch.full((8,), 3.0)}, folder / "b.safetensors", {"format": "pt"})
files = {name: "a.safetensors" for name in weights}
files["unused"] = "b.safetensors"
index = {"metadata": {}, "weight_map": files}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
of_two = loaded()
save_file(weights | {norm: torch.full((8,), 5.0)}, single, {"format": "pt"})
beside_single = loaded()
print(f"transformers {transformers.__version__}, a norm that is 2 in the shard of the weight_map,")
print(f"  3 in a later shard: {of_two:g} is loaded")
print(f"  5 in a single file beside the index: {beside_single:g} is loaded")
raise SystemExit(0 if (of_two, beside_single) == (3.0, 5.0) else "the behaviour has changed")
PY
"$folder/venv/bin/python" "$folder/load.py" "$folder"
