#!/usr/bin/env bash
# transformers 5.23.0 does not read `hf_quant_config.json`, in which NVIDIA's ModelOpt releases say
# that their weights are in FP8. If `config.json` has no `quantization_config`, from_pretrained takes
# the FP8 numbers as weights and leaves out their scales, without an error: the projections of the
# model below are 6,016 times too large, and its logits are finite. The only sign is a table of
# UNEXPECTED names, which is written to the log.
#
# Output seen (2026-11-27, CPython 3.11, torch 2.13.0 on a CPU, safetensors 0.8.0): EXPECTED below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder/model" > "$folder/seen" 2> "$folder/log" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)
LlamaForCausalLM(config).save_pretrained(folder)
weights = load_file(folder / "model.safetensors")
stored = {}
for name, weight in weights.items():
    if "proj" in name:  # as ModelOpt stores a linear layer: FP8 numbers and one scale
        scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale.reshape(1)
    else:
        stored[name] = weight
save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
(folder / "hf_quant_config.json").write_text(
    json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
)
model = AutoModelForCausalLM.from_pretrained(folder)
loaded = model.model.layers[0].mlp.up_proj.weight
right = weights["model.layers.0.mlp.up_proj.weight"]
print("type", loaded.dtype)
print("times too large", round((loaded.abs().max() / right.abs().max()).item()))
print("finite logits", bool(model(torch.arange(8)[None]).logits.isfinite().all()))
PYTHON
cat > "$folder/EXPECTED" <<'TEXT'
type torch.float32
times too large 6016
finite logits True
TEXT
diff "$folder/EXPECTED" "$folder/seen"
grep -q 'up_proj.weight_scale.*UNEXPECTED' "$folder/log"
echo "still so: transformers 5.23.0 ignores hf_quant_config.json"
