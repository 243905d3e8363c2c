#!/usr/bin/env bash
# litellm 1.110.2 (openai 3.57.0): a streamed reply says less than the same reply as a whole, without
# a warning.
#
# Seen (Python 3.11), against a server that sends what OpenAI documents:
# - text_completion with logprobs=2: as a whole the reply has the log-probs of its token, streamed it
#   has none in any part, although each part that the server sent had them.
# - completion with n=2, of which the second reply is cut off: as a whole the finish reasons are stop
#   and length; streamed, the one of the second reply never arrives, so that a response that is cut
#   off cannot be told from one that is complete.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check litellm==1.110.2 openai==3.57.0
cat > "$folder/streams.py" <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import litellm

HEAD = {"id": "r", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
ENDS = ("stop", "length")
PLAIN = {
    "tokens": [" 5"], "token_logprobs": [-0.1], "text_offset": [0],
    "top_logprobs": [{" 5": -0.1, " 6": -2.5}],
}


def plain(text, reason, logprobs):
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}
    return {**HEAD, "object": "text_completion", "choices": [choice]}


def part(index, delta, reason=None):
    choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
    return {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}


def whole(index, reason):
    message = {"role": "assistant", "content": "ab"[index]}
    return {"index": index, "message": message, "finish_reason": reason, "logprobs": None}


REPLIES = {
    ("/v1/completions", False): [{**plain(" 5", "stop", PLAIN), "usage": USAGE}],
    ("/v1/completions", True): [plain(" 5", None, PLAIN), plain("", "stop", None)],
    ("/v1/chat/completions", False): [
        {**HEAD, "object": "chat.completion", "usage": USAGE,
         "choices": [whole(*one) for one in enumerate(ENDS)]}
    ],
    ("/v1/chat/completions", True): [
        *(part(index, {"role": "assistant", "content": ""}) for index in (0, 1)),
        *(part(index, {"content": "ab"[index]}) for index in (0, 1)),
        *(part(index, {}, reason) for index, reason in enumerate(ENDS)),
    ],
}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        streamed = bool(asked.get("stream"))
        found = REPLIES[self.path, streamed]
        text = json.dumps(found[0])
        if streamed:
            text = "".join(f"data: {json.dumps(one)}\n\n" for one in found) + "data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
given = {"api_base": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "k"}

given_text = {**given, "model": "text-completion-openai/m", "prompt": "2 + 3 =", "logprobs": 2}
parts = {
    "whole": [litellm.text_completion(**given_text)],
    "streamed": litellm.text_completion(stream=True, **given_text),
}
for how, found in parts.items():
    choices = [choice for one in found for choice in one.choices]
    text = "".join(choice.text or "" for choice in choices)
    known = [choice.logprobs.token_logprobs for choice in choices if choice.logprobs]
    print(f"text_completion, {how}: {text!r} with log-probs {known}")

messages = [{"role": "user", "content": "q"}]
given_chat = {**given, "model": "openai/m", "messages": messages, "n": 2}
parts = {
    "whole": [litellm.completion(**given_chat)],
    "streamed": litellm.completion(stream=True, **given_chat),
}
for how, found in parts.items():
    choices = [choice for one in found for choice in one.choices]
    ends = {choice.index: choice.finish_reason for choice in choices if choice.finish_reason}
    print(f"completion, {how}: finish reasons {ends}")
PYTHON
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/venv/bin/python" "$folder/streams.py" > "$folder/seen" 2> "$folder/log" ||
	{ tail -5 "$folder/log"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
text_completion, whole: ' 5' with log-probs [[-0.1]]
text_completion, streamed: ' 5' with log-probs []
completion, whole: finish reasons {0: 'stop', 1: 'length'}
completion, streamed: finish reasons {0: 'stop'}
SEEN
echo "as stated: litellm's streams lose log-probs and finish reasons"
