"""Config files of strangers: settings, or errors of one line each; never a traceback or a hang."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from areal_lab.config.load import load_config
from areal_lab.config.offline import load_offline
from areal_lab.config.problem import ConfigError
from areal_lab.config.shipped import CONFIGS
from areal_lab.resolve.learning import cannot_learn, unlikely_to_learn
from areal_lab.resolve.unread import OFFLINE, TRAIN
from areal_lab.sweep.study import load_study
from cosim.load import load_cosim
from simulator.assembly.build import problems
from simulator.config.load import load_simulation, preset_path
from simulator.plan.schema import load_plan
from tests.fuzz import damaged_bytes, damaged_json, mutations

Loader = Callable[[Path, list[str]], object]


def _train(file: Path, overrides: list[str]) -> None:
    config = load_config(file, overrides)
    _ = [*TRAIN.refusals(config), *TRAIN.notes(config)]
    _ = [*cannot_learn(config), *unlikely_to_learn(config)]


def _offline(file: Path, overrides: list[str]) -> None:
    config = load_offline("dpo", file, overrides)
    _ = [*OFFLINE[type(config)].refusals(config), *OFFLINE[type(config)].notes(config)]


LOADERS: Final[dict[str, tuple[Path, Loader]]] = {
    "train": (CONFIGS / "tiny.yaml", _train),
    "offline": (CONFIGS / "dpo_adder.yaml", _offline),
    "cosim": (CONFIGS / "cosim.yaml", load_cosim),
    "simulate": (preset_path("small"), lambda file, given: problems(load_simulation(file, given))),
    "plan": (CONFIGS / "plan_small.yaml", load_plan),
    "sweep": (CONFIGS / "study_eta.yaml", lambda file, given: load_study(str(file), given)),
}
OVERRIDES: Final = (
    *(
        "seed=1",
        "seed=[[[",
        "seed={a: *b}",
        "a=b",
        "=",
        "x",
        "seed=" + "9" * 5000,
        "seed=${oc.env:A}",
    ),
    *("seed=" + "[" * 3000, "seed=!!python/name:os.system", "seed=\x00", "séed=1", "seed=1e400"),
)


def _one_line_each(error: ValueError) -> bool:
    lines = str(error).split("\n")
    own = len(error.problems) if isinstance(error, ConfigError) else 1
    return len(lines) == own and all(0 < len(one) < 4000 for one in lines)


@mutations
def test_damaged_configs_load_or_are_refused_in_a_line_each(count: int, tmp_path: Path) -> None:
    rng, file, loaded = random.Random(1), tmp_path / "config.yaml", 0
    refused: list[tuple[str, ValueError]] = []
    originals = {name: path.read_bytes() for name, (path, _) in LOADERS.items()}
    trees: dict[str, Any] = {name: yaml.safe_load(text) for name, text in originals.items()}
    for number in range(count):
        name = rng.choice(list(LOADERS))
        if number % 2:
            file.write_bytes(damaged_bytes(rng, originals[name]))
        else:
            tree = damaged_json(rng, trees[name])
            try:
                file.write_text(yaml.safe_dump(tree), encoding="utf-8", errors="surrogatepass")
            except (RecursionError, UnicodeEncodeError):
                continue
        overrides = [rng.choice(OVERRIDES)] if rng.randrange(4) == 0 else []
        try:
            LOADERS[name][1](file, overrides)
            loaded += 1
        except ValueError as error:
            refused.append((name, error))
    assert not [(name, str(one)[:300]) for name, one in refused if not _one_line_each(one)]
    assert loaded > count / 20


HOSTILE: Final[dict[str, str]] = {
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{two}: &{two} [{','.join([f'*{one}'] * 9)}]\n"
        for one, two in ("ab", "bc", "cd", "de", "ef", "fg")
    ): "more than 100,000 values",
    "[" * 3000 + "]" * 3000: "nested more than 64 levels deep",
    "a: " + "{a: " * 2000 + "1" + "}" * 2000: "nested more than 64 levels deep",
    "seed: " + "9" * 5000: "a number has over 4,300 digits",
    "seed: 0x" + "f" * 5000: "seed is an integer of 20000 bits",
    "seed: !!python/object/apply:os.system [echo hi]": "could not determine a constructor",
    "seed: 1\nseed: 2": "found duplicate key seed",
    "a: &a [*a]": "nested more than 64 levels deep",
    "experiment_name: ${oc.env:HOME}": "a file reads no environment variables",
    "run_dir: ${run_dir}": "refers to a setting that does not exist",
    "actor: {eps_clip: 20%}": "write 0.2, a share instead of percent",
    "actor: {optimizer: {lr: 1e-400}}": "actor.optimizer.lr is 0.0",
    "actor: {optimizer: {lr: .nan}}": "actor.optimizer.lr is nan",
    "actor: {optimizer: {weight_decay: .inf}}": "weight_decay is inf",
    "total_train_steps: 1.5": "total_train_steps is 1.5, but must be an integer",
    "total_train_steps: 1e30": "total_train_steps is 1e+30",
    "total_train_steps: true": "total_train_steps is True",
    "total_train_steps: 100000000000000000000": "integer of 67 bits",
    "s\u0435ed: 1": "unknown setting",
}


def test_hostile_files_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    file = tmp_path / "config.yaml"
    for text, reason in {**HOSTILE, "run_dir: ${oc.env:SECRET}": "only name another"}.items():
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r".") as caught:
            load_config(file)
        assert reason in str(caught.value), text[:80]
        assert _one_line_each(caught.value)
        assert "hunter2" not in str(caught.value)
