#!/usr/bin/env bash
# verl 0.9.1: a prompt with one response has that response's reward as its advantage, for GRPO,
# OPO and RLOO. The mean of a group of one is the reward itself, so the difference is 0 and the
# response should not be learned from; asynchronous runs that drop late or failed responses leave
# such groups behind. RLOO's vectorized form, offered as the same estimator, does give 0.
#
# Seen (Python 3.11, torch 2.13.0), rewards 1 for the only response to a prompt and 1, 1, 0 for another:
# - GRPO, both forms: 1.0 for the lone response, and 0.58, 0.58, -1.15.
# - RLOO: 1.0 and 0.5, 0.5, -1.0. RLOO vectorized: 0.0 and 0.5, 0.5, -1.0.
# - OPO: 1.0 and 0.33, 0.33, -0.67.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# The estimators need a few of verl's packages: those are pinned, the others stay away.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.3.5 \
    omegaconf==2.3.0 transformers==5.9.0 ray==2.49.0 tensordict==0.10.0 codetiming==1.4.0 \
    hydra-core==1.3.2 dill==0.4.1 pandas==2.3.3 pyarrow==22.0.0 torchdata==0.11.0 peft==0.18.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps verl==0.9.1
cat > "$folder/lone.py" <<'PYTHON'
import numpy as np
import torch
from verl.trainer.ppo import core_algos

prompts = np.array(["a", "b", "b", "b"], dtype=object)
rewards, mask = torch.zeros(4, 3), torch.ones(4, 3)
rewards[:, -1] = torch.tensor([1.0, 1.0, 1.0, 0.0])
for name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo"):
    estimate = getattr(core_algos, f"compute_{name}_outcome_advantage")
    advantages, _ = estimate(rewards, mask, index=prompts)
    print(name, [round(float(one), 2) for one in advantages[:, 0]])
PYTHON
"$folder/venv/bin/python" "$folder/lone.py" 2> "$folder/notes" > "$folder/seen" || { cat "$folder/notes"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
grpo [1.0, 0.58, 0.58, -1.15]
grpo_vectorized [1.0, 0.58, 0.58, -1.15]
rloo [1.0, 0.5, 0.5, -1.0]
rloo_vectorized [0.0, 0.5, 0.5, -1.0]
opo [1.0, 0.33, 0.33, -0.67]
SEEN
echo "as stated: a lone response keeps its reward"
