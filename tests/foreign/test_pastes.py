"""Damage that pastes of real logs have: shapes of it with invented numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import as_json


def imported(text: str) -> dict[str, Any]:
    """A log from standard input."""
    return as_json(read_run([Path("-")], stdin=io.BytesIO(text.encode())))


def test_a_cut_last_number_does_not_hide_the_three_decimals_of_old_verl() -> None:
    log = (
        "(TaskRunner pid=7) step:9 - actor/entropy_loss:0.412 - actor/pg_clipfrac:0.000"
        " - actor/kl_loss:0.031 - actor/lr:0.000 - critic/score/mean:0.250"
        " - critic/values/max:0.7\n"
    )
    run = imported(log)
    (step,) = run["steps"]
    assert run["version"] == "0.4 or older"
    assert step["clip_fraction"] is step["learning_rate"] is None
    assert (step["entropy"], step["reward_mean"], step["reference_kl"]) == (0.412, 0.25, 0.031)
    assert "critic/values/max" not in step.get("other", {})
    assert run["unread"] == 1


def test_a_validation_inside_a_record_does_not_complete_its_last_number() -> None:
    log = (
        "(TaskRunner pid=7) step:9 - actor/entropy_loss:0.412 - actor/lr:0.000"
        " - val-core/set/reward/mean@1:0.750 - critic/score/mean:0.250 - timing_s/gen:29.125"
        " - timing_s/old_log_prob:6{}\n"
    )
    for cut, expected in (("", None), (".", None), (".5", None), (".500", 6.5)):
        (step,) = imported(log.format(cut))["steps"]
        assert step.get("old_logprob_s") == expected
        assert (step["generation_s"], step["reward_mean"]) == (29.125, 0.25)


def test_marks_of_code_around_a_record_are_no_part_of_it() -> None:
    record = "(main_task pid=7) step:2 - critic/score/mean:0.125 - timing_s/step:77.125"
    for mark in ("`", "```"):
        run = imported(f"it stops here\n{mark}{record} {mark}\n")
        assert run["steps"][0]["step_time_s"] == 77.125
        assert run["mode"] == "synchronous"


def test_a_dictionary_that_was_broken_behind_a_comma_is_one_step() -> None:
    log = (
        "{'loss': 0.01, 'num_tokens': 4096.0, 'completions/mean_length': 91.5, \n"
        "'rewards/format/mean': 0.5, 'rewards/format/std': 0.1, \n"
        "'reward': 0.5, 'reward_std': 0.1, 'completion_length': 120.0, 'kl': 0.002}\n"
    )
    run = imported(log)
    (step,) = run["steps"]
    assert run["framework"] == "unsloth"  # its own length stands beside TRL's
    assert (step["response_length_mean"], step["reward_mean"]) == (91.5, 0.5)
    first, second = imported(log + log.removeprefix("{"))["steps"]
    assert first["response_length_mean"] == second["response_length_mean"] == 91.5


def test_a_lost_quote_loses_its_pair_and_not_the_rest() -> None:
    log = (
        "(TrainRayActor pid=5) [2026-01-05 10:00:00] m.py:4 - perf 3: {'perf/sleep_time': 2.5"
        ", 'perf/wake\n"
        "_up_time': 1.5, 'perf/train_wait_time': 9.25, 'perf/actor_train_time':_4.5, 'perf/log_pr\n"
        "obs_time': 0.75, 'perf/train_timeT: 6.5, 'perf/log_probs_tflops': 11.5, 'perf/actor_tr\n"
        "ain_tflops': 33.5, 'perf/tok_per_s': 210.0, 'perf/step_time': 15.75, 'perf/rat\n"
        "io':_0.5}\n"
    )
    (step,) = imported(log)["steps"]
    assert (step["training_s"], step["old_logprob_s"], step["step_time_s"]) == (4.5, 0.75, 15.75)


def test_the_mean_entropy_of_swift_is_the_entropy() -> None:
    log = (
        '{"loss": 0.1, "reward": 0.5, "entropy/mean": 0.75, "entropy/max": 1.5, '
        '"step_time": 12.5, "global_step/max_steps": "3/90", "elapsed_time": "1m 2s"}\n'
    )
    assert imported(log)["steps"][0]["entropy"] == 0.75


def test_the_bar_on_a_line_of_its_own_numbers_and_times_the_steps() -> None:
    def record(bar: str, reward: float) -> str:
        return f" 1%|  | {bar}]\n{' ' * 40}\n{{'loss': 0.1, 'reward': {reward}, 'epoch': 0.0}}\n\n"

    log = record("7/90 [01:10<13:50, 10.0s/it", 0.25) + "INFO fell asleep\n" * 30
    log += " 1%|  | 7/90 [01:10<13:50, 10.0s/it]\n" + record("8/90 [01:22<13:40, 11.0s/it", 0.5)
    first, second = imported(log)["steps"]
    assert (first["step"], second["step"], second["step_time_s"]) == (7, 8, 12.0)
    # The paste begins with a record whose bar is above it.
    third = record("9/90 [01:33<13:40, 11.0s/it", 0.5)
    numbers = [one["step"] for one in imported(log[log.index("{") :] + third)["steps"]]
    assert numbers == [7, 8, 9]


def test_a_bar_of_the_engine_is_not_that_of_the_trainer() -> None:
    log = (
        "Processed prompts: 100%|####| 8/8 [00:05<00:00,  1.5it/s]\n"
        "{'loss': 0.1, 'reward': 0.25, 'epoch': 0.0}\n"
    )
    run = imported(log)
    assert run["steps"][0]["step"] == 1
    assert "max_steps" not in run
    run = imported(log.replace("Processed prompts", "Train").replace("8/8", "8/90"))
    assert (run["steps"][0]["step"], run["max_steps"]) == (8, 90)


def test_a_number_of_a_cut_record_without_its_exponent_is_dropped() -> None:
    head = "step:3 - actor/entropy:0.31245678901234567 - critic/score/mean:0.5123456789012345"
    head += " - timing_s/gen:41.518811538442971 - "
    for cut in ("timing_s/reward:5.07", "timing_s/step:54", "actor/lr:1e-0"):
        (step,) = imported(f"{head}{cut}\n")["steps"]
        assert not {"reward_s", "step_time_s", "learning_rate"} & {
            name for name, value in step.items() if value is not None
        }
        assert step["generation_s"] == 41.518811538442971
    (step,) = imported(f"{head}response_length/max:1024.0\n")["steps"]
    assert step["response_length_max"] == 1024


def test_a_value_of_prime_rl_without_its_unit_or_exponent_is_cut() -> None:
    line = "10:0{}:00 SUCCESS Step {} | Time: 70.25s | Reward: 0.5000 | "
    log = line.format(1, 1) + "Throughput: 2400.5 tokens/s | Seq. Length: 300.5 tokens/sample\n"
    whole, cut = imported(log + line.format(2, 2) + "Throughput: 24\n")["steps"]
    assert whole["tokens_per_s_total"] == 2400.5
    assert cut.get("tokens_per_s_total") is None
    trainer = "10:01:00 SUCCESS Step 1 | Time: 70.25s | Loss: 0.1000 | Entropy: 0.3000 | LR: 1.0"
    assert imported(trainer + "\n")["steps"][0].get("learning_rate") is None
    assert imported(trainer + "0e-06\n")["steps"][0]["learning_rate"] == 1e-6


def test_the_megatron_lines_of_swift_have_the_names_of_trl() -> None:
    log = (
        " iteration        4/     90 | elapsed time per iteration (ms): 81500.0 |"
        " reward: 5.0E-01 | reward_std: 1.25E-01 | frac_reward_zero_std: 2.5E-01 |"
        " completions/min_length: 6.1E+01 |\n"
    )
    (step,) = imported(log)["steps"]
    assert (step["reward_std"], step["zero_variance_fraction"]) == (0.125, 0.25)
    assert (step["response_length_min"], step["step_time_s"]) == (61, 81.5)


ROWS = (
    ("Step", "Training Loss", "reward", "completions / mean_length", "kl"),
    ("1", "0.000000", "0.250000", "81.500000", "0.000000"),
    ("2", "0.000100", "0.500000", "90.250000", "0.001250"),
)


def test_tables_of_notebooks_between_tabs_bars_or_tags() -> None:
    def html(between: str) -> str:
        rows = (between.join(f"<td>{one}</td>" for one in row) for row in ROWS)
        return between.join(f'<tr style="text-align: left;">{between}{row}</tr>' for row in rows)

    bars = [" | ".join(row) for row in ROWS]
    tables = (
        "\n".join("\t".join(row) for row in ROWS),
        "\n".join([bars[0], " -- | -- | -- | -- | --", *bars[1:]]),
        "\n".join(f"| {one} |" for one in bars),
        f"<table>{html('')}</table>",
        f"<table>\n{html(chr(10))}\n</table>",
    )
    for table in tables:
        run = imported(f"my output\n{table}\n")
        assert run["framework"] == "unsloth"
        assert [one["reward_mean"] for one in run["steps"]] == [0.25, 0.5]
        assert [one["response_length_mean"] for one in run["steps"]] == [81.5, 90.25]
        assert run["steps"][1]["reference_kl"] == 0.00125
    cut = imported("\n".join(bars)[:-4] + "\n")["steps"][1]
    assert cut["reward_mean"] == 0.5
    assert cut.get("reference_kl") is None


def test_blocks_of_nemo_rl_without_a_number_are_steps_without_one() -> None:
    block = (
        "📊 Training Results:\n  • Loss: 0.0200\n  • Avg Reward: {}\n  • Buffer Size: 32\n\n"
        "⏱️  Timing:\n  • Total step time: {}s\n  • exposed_generation: 20.50s (41.0%)\n"
        "  • policy_training: 18.25s (36.5%)\n  • weight_sync: 0.25s (0.5%)\n\n"
    )
    run = imported(block.format("0.2500", "50.00") + block.format("0.5000", "51.50"))
    assert run["mode"] == "asynchronous"
    assert [one["step"] for one in run["steps"]] == [None, None]
    assert [one["reward_mean"] for one in run["steps"]] == [0.25, 0.5]
    assert [one["step_time_s"] for one in run["steps"]] == [50.0, 51.5]
    assert [one["wait_for_batch_s"] for one in run["steps"]] == [20.5, 20.5]
    # Where others have a number, it is not known where one without it belongs.
    numbered = imported(
        block.format("0.1000", "9.00") + "==== Step 7/9 ====\n" + block.format("0.2000", "8.00")
    )
    assert [one["step"] for one in numbered["steps"]] == [7]
    assert numbered["unread"] == 1


def test_supervised_fine_tuning_with_slime_is_refused() -> None:
    rollout = "[2026-02-01 10:00:00] rollout.py:7 - perf 4: {'rollout/response_len/mean': 91.5}\n"
    step = "[2026-02-01 10:00:09] model.py:6 - step 4: {'train/loss': 1.5, 'train/grad_norm': 2.5"
    run = imported(f"{rollout}{step}}}\n")
    assert run["steps"] == []
    assert "supervised" in run["refused"]
    for more in (", 'train/pg_loss': 0.5}\n", "\n"):  # of RL, or cut before that
        run = imported(f"{rollout}{step}{more}")
        assert run["steps"][0]["response_length_mean"] == 91.5


def test_lines_of_prime_rl_in_a_printed_list() -> None:
    line = "10:0{0}:00 SUCCESS Step {0} | Time: 7{0}.25s | Reward: 0.{0}000 | Async Level: 1"
    steps = "', '', '10:02:01    INFO Starting step', '".join(line.format(one) for one in (1, 2, 3))
    log = f"E  AssertionError: ['bar: 50%|##  | 4/8 [00:01<00:01]', '{steps}', '10:04:00 SUCCE\n"
    found = imported(log)["steps"]
    assert [one["step"] for one in found] == [1, 2, 3]
    assert [one["step_time_s"] for one in found] == [71.25, 72.25, 73.25]
    assert [one["reward_mean"] for one in found] == [0.1, 0.2, 0.3]


def test_a_last_line_that_was_cut_gives_no_shorter_number() -> None:
    verl = "step:{} - critic/score/mean:0.25 - timing_s/gen:31.5"
    verl += " - perf/throughput:439.2657222378585\n"
    later = verl.format(2)
    for cut in (later[:-8], later.partition("1.5")[0], later.partition("31.5")[0]):
        second = imported(verl.format(1) + cut + "\n")["steps"][1]
        assert second.get("tokens_per_s_per_gpu") is None
        assert second["reward_mean"] == 0.25
    (step,) = imported("step:1 - critic/score/mean:0.25 - timing_s/gen:7\n")["steps"]
    assert step.get("generation_s") is None
    nemo = "==== Step 3/9 ====\n📊 Training Results:\n  • Loss: 0.0200\n  • Avg Reward: 0.2500\n"
    assert imported(nemo)["steps"][0]["reward_mean"] == 0.25
    assert (
        imported(nemo + "  • Mean Generation Length: 11\n")["steps"][0].get("response_length_mean")
        is None
    )
    prime = "10:01:00 SUCCESS Step 1 |  8.4s | Reward 0.4219 | Trainable 201/25"
    assert imported(prime + "\n")["steps"][0].get("samples") is None
    assert imported(prime + "6 (78.5%)\n")["steps"][0]["samples"] == 256
    trainer = "10:01:00 SUCCESS Step 1 |  8.4s | Loss 0.0031 | Entropy 0.2950 | Mismatch KL 0."
    assert imported(trainer + "\n")["steps"][0].get("drift_kl") is None


def test_a_record_of_verl_with_a_pair_a_line_is_one_record() -> None:
    log = (
        "step:12\n - actor/entropy:0.25\n - critic/score/mean:-0.0625\n"
        " - timing_s/agent_loop/slowest/num_preempted:-1\n - timing_s/gen:24.5\n"
        " - timing_s/reward:3.5e-05\n - timing_s/step:93.5\n - perf/throughput:2932.25\n"
        "- the step took long: 93.5 s\n"
    )
    (step,) = imported(log)["steps"]
    assert (step["step"], step["entropy"], step["reward_mean"]) == (12, 0.25, -0.0625)
    assert (step["reward_s"], step["step_time_s"]) == (3.5e-05, 93.5)
    assert step["tokens_per_s_per_gpu"] == 2932.25
    cut = imported(log[: log.index("2.25")])
    assert "tokens_per_s_per_gpu" not in cut["steps"][0]
    assert cut["unread"] == 1


def test_dictionaries_of_slime_with_a_pair_a_line_are_read_only_with_their_number() -> None:
    pairs = (
        "  'perf/actor_train_time': 65.5,\n  'perf/train_time': 128.5,\n  'perf/step_time': 138.5\n"
    )
    (step,) = imported(f"it says\n```\nperf 3: {{\n{pairs}}}\n```\n")["steps"]
    assert (step["step"], step["training_s"], step["step_time_s"]) == (3, 65.5, 138.5)
    assert imported(f"for example\n```python\n{{\n{pairs}}}\n```\n")["refused"] is not None


def test_output_that_was_buffered_does_not_number_steps_by_bars_beside_it() -> None:
    records = [
        f"{{'loss': 0.0, 'rewards/a': 0.5, 'reward': 0.5, 'kl': 0.{n:03d}, 'epoch': {n / 50:.2f}}}"
        for n in range(1, 46)
    ]
    bar = "\r 33%|###   | {0}/1000 [1:00:0{1}<2:00:00, 18.00s/it]\n"
    log = (
        bar.format(500, 0) + "\n".join(records[:30]) + bar.format(800, 5) + "\n".join(records[30:])
    )
    run = imported(log + "\n")
    # 15 records are 300 steps, so that the last would be step 1380 of 1000
    assert [one["step"] for one in run["steps"]] == [10 * n for n in range(1, 46)]
    assert any("10 apart" in one for one in run["notes"])


@pytest.mark.parametrize("apart", [1, 5])
@pytest.mark.parametrize("size", [500, 1100, 2000])
@pytest.mark.parametrize("ended", [True, False])
def test_output_in_bursts_is_numbered_by_what_the_bursts_have(
    apart: int, size: int, ended: bool
) -> None:
    """Records wait in a buffer of `size` characters, and bars do not, as with `nohup`."""
    log, buffer = "", ""
    for step in range(1, 40 * apart + 1):
        log += f"\r  1%|   | {step}/{40 * apart} [{step // 6:02d}:{step % 6}0<2:00:00, 10.00s/it]"
        if step % apart == 0:
            record = f"{{'loss': 0.0, 'reward': 0.{step:03d}, 'kl': 0.1, 'epoch': 0.0}}\n"
            if len(buffer) + len(record) > size:
                log, buffer = log + "\n" + buffer, ""
            buffer += record
    run = imported(log + "\n" + (buffer if ended else ""))
    assert len(run["steps"]) > 8
    alone = size == 2000 and not ended  # one burst may be a paste, which begins anywhere
    for one in run["steps"]:
        assert one["step"] is None if alone else one["reward_mean"] == one["step"] / 1000
        assert one.get("step_time_s") is None


def test_bars_that_do_not_stand_beside_records_give_no_numbers() -> None:
    bar = "\r 1%|   | {0}/900 [0:10<2:00:00, 10.00s/it]\n"
    record = "{'loss': 0.0, 'reward': 0.5, 'kl': 0.1, 'epoch': 0.0}\n"
    run = imported(bar.format(40) + record * 3 + bar.format(47) + record + bar.format(200) + record)
    assert [one["step"] for one in run["steps"]] == [None] * 5


def test_text_behind_a_table_of_a_notebook_is_no_row() -> None:
    cells = "<tr><td>{}</td><td>0.1</td><td>0.5</td></tr>"
    heading = "<tr><th>Step</th><th>Training Loss</th><th>reward</th></tr>"
    rows = "".join(cells.format(n) for n in (1, 2))
    run = imported(f"<table>\n{heading}\n{rows}\n</table>\n5\t7.5\t0.25\n6 | 15\n")
    assert [one["step"] for one in run["steps"]] == [1, 2]
    text = "Step\tTraining Loss\treward\n1\t0.1\t0.5\n2\t0.1\t0.75\n"
    run = imported(f"{text}3\tapples\tand 2 pears\n" + "a line\n" * 50 + "4\t0.5\t0.25\n")
    assert [(one["step"], one["reward_mean"]) for one in run["steps"]] == [(1, 0.5), (2, 0.75)]


def test_trl_trains_also_with_ppo_and_online_preferences() -> None:
    common = "'objective/kl': 10.5, 'objective/entropy': 99.5, 'objective/scores': 1.625"
    ppo = f"{{'eps': 1, {common}, 'policy/clipfrac_avg': 0.0625, 'policy/entropy_avg': 0.75"
    run = imported(f"{ppo}, 'lr': 2e-06, 'episode': 816, 'epoch': 0.91}}\n")
    (step,) = run["steps"]
    assert run["framework"] == "trl"
    assert (step["reward_mean"], step["clip_fraction"], step["entropy"]) == (1.625, 0.0625, 0.75)
    assert step.get("reference_kl") is None  # a sum over tokens
    chosen = "'rewards/chosen': 0.5, 'rewards/margins': 0.25, 'logps/chosen': -90.5, 'epoch': 0.1}"
    (step,) = imported(f"{{'loss': 0.5, {common}, {chosen}\n")["steps"]
    assert step["reward_mean"] == 1.625
    assert imported(f"{{'loss': 0.5, {chosen}\n")["refused"] is not None


def test_settings_behind_the_history_of_a_trainer_state_are_no_lost_records() -> None:
    run = imported(
        '{\n "epoch": 0.5,\n "log_history": [\n'
        '  {"reward": 0.5, "kl": 0.1, "completion_length": 9, "step": 1},\n'
        '  {"reward": 0.75, "kl": 0.1, "completion_length": 18, "step": 2}\n ],\n "max_steps": 9,\n'
        ' "stateful_callbacks": {"Control": {"args": {"should_log": false}, "attributes": {}}}\n}\n'
    )
    assert ([one["step"] for one in run["steps"]], run["unread"]) == ([1, 2], 0)


def test_code_and_diffs_are_no_logs() -> None:
    for code in ("EXAMPLE = {0}", "    return {0}", "print({0})"):
        text = code.format("{'loss': 0.1, 'reward': 0.5, 'completions/mean_length': 10.5}")
        assert imported(f"import os\n{text}\n")["refused"] is not None
    record = "step:1 - critic/score/mean:0.{} - timing_s/step:10.5\n"
    for head in ("diff --git a/log.txt b/log.txt\n--- a/log.txt\n", "--- a/log.txt\n"):
        diff = f"{head}+++ b/log.txt\n@@ -1 +1 @@\n-{record.format(5)}+{record.format(6)}"
        assert "diff" in imported(diff)["refused"]


def test_records_with_names_that_everyone_uses_are_of_no_framework() -> None:
    rows = "".join(
        f'{{"step": {n}, "lr": 1e-06, "loss": 0.1, "reward_mean": 0.5, "reward_std": 0.1, '
        f'"kl": 0.0, "entropy": 0.5, "grad_norm": 1.5}}\n'
        for n in (0, 10)
    )
    assert imported(rows)["refused"] is not None


def test_a_paste_that_begins_behind_a_bar_has_no_step_numbers() -> None:
    record = "{'loss': 0.0, 'reward': 0.5, 'kl': 0.1, 'epoch': 0.0}\n"
    run = imported("  1%|   | 5/900 [0:50<2:00:00, 10.00s/it]\n" + record * 4)
    assert [one["step"] for one in run["steps"]] == [None] * 4


def test_a_zero_of_six_decimals_is_unknown() -> None:
    rows = "".join(
        f"│ {name:<20} │ {value:<8} │\n"
        for name, value in (
            ("env/all/reward/total", "0.500000"),
            ("optim/entropy", "0.000000"),
            ("optim/lr", "0.000040"),
            ("progress/batch", "7"),
        )
    )
    rule = "─" * 22
    (step,) = imported(f"┃ Metric               ┃ Value    ┃\n{rows}└{rule}┴──────────┘\n")["steps"]
    assert (step["step"], step["reward_mean"], step["learning_rate"]) == (7, 0.5, 4e-05)
    assert step["entropy"] is None
