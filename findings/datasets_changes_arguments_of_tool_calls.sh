#!/usr/bin/env bash
# datasets 5.2.0: conversations with tool calls do not come back as they were stored. Chat templates
# write the arguments of a call as JSON, so a model is trained on calls that nobody made.
#
# Seen (Python 3.11), for assistant messages whose calls have an object as `arguments`:
# - Calls of two tools, {"a": 1, "b": 2} and {"query": "x"}: Dataset.from_list gives each call the
#   arguments of the other, too, as None. load_dataset("json") and Dataset.from_generator make a
#   column of JSON instead and keep both, so the same rows differ by the way they were read.
# - Two calls of one tool, {"b": 2, "a": 1} and {"a": 1, "b": 2}: the second one comes back in the
#   order of the first one, from all three.
# - Two calls of one tool, {"a": 1} and {"a": 1.5}: the first one comes back as {"a": 1.0}, from all
#   three.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0
cat > "$folder/tool_calls.py" <<'PYTHON'
import json
import sys

from datasets import Dataset, load_dataset

folder = sys.argv[1]


def row(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


def read(how, rows, number):
    if how == "from_list":
        return Dataset.from_list(rows)
    if how == "from_generator":
        return Dataset.from_generator(lambda: iter(rows), cache_dir=f"{folder}/made-{number}")
    path = f"{folder}/rows-{number}.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)
    return load_dataset("json", data_files=path, split="train", cache_dir=f"{folder}/cache")


cases = {
    "two tools": [row("add", {"a": 1, "b": 2}), row("search", {"query": "x"})],
    "two orders": [row("add", {"b": 2, "a": 1}), row("add", {"a": 1, "b": 2})],
    "two types": [row("add", {"a": 1}), row("add", {"a": 1.5})],
}
for number, (name, rows) in enumerate(cases.items()):
    for how in ("from_list", "json", "from_generator"):
        calls = [one["messages"][0]["tool_calls"][0] for one in read(how, rows, number)]
        print(name, how, *(json.dumps(call["function"]["arguments"]) for call in calls), sep=" | ")
PYTHON
(cd "$folder" && HF_HOME="$folder/hf" venv/bin/python tool_calls.py "$folder") > "$folder/seen" 2> "$folder/log" ||
	{ tail -5 "$folder/log"; exit 1; }
cat "$folder/seen"
diff "$folder/seen" - <<'SEEN'
two tools | from_list | {"a": 1, "b": 2, "query": null} | {"a": null, "b": null, "query": "x"}
two tools | json | {"a": 1, "b": 2} | {"query": "x"}
two tools | from_generator | {"a": 1, "b": 2} | {"query": "x"}
two orders | from_list | {"b": 2, "a": 1} | {"b": 2, "a": 1}
two orders | json | {"b": 2, "a": 1} | {"b": 2, "a": 1}
two orders | from_generator | {"b": 2, "a": 1} | {"b": 2, "a": 1}
two types | from_list | {"a": 1.0} | {"a": 1.5}
two types | json | {"a": 1.0} | {"a": 1.5}
two types | from_generator | {"a": 1.0} | {"a": 1.5}
SEEN
echo "as stated: datasets changes the arguments of tool calls"
