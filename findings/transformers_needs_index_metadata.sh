#!/usr/bin/env bash
# transformers 5.24.0 loads a sharded model only if `model.safetensors.index.json` has the key `metadata`.
# Without it from_pretrained raises a bare KeyError('metadata') that names neither the file nor the reason, although
# `weight_map` says all that is needed: with an empty `metadata` the same folder loads, with the same weights.
# Indexes written by hand or by another tool may lack the key.
#
# Output seen (2026-11-28, CPython 3.11, torch 2.13.0 on a CPU, safetensors 0.8.0): EXPECTED below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 safetensors==0.8.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" > "$folder/seen" 2> "$folder/log" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
model.save_pretrained(folder, max_shard_size="20KB")
index = folder / "model.safetensors.index.json"
weight_map = json.loads(index.read_text())["weight_map"]
print("several shards", len(set(weight_map.values())) > 1)
for name, content in (("no metadata", {}), ("empty metadata", {"metadata": {}})):
    index.write_text(json.dumps(content | {"weight_map": weight_map}))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        print(f"{name}:", repr(error))
    else:
        same = all(map(torch.equal, model.state_dict().values(), loaded.state_dict().values()))
        print(f"{name}: loaded, same weights {same}")
PYTHON
cat > "$folder/EXPECTED" <<'TEXT'
several shards True
no metadata: KeyError('metadata')
empty metadata: loaded, same weights True
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: transformers 5.24.0 needs metadata in the index of a sharded model"
