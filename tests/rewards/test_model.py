"""A trained reward model scores as in its training, loaded once per reward process."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_lab.config.load import load_config
from areal_lab.offline.examples import Encoder
from areal_lab.offline.rows import Row
from areal_lab.offline.trainee import load_network
from areal_lab.resolve.functions import check_functions
from areal_lab.rewards.model import RewardModel
from areal_lab.rewards.service import RewardService
from areal_lab.training.ranks import ALONE
from tests.offline.small import config_for, model_folder, run_here

FN = "areal_lab.rewards.model:RewardModel"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reward models with text around prompts and responses, and with a chat template."""
    found = {}
    for name, changes in {
        "text": {"dataset__prompt_template": "\n{prompt}", "dataset__end_text": "\n"},
        "chat": {"dataset__chat": True},
    }.items():
        folder = tmp_path_factory.mktemp(name)
        model_folder(folder, chat=True)
        _, job = run_here(config_for("rm", folder, actor__optimizer__lr=3e-3, **changes))
        found[name] = (job.folder / "model").resolve()
    return found


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_score_is_that_of_the_trainer_and_of_the_model(
    trained: dict[str, Path], kind: str
) -> None:
    folder = trained[kind]
    scored = RewardModel(str(folder))
    changes = {"dataset__chat": True} if kind == "chat" else {
        "dataset__prompt_template": "\n{prompt}", "dataset__end_text": "\n",
    }  # fmt: skip
    config = config_for("rm", folder.parents[3], **changes)
    encoder = Encoder(folder, config.dataset, "score")  # type: ignore[attr-defined]
    rows = [Row("", f"{n} + 1 =", (f" {n + 1}", f" {n}")) for n in range(2, 7)]
    items = encoder.items(rows).items
    network = load_network(folder, config.actor, ALONE, scores=True, device="cpu", seed=1)
    (part,) = network.cut(items, pairs=True).parts
    with torch.no_grad():
        expected = network.outputs(part).tolist()
    found = [scored(one, {"prompt": row.prompt}) for row in rows for one in map(str, row.responses)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(found) - min(found) > 1e-3
    # A prompt as the policy sees it, with that text around it.
    seen = encoder.wrapping.prompt(str(rows[0].prompt))
    assert scored(" 3", {"prompt": seen}) == found[0]
    # The folder is an ordinary one of transformers; its forward reads the last token.
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    model.config.pad_token_id = None
    tokens = list(items[0].examples[0].tokens)
    assert model(torch.tensor([tokens])).logits.item() == pytest.approx(found[0], abs=1e-5)


def test_a_reward_process_loads_the_model_and_scores(trained: dict[str, Path]) -> None:
    async def score() -> list[float]:
        async with RewardService(FN, kwargs={"path": str(trained["text"])}) as service:
            found = await service.score([" 5", " 6", "1" * 500], {"prompt": "2 + 3 ="})
            assert service.counts == {"ok": 2, "timeout": 0, "error": 1, "refused": 0}
            assert "the reward model's context is 256" in found[2].detail
            return [one.reward for one in found]

    found = asyncio.run(score())
    here = RewardModel(str(trained["text"]))
    assert found[:2] == [here.score("2 + 3 =", " 5"), here.score("2 + 3 =", " 6")]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward.kwargs.path": "nowhere"}, "nowhere is neither a model folder nor"),
        ({}, "missing a required argument: 'path'"),
        ({"reward.kwargs.path": "Adder-75K"}, "has no reward_model.json"),
        ({"reward.kwargs.path": "Adder-75K", "reward.kwargs.size": 3}, "'size'"),
        (
            {"reward.fn": "areal_lab.rewards.exact:gsm8k", "reward.kwargs.path": "x"},
            "unexpected keyword argument 'path'",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(
    settings: dict[str, object], message: str
) -> None:
    config = load_config("tiny", {"reward.fn": FN, **settings})
    (problem,) = check_functions(config)
    assert message in str(problem)
    assert problem.setting == "reward.kwargs"


def test_a_function_gets_its_keyword_arguments() -> None:
    async def score() -> list[float]:
        fn = "tests.rewards.misbehaving:longer_than"
        async with RewardService(fn, kwargs={"least": 2}) as service:
            return [one.reward for one in await service.score(["1", "333"], {})]

    assert asyncio.run(score()) == [0.0, 1.0]


def test_a_folder_without_a_readable_rule_is_one_line(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(trained["text"], folder, ignore=shutil.ignore_patterns("checkpoint.json"))
    (folder / "reward_model.json").write_text('{"prefix": ')
    with pytest.raises(ValueError, match=r"reward_model\.json cannot be read"):
        RewardModel.check(str(folder))
