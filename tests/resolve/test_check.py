"""Each mistake is one line, before any process starts."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError, Kind
from areal_lab.config.record import Record
from areal_lab.config.schema import Operation, RolloutConfig, TrainConfig
from areal_lab.control.order import ORDERS
from areal_lab.control.routing import ROUTINGS
from areal_lab.control.schedule import SCHEDULES
from areal_lab.data.arithmetic import OPERATIONS, arithmetic_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.models.folder import read_model_facts
from areal_lab.pipeline.train import train
from areal_lab.resolve import check as checks
from areal_lab.resolve import functions, placement
from areal_lab.resolve.check import check_other_models, check_transfer
from areal_lab.resolve.memory import estimate
from areal_lab.resolve.notes import notes
from areal_lab.resolve.placement import explain, place_run
from areal_lab.resolve.resolved import check, memory_notes, resolve
from areal_lab.rewards.sandbox import levels
from simulator.config.schema import RolloutConfig as SimulatedRollout
from simulator.config.schema import ScheduleConfig
from tests.model_folder import save_model_folder
from tests.resolve.test_placement import machine

GIB = 1 << 30


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainConfig]:
    """A configuration that passes, with overrides; the model and the runs lie in `tmp_path`."""
    save_model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def configure(*overrides: str) -> TrainConfig:
        paths = ["actor.path=model", "run_dir=runs", 'gconfig.stop=["\\n"]']
        return load_config(None, [*paths, *overrides])

    return configure


Configured = Callable[..., TrainConfig]


def refused(config: TrainConfig, **arguments: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(ConfigError) as caught:
        check(config, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_configuration_passes_and_leaves_nothing(
    configured: Configured, tmp_path: Path
) -> None:
    assert len(check(configured()).problems.train) == 60
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("eta=-1", "offpolicyness is -1, but must be a number >= 0, in versions; eta=0 is sync"),
        ("eta=nan", "offpolicyness is 'nan', but must be a number >= 0, in versions"),
        ("dataset.batch_size=61", "dataset.batch_size is 61, but there are 60 problems to train"),
        ("gconfig.n_samples=1", "gconfig.n_samples is 1, but must be an integer >= 2; advantages"),
        ("gconfig.n_samples=0", "gconfig.n_samples is 0, but must be an integer >= 2"),
        ("gconfig.max_new_tokens=128", "max_new_tokens is 128, but the model's context is 128"),
        ("gconfig.max_new_tokens=90", "a prompt has 48 tokens ('"),
        ("gconfig.stop=['']", "gconfig.stop: a stop string is empty, but must have a character"),
        ('gconfig.stop=["a\ufffd"]', "gconfig.stop: the stop string 'a\ufffd' has a replacement"),
        ("rollout.engine_args=[--api-key, s3cret]", "rollout.engine_args has --api-key, which ev"),
        ("actor.optimizer.lr=0", "actor.optimizer.lr is 0, but must be a finite number > 0"),
        ("actor.optimizer.lr=nan", "actor.optimizer.lr is 'nan'"),
        ("actor.optimizer.warmup_steps=-1", "warmup_steps is -1, but must be an integer >= 0"),
        ("actor.optimizer.lr_scheduler_type=cosin", "did you mean 'cosine'?"),
        (
            "actor.optimizer.min_lr_ratio=1.5",
            "min_lr_ratio is 1.5, but must be a number from 0",
        ),
        ("actor.profile_steps=[0]", "actor.profile_steps"),
        (
            "actor.profile_steps=[1,1000]",
            "actor.profile_steps has 1000, but the run has ",
        ),
        ("actor.ppo_n_minibatches=65", "is 65, but a batch has only 8 groups"),
        ("total_train_steps=0", "total_train_steps is 0, but must be an integer >= 1"),
        (
            "rollout.backend=embedd",
            f"'embedd' is not an engine; known are {', '.join(BACKENDS)}",
        ),
        ("rollout.schedule=async", f"must be one of {', '.join(SCHEDULES)}"),
        ("rollout.schedule=synchron", "did you mean 'synchronous'?"),
        ("rollout.batch_order=fifo", "rollout.batch_order is 'fifo', but must be one of"),
        ("rollout.pause_mode=retrackt", "did you mean 'retract'?"),
        ("rollout.dtype=fp8", "must be one of auto, float32, bfloat16"),
        ("dataset.type=json", "did you mean 'jsonl'?"),
        ("dataset.type=jsonl", "dataset: dataset.path is empty"),
        ("dataset.operations=[plus]", "must be a list, each one of add, subtract, multiply"),
        ("reward.fn=areal_lab.rewards.exact:gone", "'areal_lab.rewards.exact' has no 'gone'"),
        ("reward.fn=no_such_module:f", "module 'no_such_module' does not exist"),
        ("reward.fn=exact", "reward.fn: 'exact' cannot be used: 'exact' is not of the form"),
        ("reward.fn=math:pi", "'math:pi' is float, which is not callable"),
        ("actor.loss_fn=math:hypot", "cannot be called as a policy loss"),
        ("actor.advantage_fn=math:gone", "actor.advantage_fn: 'math:gone'"),
        ("actor.loss=math:hypot", "actor.loss.name is 'math:hypot', which cannot be used"),
        ("actor.loss={name: ppo, clip_epsilon: -1}", "clip_epsilon is -1.0, but its bounds are"),
        (
            "actor.loss={name: grpo, correct: {name: truncate, cap: 0}}",
            "cap is 0.0, but pi_prox/pi_behav is positive, so its bound must be > 0; infinity",
        ),
        (
            "actor.advantage={name: group, eps: -1}",
            "actor.advantage: eps is -1.0, but must be >= 0",
        ),
        ("actor.path=nowhere", "actor.path: nowhere is neither a model folder nor"),
        ("actor.path=SmolLM2-135M-instruct", "did you mean 'SmolLM2-135M-Instruct'?"),
        ("actor.path=.", "has no config.json"),
        ("experiment_name=a/b", "experiment_name is 'a/b', but must be a folder name"),
        ("experiment_name=", "experiment_name is '', but must be a folder name"),
        ("experiment_name=../../x", "has no / or"),
        (f"experiment_name={'x' * 300}", "(302 characters), but must be a folder name of at most"),
        ("experiment_name=run..", "does not end with a dot"),
        ('experiment_name="a\\0b"', "experiment_name is 'a\\x00b'"),
        ("run_dir=" + "x" * 300, "a path with names of at most 255 bytes each"),
        ('run_dir="a\\0b"', "run_dir is 'a\\x00b', but must be a path"),
        ("rollout.port=70000", "rollout.port is 70000, but must be an integer from 0 to 65,535"),
        (
            "reward.weights={format: .nan}",
            "reward.weights is {'format': nan}, but must be a mapping of names to finite numbers",
        ),
        ("rollout.dynamic_sampling.max_batches=0", "max_batches is 0, but must be an integer >= 1"),
        ("reward.max_error_rate=2", "reward.max_error_rate is 2, but must be a number from 0 to 1"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
    configured: Configured, override: str, expected: str
) -> None:
    try:
        config = configured(override)
    except ConfigError as error:  # a field says so of its own
        (problem,) = error.problems
        assert expected in str(problem)
    else:
        assert expected in refused(config)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("loss=gpso", "actor.loss.name is 'gpso', which is no policy loss; did you mean 'gspo'"),
        ("loss=3", "actor.loss is 3, but must be a mapping; for example {name: gspo}"),
        ("loss.cap=3", "actor.loss is {'cap': 3}, but must name a policy loss, as {name: gspo}"),
        ("loss=rloo", "which is no policy loss; rloo is for advantages, as in docs/losses.md"),
        (
            "loss={name: gspo, clip_epsilo: 1}",
            "is no keyword of gspo; did you mean 'clip_epsilon'?",
        ),
        (
            "loss={name: gspo, clip_epsilon: fast}",
            "actor.loss.clip_epsilon is 'fast', but must be a number, or two, as [0.2, 0.28]",
        ),
        ("loss={name: gspo, clip_epsilon: [1, 2, 3]}", "is [1, 2, 3], but must be a number, or"),
        ("loss={name: gspo, clip_epsilon: true}", "is True, but must be a number, or two"),
        ("loss={name: vespo, positive: 2}", "is 2, but must be two numbers, as [0.5, 2]"),
        ("loss={name: gspo, sequences: 3}", "actor.loss.sequences is filled by the trainer"),
        ("loss={name: gspo, aggregate: token_mean}", "are keywords of policy_loss"),
        ("loss={name: clip_cov, noise: 3}", "noise takes a tensor, which YAML cannot hold"),
        ("loss=dr_grpo", "actor.loss.max_tokens is missing, but dr_grpo has no default for it"),
        ("loss=policy_loss", "actor.loss.surrogate is missing, but policy_loss has no default"),
        (
            "loss={name: grpo, correct: {name: trunc, cap: 2}}",
            "actor.loss.correct.name is 'trunc', which is no correction; did you mean 'truncate'",
        ),
        ("loss={name: grpo, correct: truncate}", "actor.loss.correct.cap is missing"),
        ("loss={name: grpo, correct: 5}", "correct is 5, but must be a correction, as {name: "),
        ("loss={name: grpo, correct: []}", "correct is [], but must be a correction by name"),
        ("loss={name: grpo, correct: [{name: chain}]}", "correct[0].name is 'chain', which needs"),
        ("loss={name: grpo, correct: keep}", "'keep', which needs a mask for each token"),
        (
            "advantage=vtrace",
            "actor.advantage.name is 'vtrace', which needs ratios of the policies",
        ),
        ("advantage=gdpo", "'gdpo', which needs several rewards per sample"),
        ("advantage={name: gae, lambda: 0.9}", "did you mean 'lambda_'"),
        ("advantage={name: group, baseline: mean_of_other}", "did you mean 'mean_of_others'"),
        ("overlong_share=2", "actor.overlong_share is 2, but must be a number from 0 to 1"),
    ],
)
def test_a_wrong_objective_is_refused_without_torch(
    configured: Configured, override: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.check_settings(configured(f"actor.{override}"))
    assert len(caught.value.problems) == 1
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("corpus", "tool", "seen"),
    [
        ("{chains: 20, depth: 2}", "tool: {}", ""),
        ("{chains: 21, depth: 2}", "tool: {}", "has chains 21 and depth 2, but dataset.size is 20"),
        ("{chains: 20, depth: 3}", "tools: [{}]", "depth 3, but .* dataset.depth 2, and a page"),
    ],
)
def test_generated_pages_are_those_of_the_problems(
    corpus: str, tool: str, seen: str, configured: Configured
) -> None:
    tools = tool.replace("{}", f"{{name: search, corpus: {corpus}}}")
    notation = "notation: json, " if "[" in tool else ""
    workflow = f"rollout.workflow={{name: tool_use, {notation}{tools}}}"
    config = configured("dataset.type=chain", "dataset.size=20", "dataset.depth=2", workflow)
    found = [problem.message for problem in functions.check_functions(config)]
    assert len(found) == bool(seen)
    assert re.search(seen, "".join(found))
    other = configured("dataset.size=20", "dataset.depth=2", workflow)
    assert not list(functions.check_functions(other)), "of other problems they may be any"


def test_two_losses_are_refused(configured: Configured) -> None:
    config = configured("actor.loss=gspo", "actor.loss_fn=areal_lab.functional:grpo")
    with pytest.raises(ConfigError, match=r"names .gspo., and actor.loss_fn .areal_lab.*leave out"):
        checks.check_settings(config)


def test_settings_that_a_named_objective_ignores_are_told(configured: Configured) -> None:
    config = configured("actor.loss=gspo", "actor.eps_clip=0.1", "actor.advantage=rloo")
    assert any(
        "actor.eps_clip has no effect with actor.loss" in note
        for note in notes(place_run(config, machine()))
    )
    assert not any("adv_norm_std" in note for note in notes(place_run(config, machine())))


def test_all_problems_are_reported_at_once(configured: Configured) -> None:
    config = configured("run_dir=/dev/null/x", "actor.ppo_n_minibatches=999", "rollout.backend=no")
    with pytest.raises(ConfigError) as caught:
        check(config)
    found = {problem.setting for problem in caught.value.problems}
    assert found == {"run_dir", "actor.ppo_n_minibatches", "rollout.backend"}
    with pytest.raises(ConfigError) as caught:
        check(configured("reward.fn=exact", "dataset.type=jsonl", "actor.path=nowhere"))
    assert [one.setting for one in caught.value.problems] == ["reward.fn", "dataset", "actor.path"]


def test_problems_of_the_machine_and_of_settings_have_different_kinds(
    configured: Configured,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = configured(f"rollout.port={taken.getsockname()[1]}", "run_dir=/dev/null/x")
        with pytest.raises(ConfigError) as caught:
            check(config)
    kinds = {problem.setting: problem.kind for problem in caught.value.problems}
    assert kinds == {"rollout.port": Kind.MACHINE, "run_dir": Kind.SETTINGS}


@pytest.mark.parametrize("override", ["run_dir=~nosuchuser/a", "actor.path=~nosuchuser/a"])
def test_the_home_folder_of_an_unknown_user_is_refused(
    configured: Configured, override: str
) -> None:
    assert "no home folder is known for ~nosuchuser; write the full" in refused(
        configured(override)
    )


def test_a_cache_in_the_home_folder_of_an_unknown_user_is_refused(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LAB_CACHE", "~nosuchuser")
    assert refused(configured()).startswith("AREAL_LAB_CACHE is ~nosuchuser, but no home folder")


def test_a_batch_may_be_all_the_problems(configured: Configured) -> None:
    check(configured("dataset.batch_size=60"))


@pytest.mark.parametrize(
    ("record", "name", "names"),
    [
        (RolloutConfig, "schedule", SCHEDULES),
        (RolloutConfig, "batch_order", ORDERS),
        (RolloutConfig, "routing", ROUTINGS),
        (RolloutConfig, "pause_mode", PauseMode),
        (RolloutConfig, "transfer", Transfer),
        (ScheduleConfig, "name", SCHEDULES),
        (ScheduleConfig, "batch_order", ORDERS),
        (SimulatedRollout, "routing", ROUTINGS),
    ],
)
def test_choices_of_a_field_are_the_names_in_the_code(
    record: type[Record], name: str, names: Iterable[str]
) -> None:
    assert set(get_args(record.model_fields[name].annotation)) == set(names)


def test_operations_of_the_schema_are_those_of_the_data() -> None:
    assert set(get_args(Operation)) == set(OPERATIONS)


def test_a_bound_below_eta_without_dropping_is_refused(configured: Configured) -> None:
    late = ["rollout.batch_order=bounded_lag", "rollout.max_lag=2"]
    assert "rollout.max_lag is 2 (whole versions), but eta 4 starts groups" in refused(
        configured(*late)
    )
    for dropping in ("rollout.on_late=drop", "rollout.on_late=recycle", "rollout.drop_late=true"):
        check(configured(*late, dropping))
    check(configured(*late, "eta=2"))
    check(configured(*late, "rollout.schedule=one_step_overlap"))
    unbounded = ["rollout.batch_order=bounded_lag", "eta=inf"]
    assert "eta is infinite, which gives no bound; set max_lag" in refused(configured(*unbounded))


def _below_which_one_is_free(taken: socket.socket) -> int:
    """Listen on a port; nothing listens on the one before it."""
    while True:
        with socket.socket() as before:
            before.bind(("127.0.0.1", 0))
            port = before.getsockname()[1] + 1
            try:
                taken.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                continue
            taken.listen()
            return port


def test_a_port_in_use_is_refused(configured: Configured) -> None:
    with socket.socket() as taken:
        port = _below_which_one_is_free(taken)
        message = refused(configured(f"rollout.port={port}"))
        assert f"port {port} cannot be used (address already in use)" in message
        assert "rollout.port=0 for a free one" in message
        # The second engine's port is the taken one.
        message = refused(configured(f"rollout.port={port - 1}", "rollout.engines=2"))
        assert "cannot be used" in message
    check(configured(f"rollout.port={port}"))


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("127.0.0.1:30000", "it does not begin with http://"),
        ("https://127.0.0.1:30000", "it does not begin with http://"),
        ("5", "it does not begin with http://"),
        ("http://[::1", "invalid IPv6 URL"),
        ("http://:80", "it has no host"),
        ("http://host", "it has no port"),
        ("http://host:0", "nothing listens on port 0"),
        ("http://host:65536", "port out of range 0-65535"),
        ("http://host:abc", "port could not be cast to integer value as 'abc'"),
        ("http://host:80/v1", "it has more than a host and a port"),
        ("http://host:80?a=b", "it has more than a host and a port"),
        ("http://.:80", "no host is named '.'"),
        pytest.param(f"http://{'a' * 64}:80", f"no host is named '{'a' * 64}'", id="64 letters"),
    ],
)
def test_malformed_addresses_are_refused_before_any_is_tried(
    configured: Configured, address: str, wrong: str
) -> None:
    with socket.socket() as untouched:
        untouched.bind(("127.0.0.1", 0))
        untouched.listen()
        untouched.setblocking(False)
        there = f"http://127.0.0.1:{untouched.getsockname()[1]}"
        message = refused(configured(f"rollout.addresses=['{there}', '{address}']"))
        with pytest.raises(BlockingIOError):
            untouched.accept()
    assert message == (
        f"rollout.addresses has {address!r}, but an address is http://HOST:PORT, as in "
        f"http://127.0.0.1:30000: {wrong}"
    )


@pytest.mark.parametrize("before", [":s3cret@", "s3cret@", "me:s3cret@"])
def test_a_key_in_an_address_is_refused_without_telling_it(
    configured: Configured, before: str
) -> None:
    for address in (f"http://{before}host:80", f"http://{before}host", f"{before}host:80"):
        config = configured(f"rollout.addresses=['{address}']")
        message = refused(config)
        assert "rollout.addresses has 'http://host" in message or "'host:80'" in message
        assert not [
            text for text in (message, *explain(place_run(config, machine()))) if "s3cret" in text
        ]
    whole = refused(configured(f"rollout.addresses=['http://{before}host:80']"))
    assert "it has a key; set AREAL_LAB_ENGINE_KEY to it, which nothing writes to a file" in whole


@pytest.mark.parametrize("end", ["", "/"])
def test_an_address_counts_once(configured: Configured, end: str) -> None:
    config = configured(f"rollout.addresses=['http://h:1', 'http://h:1{end}']")
    assert "twice; list each server once" in refused(config)


def test_engine_ports_end_where_ports_end(configured: Configured) -> None:
    config = configured("rollout.port=65535", "rollout.engines=2")
    assert "engine ports end at 65535" in refused(config)


def test_a_broken_line_is_named_with_its_number(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question"\n')
    config = configured("dataset.type=jsonl", "dataset.path=a.jsonl")
    assert "a.jsonl, line 2 is not JSON" in refused(config)


def test_a_missing_file_is_named(configured: Configured) -> None:
    config = configured("dataset.type=jsonl", "dataset.path=nowhere.jsonl")
    assert "dataset: nowhere.jsonl does not exist" in refused(config)


def test_a_folder_without_weights_is_refused(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "model has no weights" in refused(configured())


def test_damaged_weights_are_refused(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "model.safetensors is not a safetensors file" in refused(configured())


def test_a_folder_without_a_tokenizer_is_refused(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert "has no tokenizer.json; make one" in refused(configured())


def test_a_prompt_as_long_as_the_context_allows_passes(
    configured: Configured, tmp_path: Path
) -> None:
    longest = max(len(p.prompt) for p in arithmetic_problems(seed=1).train)
    save_model_folder(tmp_path / "model", context=longest + 5)
    check(configured())
    save_model_folder(tmp_path / "model", context=longest + 4)
    assert f"a prompt has {longest} tokens" in refused(configured())


def test_a_model_without_a_context_length_passes(configured: Configured, tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model", context=None)
    check(configured("gconfig.max_new_tokens=100000"))


def test_given_problems_are_checked_instead_of_the_configured_ones(configured: Configured) -> None:
    problems = arithmetic_problems(eval_size=80, seed=1)
    config = configured("dataset.type=jsonl", "dataset.batch_size=5")
    assert check(config, problems).problems is problems
    assert "there are 1" in refused(configured("dataset.batch_size=50"), problems=problems)


def disks(**free: int) -> Callable[[Path], SimpleNamespace]:
    """Free bytes of shared memory and of everything else."""

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=free["memory" if path == SHARED_MEMORY else "disk"])

    return usage


def test_a_full_disk_is_refused_with_needed_and_free_space(
    configured: Configured, tmp_path: Path
) -> None:
    save_model_folder(tmp_path / "model", parameters=1_000_000)
    model, state, logs = 4_000_000, 12_000_000, 64 << 20
    checkpoint = model + state
    weights = int(ROOM_FACTOR * 4_000_000)
    check(configured(), disk_usage=disks(disk=checkpoint + logs, memory=weights))
    message = refused(configured(), disk_usage=disks(disk=checkpoint + logs - 1, memory=weights))
    assert "no space on the device of runs: 1 checkpoint need 0.08 GiB" in message
    assert "free some space, or set run_dir" in message

    several = configured("save_every_steps=10", "total_train_steps=25")
    check(several, disk_usage=disks(disk=3 * checkpoint + logs, memory=weights))
    message = refused(several, disk_usage=disks(disk=3 * checkpoint + logs - 1, memory=weights))
    assert "3 checkpoints" in message
    assert "save_every_steps" in message
    # The newest two have the trainer's state, and one more while it is written.
    many = configured("save_every_steps=1", "total_train_steps=25")
    check(many, disk_usage=disks(disk=25 * model + 3 * state + logs, memory=weights))
    few = configured("save_every_steps=1", "total_train_steps=25", "checkpoint.keep=4")
    check(few, disk_usage=disks(disk=6 * model + 3 * state + logs, memory=weights))
    refused(few, disk_usage=disks(disk=6 * model + 3 * state + logs - 1, memory=weights))
    models = configured("checkpoint.resumable=false")
    check(models, disk_usage=disks(disk=model + logs, memory=weights))


def test_weights_that_do_not_fit_shared_memory_need_the_disk(
    configured: Configured, tmp_path: Path
) -> None:
    save_model_folder(tmp_path / "model", parameters=1_000_000)
    checkpoint, logs, weights = 16_000_000, 64 << 20, int(ROOM_FACTOR * 4_000_000)
    little = weights - 1
    check(configured(), disk_usage=disks(disk=checkpoint + logs + weights, memory=little))
    message = refused(configured(), disk_usage=disks(disk=checkpoint + logs, memory=little))
    assert "and the weights for the engines (no room in /dev/shm)" in message
    # Half the bytes in bfloat16.
    check(configured("rollout.dtype=bfloat16"), disk_usage=disks(disk=GIB, memory=weights // 2))


def test_no_space_to_convert_a_packaged_model_is_refused(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LAB_CACHE", str(tmp_path / "cache"))
    config = configured("actor.path=SmolLM2-135M-Instruct")
    with pytest.raises(ConfigError, match=r"model need 1.00 GiB.*set AREAL_LAB_") as caught:
        check(config, disk_usage=disks(disk=GIB - 1, memory=GIB))
    assert [problem.setting for problem in caught.value.problems] == ["AREAL_LAB_CACHE"]


def test_a_run_folder_that_cannot_be_created_is_refused(
    configured: Configured, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} is not a folder" in refused(configured("run_dir=file/runs"))


def test_functions_in_the_current_folder_are_found(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, example): return 1.0\n")
    (tmp_path / "broken.py").write_text("import not_there\n")
    check(configured("reward.fn=mine:score"))
    message = refused(configured("reward.fn=broken:score"))
    assert "No module named 'not_there'" in message


def test_functions_that_cannot_be_called_are_refused_before_anything_starts(
    configured: Configured, tmp_path: Path
) -> None:
    (tmp_path / "theirs.py").write_text(
        "def trl(prompts, completions, **kwargs): return [1.0]\n"
        "def factor(completion, example, *, scale): return scale\n"
        "async def feedback(completion, data): return ''\n"
        "def agent(prompt, data): return 1.0\n"
        "class Episode:\n    async def run(self, engine): pass\n"
        "class Tool:\n    name = description = ''\n    parameters = {}\n"
        "    def call(self): return ''\n"
    )
    check(configured("reward.fn=theirs:factor", "reward.kwargs={scale: 2.0}"))
    for given, expected in {
        "reward.fn=theirs:trl": (
            "reward.fn: 'theirs:trl' cannot be used: it takes (prompts, completions, **kwargs), as "
            "in other frameworks, but is called as score(completion, example)"
        ),
        "reward.fn=theirs:factor": "missing a required argument: 'scale'",
        "rollout.workflow={name: multi_turn, feedback: 'theirs:feedback'}": (
            "feedback theirs:feedback is async, but nothing waits for it"
        ),
        "rollout.workflow={name: agent, fn: 'theirs:agent'}": (
            "theirs:agent takes (prompt, data), but is called as agent(data)"
        ),
        "rollout.workflow={name: agent, fn: 'theirs:agent', mode: subprocess}": (
            "theirs:agent takes (prompt, data), but is called as agent(data)"
        ),
        "rollout.workflow={name: 'theirs:Episode'}": (
            "the method run of theirs:Episode takes (engine), but is called as run(engine, data)"
        ),
        "rollout.workflow={name: tool_use, tool: {name: 'theirs:Tool'}}": (
            "the method call of theirs:Tool takes (), but is called as call(arguments)"
        ),
    }.items():
        with pytest.raises(ConfigError) as caught:
            check(configured(given))
        problem, *_ = caught.value.problems
        assert expected in str(problem)
        assert "\n" not in str(problem)


def test_functions_that_a_program_gives_are_checked_too(configured: Configured) -> None:
    def trl(completions: list[str], **kwargs: object) -> list[float]:
        return [1.0] * len(completions or kwargs)

    for given, expected in (
        (trl, "reward_fn trl takes (completions: 'list[str]', **kwargs: 'object')"),
        (0.5, "reward_fn is 0.5, but must be a function of (completion, example)"),
        ("areal_lab.rewards.exact:gone", "'areal_lab.rewards.exact' has no 'gone'"),
    ):
        with pytest.raises(ConfigError) as caught:
            train(configured(), reward_fn=given)  # type: ignore[arg-type]  # what is refused
        assert expected in str(caught.value)
    given_reward = resolve(configured(), reward_fn="areal_lab.rewards.exact:gsm8k")
    assert given_reward.given == ("reward_fn",)
    assert given_reward.reward_fn == "areal_lab.rewards.exact:gsm8k"
    assert resolve(configured()).given == ()


def test_gold_answers_that_no_completion_can_equal_are_refused(configured: Configured) -> None:
    for fn, answer, expected in (
        ("exact:last_number", "3:4", "'3:4' is 2 numbers"),
        ("exact:gsm8k", "none", "'none' has no number"),
        ("math_answer:math_answer", "2024-01-05", "'2024-01-05' is a date"),
    ):
        config = configured(f"reward.fn=areal_lab.rewards.{fn}", "dataset.batch_size=1")
        good, bad = (Problem(prompt=one, answer=one, key=one) for one in ("2", answer))
        assert [*functions.check_gold_answers(config, [good, good])] == []
        (problem,) = functions.check_gold_answers(config, [good, bad, good])
        assert f"{fn} cannot score problem 2 ('{answer}'): the gold answer {expected}" in str(
            problem
        )
        own = [Problem(prompt=str(n), answer=answer, key=str(n)) for n in range(2)]
        both = ProblemSet(train=(own[0],), held_out=(own[1],))
        with pytest.raises(ConfigError, match="cannot score problem"):
            train(config, problems=both)
        train(config, problems=both, reward_fn=lambda completion, _: float(len(completion)))


CODE = "reward.fn=areal_lab.rewards.python_tests:humaneval"


def test_model_code_that_cannot_be_contained_is_refused(
    configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "refusal", lambda _: "it is broken")
    message = refused(configured(CODE))
    assert message.startswith("reward.sandbox is auto, but programs cannot be contained here")
    assert "namespaces: it is broken" in message
    assert "apt-get install bubblewrap" in message
    assert "reward.sandbox is bubblewrap" in refused(configured(CODE, "reward.sandbox=bubblewrap"))
    check(configured(CODE, "reward.sandbox=unsafe"))
    check(configured())  # the default reward runs no model code
    monkeypatch.setattr(levels, "refusal", lambda _: "")
    check(configured(CODE))


def test_custom_rewards_that_run_model_code_are_checked_too(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs_code.py").write_text("def score(completion, example, *, sandbox): return 1\n")
    monkeypatch.setenv("PATH", "/nowhere")
    ours = "reward.fn=runs_code:score"
    message = refused(configured(ours, "reward.sandbox=bubblewrap"))
    assert "reward.sandbox is bubblewrap, but programs cannot" in message
    assert "bwrap is not installed" in message
    check(configured(ours, "reward.sandbox=unsafe"))


def test_code_that_is_not_contained_has_a_note(configured: Configured) -> None:
    assert any(
        "contains nothing" in note
        for note in notes(place_run(configured("reward.sandbox=unsafe"), machine()))
    )
    assert not any("contains nothing" in note for note in notes(place_run(configured(), machine())))


def test_the_facts_of_a_model_are_read_from_its_headers(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "model", context=77, parameters=123)
    assert (read_model_facts(folder).parameters, read_model_facts(folder).context_tokens) == (
        123,
        77,
    )
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert read_model_facts(folder).parameters == 123  # the same weights in another form
    (folder / "config.json").write_text('{"text_config": {"max_position_embeddings": 9}}')
    assert read_model_facts(folder).context_tokens == 9


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([], ""),
        (["eta=0"], ""),
        (["eta=inf"], ""),
        (["eta=0.2"], "runs ahead by at most 0.2 batches"),
        (["rollout.schedule=synchronous"], ""),
        (
            ["rollout.schedule=synchronous", "eta=2"],
            "with rollout.schedule=synchronous, which is eta=0",
        ),
        (["rollout.pause_mode=in_place"], "continue under a mixture of versions"),
        (["rollout.pause_mode=in_place"], "docs/engines.md, 'What an interruption does'"),
        (
            ["rollout.pause_mode=in_place", "rollout.schedule=partial_rollout"],
            "keeps the KV cache of the old weights",
        ),
        (["rollout.pause_mode=in_place", "eta=0"], ""),
        (["rollout.pause_mode=in_place", "rollout.interruptible=false"], ""),
        (["rollout.pause_mode=in_place", "rollout.schedule=synchronous"], ""),
        (["rollout.pause_mode=in_place", "rollout.backend=vllm"], ""),  # measured: no bias
        (
            ["actor.lora_rank=8", "actor.target_modules=[q_proj]"],
            "actor.lora_rank, actor.target_modules has no effect without actor.use_lora=true",
        ),
        (["actor.lora_rank=8", "actor.use_lora=true"], ""),
    ],
)
def test_a_setting_that_may_be_misunderstood_gets_one_note(
    configured: Configured, overrides: list[str], note: str
) -> None:
    notices = notes(place_run(configured(*overrides), machine()))
    assert len(notices) == bool(note)
    assert note in "".join(notices)
    assert "\n" not in "".join(notices)


@pytest.mark.parametrize(
    ("overrides", "where", "expected"),
    [
        ([], {}, []),
        (
            [],
            {"gpus": 1},
            [
                "the trainer computes on the CPU: the installed torch was built without CUDA",
                "the engine embedded computes on the CPU: the installed torch was built without",
            ],
        ),
        (
            [],
            {"gpus": 1, "cuda": True},
            ["the trainer computes on the CPU: the engines leave too few for 1 trainer process"],
        ),
        (
            ["rollout.engines=3"],
            {"gpus": 2, "cuda": True},
            ["the engine embedded computes on the CPU: there are too few for 3 engine(s)"],
        ),
        (["rollout.device=cpu"], {"gpus": 2, "cuda": True}, []),
        ([], {"gpus": 2, "cuda": True}, []),
        (
            ["rollout.backend=sglang"],
            {"gpus": 1, "cuda": True, "build": "gpu"},
            ["the trainer computes on the CPU: the engines leave too few for 1 trainer process"],
        ),
        (
            ["rollout.backend=sglang", "actor.device=cpu"],
            {"gpus": 1, "cuda": True},
            ["the engine sglang computes on the CPU: its CPU build is installed (areal-lab"],
        ),
        (["rollout.backend=sglang"], {"gpus": 2, "cuda": True, "build": "gpu"}, []),
    ],
)
def test_a_visible_gpu_that_nothing_uses_gets_a_note(
    configured: Configured,
    overrides: list[str],
    where: dict[str, Any],
    expected: list[str],
) -> None:
    found = notes(place_run(configured(*overrides), machine(**where)))
    assert len(found) == len(expected)
    for note, text in zip(found, expected, strict=True):
        assert note.startswith(f"a GPU is visible, but {text}")


def test_a_broadcast_from_a_gpu_to_engines_on_the_cpu_is_refused(configured: Configured) -> None:
    def found(*overrides: str, **where: Any) -> list[Any]:
        there = machine(gpus=2, cuda=True, **where)
        return list(check_transfer(place_run(configured(*overrides), there)))

    on_cpu = ("rollout.transfer=distributed", "rollout.device=cpu")
    (problem,) = found(*on_cpu)
    assert "the trainer computes on a GPU and embedded on the CPU" in str(problem)
    assert not found("rollout.transfer=http_tensor")
    assert not found(*on_cpu, "actor.device=cpu")
    assert not found("rollout.transfer=distributed")
    assert not found("rollout.transfer=distributed", "rollout.backend=sglang", build="gpu")


def test_memory_is_a_note_for_a_trainer_on_the_cpu_if_not_even_the_batch_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config("tiny", ["gconfig.max_new_tokens=3", "gconfig.n_samples=2"])
    resolved = check(config)
    full, batch = (
        estimate(config, resolved.model, problems=given) for given in (None, resolved.problems)
    )
    assert full is not None
    assert batch is not None
    (enough_for_full, _), (enough, _) = full.resident, batch.resident
    assert enough < enough_for_full

    def found(memory_bytes: int, **where: Any) -> list[str]:
        placed = place_run(config, machine(memory_bytes=memory_bytes, **where))
        return memory_notes(
            dataclasses.replace(resolved, machine=placed.machine, trainer=placed.trainer)
        )

    assert not found(enough)
    assert found(enough - 1) == [batch.note(enough - 1)]
    assert not found(enough - 1, gpus=2, cuda=True)
    # Prompts need no tokenizer where full micro-batches fit.
    monkeypatch.setattr("areal_lab.resolve.memory.TextCodec.load", None)
    assert not found(enough_for_full)


def test_a_transfer_that_the_engine_does_not_support_is_refused(configured: Configured) -> None:
    (problem,) = check_transfer(
        place_run(configured("rollout.backend=vllm", "rollout.transfer=distributed"), machine())
    )
    assert str(problem) == (
        "rollout.transfer is 'distributed', but vllm supports folder, adapter only: vLLM's "
        "own weight transfer engines (nccl, ipc) need a GPU; set rollout.transfer=folder"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["actor.use_lora=false", "rollout.pause_mode=abort"],
            "actor.use_lora is false: there is no adapter to send; set actor.use_lora=true",
        ),
        ([], "rollout.pause_mode is 'retract', but must be 'abort' with rollout.transfer=adapter"),
        (
            ["rollout.backend=vllm", "actor.lora_rank=600", "rollout.pause_mode=abort"],
            "actor.lora_rank is 600, but vllm supports adapters up to rank 512",
        ),
        (
            ["rollout.backend=embedded", "rollout.pause_mode=abort"],
            "http_tensor, distributed, cuda_ipc only: only sglang and vllm take adapters",
        ),
    ],
)
def test_adapter_transfer_needs_lora_an_engine_with_adapters_and_abort(
    configured: Configured, overrides: list[str], expected: str
) -> None:
    asked = ["rollout.backend=sglang", "rollout.transfer=adapter", "actor.use_lora=true"]
    (problem,) = check_transfer(place_run(configured(*asked, *overrides), machine()))
    assert expected in str(problem)
    aborts = configured(*asked, "rollout.pause_mode=abort")
    assert not list(check_transfer(place_run(aborts, machine())))
    # A running server is checked when the run attaches to it.
    there = 'rollout.addresses=["http://somewhere:1"]'
    config = configured(*asked, "rollout.pause_mode=abort", "rollout.backend=embedded", there)
    assert not list(check_transfer(place_run(config, machine())))


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (["gconfig.top_p=0.9"], "gconfig.top_p is 0.9, but must be 1 with vllm: "),
        (["gconfig.top_k=20"], "gconfig.top_k is 20, but must be -1 with vllm: "),
        (["gconfig.top_p=0.9", "gconfig.top_k=20"], "; set gconfig.top_p=1 gconfig.top_k=-1"),
    ],
)
def test_log_probs_of_a_different_distribution_than_the_trainers_are_refused(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, cut: list[str], expected: str
) -> None:
    # vLLM need not be installed here.
    monkeypatch.setattr(placement, "this_machine", machine)
    message = refused(configured("rollout.backend=vllm", *cut))
    assert expected in message
    assert "over the tokens that top_p and top_k keep, the trainer's over the whole vo" in message
    check(configured("rollout.backend=vllm"))
    check(configured("rollout.backend=sglang", *cut))
    check(configured(*cut))


def test_greedy_decoding_whose_log_probs_have_no_temperature_is_refused(
    configured: Configured,
) -> None:
    config = configured("rollout.backend=sglang", "gconfig.top_k=1")
    (problem,) = checks.check_sampling(place_run(config, machine()))
    assert problem.message.startswith("gconfig.top_k is 1, but must be -1 or >= 2 with sglang, ")
    assert not list(checks.check_sampling(place_run(configured("gconfig.top_k=1"), machine())))


def test_a_function_is_imported_once_and_again_after_it_was_corrected(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    run = functions.subprocess.run
    monkeypatch.setattr(
        functions.subprocess,
        "run",
        lambda *args, **more: started.append(args) or run(*args, **more),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    config = configured("reward.fn=corrected_reward:reward")
    file = tmp_path / "corrected_reward.py"
    file.write_text("def reward(completion, example): return 1.0 +\n")
    assert "invalid syntax" in refused(config)
    file.write_text("def reward(completion, example): return 1.0\n")
    check(config)
    check(config)
    assert len(started) == 2


def test_a_reference_model_is_found_before_a_run_starts() -> None:
    config = TrainConfig().with_settings({"actor.kl_loss_coef": 0.1, "ref.path": "Adder-75k"})
    (found,) = check_other_models(config)
    assert found.setting == "ref.path"
    assert "did you mean" in found.message
    assert not list(check_other_models(config.with_settings({"ref.path": ""})))
    without = config.with_settings({"actor.kl_loss_coef": 0.0})
    assert not list(check_other_models(without))
    with pytest.raises(ConfigError, match=r"ref\.path is 'Adder-75k', but has no effect without"):
        checks.check_settings(without)
