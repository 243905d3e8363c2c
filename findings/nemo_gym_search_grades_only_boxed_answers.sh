#!/usr/bin/env bash
# nemo-gym 0.4.0 (trafilatura 2.2.0): the resource server google_search gives a response without
# \boxed{} no reward. Its verdict must have a text as parsed_option, which is then None, so that
# /verify replies with status 500; a response whose output is empty, or ends with a call of a tool,
# fails as well. A wrong answer in a box gets 0: a trainer that drops samples which could not be graded
# has no sample in which the missing box costs anything.
#
# Seen (Python 3.13): right 200 1.0; wrong 200 0.0; without a box 500; empty 500; call 500.
# The server mcqa, asked the same, grades all of them: 1.0, and 0.0 for the others.
#
# Needs Python 3.13 or 3.12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$(command -v python3.13 || command -v python3.12)
"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nemo-gym==0.4.0 trafilatura==2.2.0
cat > "$folder/verify.py" <<'PYTHON'
from fastapi.testclient import TestClient
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.google_search import app as google_search
from resources_servers.mcqa import app as mcqa

HEAD = BaseServerConfig(host="127.0.0.1", port=1)
AT = {"host": "127.0.0.1", "port": 1, "entrypoint": "app.py"}


def served(server, config):
    client = ServerClient(head_server_config=HEAD, global_config_dict=OmegaConf.create({}))
    app = server(config=config, server_client=client).setup_webserver()
    return TestClient(app, raise_server_exceptions=False)


def message(text):
    part = {"type": "output_text", "text": text, "annotations": []}
    head = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    return {**head, "content": [part]}


OUTPUTS = {
    "right": [message("So it is \\boxed{B}.")],
    "wrong": [message("So it is \\boxed{C}.")],
    "without a box": [message("So it is B.")],
    "empty": [],
    "call": [{"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"}],
}
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "Which one?"}]},
    "expected_answer": "B",
    "options": [{"A": "1"}, {"B": "2"}, {"C": "3"}],
    "task_difficulty_qwen3_32b_avg_8": 0.5,
}
RESPONSE = {"id": "r", "created_at": 0, "model": "m", "object": "response"}
RESPONSE |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
SERVERS = {
    "google_search": served(
        google_search.GoogleSearchResourcesServer,
        google_search.GoogleSearchResourcesServerConfig(
            name="google_search", google_api_key="none", google_cx="none", **AT
        ),
    ),
    "mcqa": served(
        mcqa.MCQAResourcesServer, mcqa.MCQAResourcesServerConfig(name="mcqa", **AT)
    ),
}
for name, client in SERVERS.items():
    for kind, output in OUTPUTS.items():
        reply = client.post("/verify", json={**ROW, "response": {**RESPONSE, "output": output}})
        reward = reply.json()["reward"] if reply.status_code == 200 else ""
        print(name, kind, reply.status_code, reward)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/verify.py" 2> "$folder/log" | sed 's/ *$//' > "$folder/seen"
cat > "$folder/EXPECTED" <<'TEXT'
google_search right 200 1.0
google_search wrong 200 0.0
google_search without a box 500
google_search empty 500
google_search call 500
mcqa right 200 1.0
mcqa wrong 200 0.0
mcqa without a box 200 0.0
mcqa empty 200 0.0
mcqa call 200 0.0
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: a response without a box has no reward from nemo-gym's google_search"
