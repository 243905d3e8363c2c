#!/usr/bin/env bash
# inspect-ai 0.3.285 (openai 3.57.0): a sample with turn_limit=N asks the model N + 1 times. The limit
# is checked after a reply: the last one is sampled and counted in the usage, then dropped, and the
# scorer sees the conversation without it. A trainer that has the sampled tokens has a turn that no
# reward is about, and an engine generates for each sample that meets the limit what nobody reads.
#
# Seen (Python 3.11), with a model that calls a tool in each reply of one token: limits of 1, 2 and 4
# make 2, 3 and 5 requests; 1, 2 and 4 replies are kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check inspect-ai==0.3.285 openai==3.57.0
cat > "$folder/turns.py" <<'PYTHON'
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

requests = []


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        call = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        calls = [{"id": f"c{len(requests)}", "type": "function", "function": call}]
        message = {"role": "assistant", "content": f"reply {len(requests)}", "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "r", "object": "chat.completion", "created": 1, "model": "m"}
        sent = json.dumps({**reply, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: first number
            b: second number
        """
        return a + b

    return execute


server = HTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["LAB_API_KEY"] = "none"
os.environ["LAB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
for limit in (1, 2, 4):
    requests.clear()
    task = Task(
        dataset=MemoryDataset([Sample(input="2+3?", target="5")]),
        solver=[use_tools(add()), generate()],
        scorer=includes(),
        turn_limit=limit,
    )
    (log,) = eval(task, model="openai-api/lab/m", log_dir=sys.argv[1], display="none")
    (sample,) = log.samples
    kept = [one.text for one in sample.messages if one.role == "assistant"]
    tokens = sum(usage.output_tokens for usage in sample.model_usage.values())
    print(f"turn_limit={limit}: {len(requests)} requests, {tokens} tokens, {len(kept)} replies kept")
    assert sample.limit.type == "turn" and kept[-1] == f"reply {limit}"
PYTHON
"$folder/venv/bin/python" "$folder/turns.py" "$folder/logs" > "$folder/seen"
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
turn_limit=1: 2 requests, 2 tokens, 1 replies kept
turn_limit=2: 3 requests, 3 tokens, 2 replies kept
turn_limit=4: 5 requests, 5 tokens, 4 replies kept
SEEN
echo "as stated: inspect-ai asks once more than its turn limit"
