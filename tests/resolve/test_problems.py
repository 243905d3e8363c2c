"""Data sets made for other frameworks become prompts and tokens, as docs/from_areal.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from areal_lab.config.load import load_config
from areal_lab.config.offline import load_offline
from areal_lab.data.rows import messages_of
from areal_lab.offline.examples import make_data
from areal_lab.offline.rows import load_rows
from areal_lab.pipeline.model_evaluation import evaluated_problems
from areal_lab.resolve.problems import renderer, run_problems, train_problems
from tests.offline.small import TEMPLATE, model_folder, write_rows

PAGE = (Path(__file__).parents[2] / "docs" / "from_areal.md").read_text(encoding="utf-8")
LAYOUTS = re.findall(r"^\| ([^|]+) \| `(\{[^|]+\})` \| `([^|]+)` \|$", PAGE, re.MULTILINE)


def rows_of(layout: str) -> list[dict[str, object]]:
    """Six rows in a layout, which has a row whose sum is 1+1."""
    return [json.loads(layout.replace("1+1", f"1+{n}")) for n in range(6)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_data_sets_made_for_other_frameworks_train_as_they_are(tmp_path: Path, suffix: str) -> None:
    model = model_folder(tmp_path, chat=True)
    assert len(LAYOUTS) > 20
    for made_for, layout, command in LAYOUTS:
        rows, file = rows_of(layout), tmp_path / f"rows{suffix}"
        if suffix == ".jsonl":
            write_rows(file, *rows)
        else:
            parquet.write_table(pa.Table.from_pylist(rows), file)
        kind, *settings = command.split()
        settings += [f"dataset.path={file}", "dataset.eval_size=2", f"actor.path={model}"]
        if kind == "train":
            config = load_config(None, [*settings, "dataset.type=jsonl"])
            problems = run_problems(config)
            assert (len(problems.train), len(problems.held_out)) == (4, 2), made_for
            one = min(problems.train, key=lambda one: one.key)
            messages = one.metadata.get("messages")
            assert re.fullmatch(r"(\*\+\n)?\+?1\+\d==?\*?", one.prompt), (made_for, one.prompt)
            assert one.prompt.endswith("*") == (messages is not None)
            assert one.answer == ("" if f"{command} ".endswith("answer_field= ") else "2")
            assert evaluated_problems(config) == problems.held_out
            given = train_problems(config, rows)
            assert sorted(p.prompt for p in given) == sorted(
                p.prompt for p in (*problems.train, *problems.held_out)
            )
        else:
            offline = load_offline(kind, (), [*settings, "dataset.batch_size=2"])
            data = make_data(offline, model, load_rows(offline.rows, seed=1))
            assert (len(data.train), len(data.held_out)) == (4, 2), made_for
            assert all(example.tokens for item in data.train for example in item.examples)


def test_messages_that_no_prompt_can_be_made_of_are_refused_in_one_line(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    user = {"role": "user", "content": "1+1="}

    def refused(prompt: object, *settings: str) -> str:
        row = {"prompt": prompt, "answer": "2"}
        file = write_rows(tmp_path / "rows.jsonl", row, row)
        more = [f"dataset.path={file}", "dataset.type=jsonl", "dataset.prompt_field=prompt"]
        with pytest.raises(ValueError, match=r"rows\.jsonl, line 1") as caught:
            run_problems(load_config(None, [*more, f"actor.path={model}", *settings]))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "has no chat template" in refused([user])
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert "but prompt_template is '{prompt}!'" in refused(
        [user], "dataset.prompt_template={prompt}!"
    )
    assert "ends where the assistant begins" in refused([user, {**user, "role": "assistant"}])
    assert "needs a role and a content" in refused(["1+1="])
    assert "needs a role and a content" in refused([{"from": "human", "value": "1+1="}])
    assert "with 'tool_calls'" in refused([{**user, "tool_calls": [{"name": "add"}]}])
    assert "needs a list of messages" in refused([])
    assert "has an empty 'prompt'" in refused([{**user, "content": " "}])
    (model / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    assert "the chat template refuses the conversation: never" in refused([user])
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    drawn = [{"role": "user", "content": [{"type": "image"}, *parts]}]
    assert messages_of({"p": drawn}, "", "p") == (("user", "<image>1+1="),)
    assert "needs a role and a content" in refused([{**user, "content": [{"type": "audio"}]}])
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert renderer(str(model))([("user", "1+1=")]) == "+1+1==*"
    file = write_rows(tmp_path / "parts.jsonl", *({"p": [{**user, "content": parts}]},) * 2)
    settings = [f"actor.path={model}", "dataset.type=jsonl", "dataset.prompt_field=p"]
    settings += [f"dataset.path={file}", f"dataset.eval_path={file}", "dataset.answer_field="]
    config = load_config(None, settings)
    with pytest.raises(ValueError, match="none is left to train on"):
        run_problems(config)
    assert train_problems(config, str(file))[0].prompt == "+1+1==*"


def test_a_field_that_a_data_set_names_otherwise_is_named(tmp_path: Path) -> None:
    verl = rows_of(LAYOUTS[0][1])
    file = write_rows(tmp_path / "rows.jsonl", *verl)
    settings = [f"dataset.path={file}", "dataset.type=jsonl"]
    with pytest.raises(ValueError, match=r"; set dataset\.prompt_field=prompt$"):
        run_problems(load_config(None, settings))
    settings += ["dataset.prompt_field=prompt", f"actor.path={model_folder(tmp_path, chat=True)}"]
    with pytest.raises(ValueError, match=r"dataset\.answer_field=reward_model\.ground_truth$"):
        run_problems(load_config(None, settings))
