#!/usr/bin/env bash
# inspect-ai 0.3.285 (openai 3.57.0): the second request of a tool loop does not repeat what the model
# said. If the reply had reasoning_content, the text comes back with a newline in front; arguments of
# calls come back as newly encoded JSON. A trainer that encodes the history anew trains on tokens that
# were never sampled, and a server that compares prefixes finds none.
#
# Seen (Python 3.11): ' Let me add.\n' with reasoning comes back as '\n Let me add.\n', without it
# unchanged; '{ "a":2,"b":3 }' comes back as '{"a": 2, "b": 3}' both times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check inspect-ai==0.3.285 openai==3.57.0
cat > "$folder/tool_loop.py" <<'PYTHON'
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

TEXT, ARGUMENTS = " Let me add.\n", '{ "a":2,"b":3 }'
thinks = sys.argv[1] == "reasoning"
requests = []


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        requests.append(asked)
        message = {"role": "assistant", "content": "5"}
        if len(asked) == 1:
            call = {"name": "add", "arguments": ARGUMENTS}
            message["content"] = TEXT
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]
            if thinks:
                message["reasoning_content"] = "Two and three."
        reason = "tool_calls" if len(asked) == 1 else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
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
task = Task(
    dataset=MemoryDataset([Sample(input="2+3?", target="5")]),
    solver=[use_tools(add()), generate()],
    scorer=includes(),
)
(log,) = eval(task, model="openai-api/lab/m", log_dir=sys.argv[2], display="none")
assert log.status == "success", log.error
said = requests[1][1]
print(sys.argv[1], repr(said["content"]), repr(said["tool_calls"][0]["function"]["arguments"]))
PYTHON
for kind in reasoning plain; do
    "$folder/venv/bin/python" "$folder/tool_loop.py" "$kind" "$folder/logs"
done > "$folder/seen"
cat > "$folder/EXPECTED" <<'TEXT'
reasoning '\n Let me add.\n' '{"a": 2, "b": 3}'
plain ' Let me add.\n' '{"a": 2, "b": 3}'
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: inspect-ai sends back another text and other arguments than the model's"
