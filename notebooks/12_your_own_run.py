# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Your own run")

with app.setup:
    import io
    from pathlib import Path

    import altair as alt
    import marimo as mo

    from areal_lab.foreign.read import read_run
    from areal_lab.foreign.record import QUANTITIES, as_json
    from areal_lab.host.terminal import page_text
    from areal_lab.runlog.imported import health, metric_lines, part_rows
    from areal_lab.widgets.chart_parts import BLUE, GREY, RED, on_page, plain_axis, table, words
    from areal_lab.widgets.source import code_of
    from simulator.calibrate.advise import advise

    # The settings and steps of a run as verl prints them. Invented, near a simulated one.
    EXAMPLE = """\
    (TaskRunner pid=7) {'actor_rollout_ref': {'actor': {'ppo_mini_batch_size': 64}, \
    'model': {'path': 'Qwen3-4B'}, \
    'rollout': {'n': 8, 'name': 'vllm', 'tensor_model_parallel_size': 2}}, \
    'data': {'max_response_length': 16384, 'train_batch_size': 128}, \
    'trainer': {'n_gpus_per_node': 8, 'nnodes': 2}}
    """
    STEPS = (
        # step, generation, log-probs, training, weights, whole step, mean length, truncated, reward
        (1, 168.1, 7.4, 31.0, 4.2, 224.9, 3304.5, 0.028, 0.302),
        (2, 147.6, 6.6, 26.4, 4.1, 194.7, 3146.0, 0.027, 0.318),
        (3, 158.9, 6.9, 28.1, 4.1, 208.2, 3281.2, 0.031, 0.341),
        (4, 153.8, 6.8, 27.2, 4.2, 201.9, 3198.7, 0.030, 0.352),
        (5, 151.2, 6.7, 26.8, 4.1, 198.8, 3190.3, 0.029, 0.371),
        (6, 156.0, 6.8, 27.5, 4.2, 204.6, 3243.1, 0.032, 0.369),
    )
    LINE = (
        "step:{} - timing_s/gen:{} - timing_s/old_log_prob:{} - timing_s/update_actor:{} - "
        "timing_s/update_weights:{} - timing_s/step:{} - response_length/mean:{} - "
        "response_length/clip_ratio:{} - critic/score/mean:{} - prompt_length/mean:180.0"
    )


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Your own run

    *Where does the time of your run go, and what would asynchrony give on the same GPUs?*

    **The usual answer:** generation takes most of a step, so add GPUs that generate. **But**
    engines spend much of that time waiting for the longest response, and asynchrony uses it without
    another GPU. Drop a log: nothing leaves your computer.
    """)
    return


@app.cell
def _():
    upload = mo.ui.file(
        filetypes=[".txt", ".log", ".jsonl", ".json", ".csv", ".out", ".gz"],
        label="A log of verl, TRL, slime, ...",
    )
    return (upload,)


@app.cell
def _():
    settings = mo.ui.text(
        value="gpus=16xH100",
        label="What the log does not say",
        placeholder="gpus=16xH100 model=Qwen/Qwen3-4B",
        full_width=True,
    )
    return (settings,)


@app.cell
def _():
    show = mo.ui.dropdown(["seconds", "share of the step"], value="seconds", label="Show")
    return (show,)


@app.cell(hide_code=True)
def _(show, upload):
    _example = mo.md("<small>Until you give one: six steps of verl, invented.</small>")
    _given = [] if upload.value else [_example]
    mo.hstack([upload, show, *_given], justify="start", align="center", gap=2, wrap=True)
    return


@app.cell
def _(upload):
    _text = EXAMPLE + "".join(f"{LINE.format(*step)}\n" for step in STEPS)
    _given = upload.contents() if upload.value else _text.encode()
    try:
        imported = read_run([Path("-")], stdin=io.BytesIO(_given))
    except ValueError as _error:
        mo.stop(True, mo.callout(page_text(str(_error)), "danger"))
    mo.stop(
        imported.refused is not None or not imported.steps,
        mo.callout(page_text(imported.refused or "the log has no step"), "danger"),
    )
    log = as_json(imported)
    lines = metric_lines(imported)
    return imported, lines, log


@app.cell(hide_code=True)
def _(imported, lines, show):
    _parts = part_rows(imported, lines)
    mo.stop(
        not _parts,
        mo.callout("The log has no seconds per step, so there is no picture of them.", "warn"),
    )
    _order = list(dict.fromkeys(row["part"] for row in _parts))
    _shares = show.value != "seconds"
    _up = plain_axis(tickCount=5, format="%" if _shares else "~s")
    _bars = (
        alt.Chart(table(_parts))
        .mark_bar()
        .encode(
            alt.X("step:O", title="training step", axis=plain_axis(labelAngle=0)),
            alt.Y("seconds:Q", title=show.value, axis=_up).stack(
                "normalize" if _shares else "zero"
            ),
            alt.Color("part:N", title=None, sort=_order)
            .scale(scheme="tableau10")
            .legend(orient="top", labelLimit=300, labelFontSize=13, symbolSize=200, columns=1),
            alt.Order("place:Q"),
            tooltip=["step:O", "part:N", alt.Tooltip("seconds:Q", format=",.1f")],
        )
    )
    on_page(_bars, height=260)
    return


@app.function(hide_code=True)
def setting_words(settings):
    """Settings of an imported run in words with units."""
    units = {
        "model": "{}",
        "engine": "engine {}",
        "gpus": "{} GPUs",
        "rollout_gpus": "{} GPUs that generate",
        "trainer_gpus": "{} GPUs that train",
        "engine_tp": "{} GPUs per engine",
        "prompts_per_step": "{} prompts per step",
        "samples_per_prompt": "{} responses per prompt",
        "samples_per_step": "{} responses per step",
        "max_response": "responses of up to {} tokens",
        "minibatches": "{} optimizer steps per step",
        "step_time_mean_s": "{} s per step on average",
    }
    shown = {name: f"{v:,}" if isinstance(v, int) else str(v) for name, v in settings.items()}
    return [
        units.get(name, name.replace("_", " ") + " {}").replace("{}", value)
        for name, value in shown.items()
    ]


@app.cell(hide_code=True)
def _(imported, log):
    _facts = [
        str(imported.framework),
        imported.mode or "schedule unknown",
        f"{len(imported.steps)} steps",
        *setting_words(imported.settings),
    ]
    _missing = "\n".join(f"- {page_text(QUANTITIES.get(name, name))}" for name in log["missing"])
    mo.vstack(
        [
            mo.md(page_text(", ".join(_facts) + ".")),
            mo.accordion({f"Not in the log: {len(log['missing'])} quantities": mo.md(_missing)})
            if _missing
            else mo.md("The log has every quantity that is looked for."),
        ]
    )
    return


@app.cell(hide_code=True)
def _(imported, lines):
    _alarms = health(imported, lines)
    mo.vstack(
        [mo.callout(page_text(str(alarm)), "warn") for alarm in _alarms]
        or [mo.md("What the log has raises no alarm.")]
    )
    return


@app.cell(hide_code=True)
def _(settings):
    mo.vstack(
        [
            mo.md(r"""
    ## Other schedules on the same GPUs

    The simulator is fitted to your steps: a factor on training, a factor on generation, and the
    seconds that are then missing. Then each schedule is simulated with up to six splits of your
    GPUs between engines and trainer, and the best split counts: the search starts at the best split
    of another schedule and ends where both neighbors are slower.
    """),
            settings,
        ]
    )
    return


@app.cell
def _(log, settings):
    with mo.status.progress_bar(
        total=24, title="Simulating schedules", remove_on_exit=True
    ) as _bar:
        try:
            advice = advise(log, settings.value.split(), progress=lambda _: _bar.update())
        except ValueError as _error:
            mo.stop(True, mo.callout(page_text(str(_error)), "warn"))
    return (advice,)


@app.cell(hide_code=True)
def _(advice):
    _logged = advice.observed.step_s
    rows = [
        {
            "schedule": option.name,
            "step": option.step_s["mean"],
            "low": option.step_s["low"],
            "high": option.step_s["high"] or option.step_s["mean"],
            "text": f"{option.step_s['mean']:,.0f} s, x{option.gain['mean']:.2f}",
        }
        for option in advice.options
    ]
    _y = alt.Y("schedule:N", title=None, sort=None, axis=plain_axis())
    _right = 1.25 * max(_logged, *(row["high"] for row in rows))
    _x = alt.X("step:Q", title="seconds per training step", axis=plain_axis(tickCount=6))
    _bars = alt.Chart(table(rows)).encode(_y)
    _line = alt.Chart(table([{"logged": _logged, "text": f"as logged: {_logged:,.0f} s"}]))
    on_page(
        _bars.mark_bar(color=BLUE, opacity=0.75).encode(_x.scale(domain=[0, _right], nice=False))
        # The interval in the lower half of the bar, below its number.
        + _bars.mark_rule(color=GREY, strokeWidth=3, yOffset=12).encode(x="low:Q", x2="high:Q")
        + words(_bars, align="left", dx=8, dy=-7).encode(x=alt.value(0), text="text:N")
        + _line.mark_rule(color=RED, strokeWidth=2).encode(x="logged:Q")
        + words(_line, align="right", dx=-6).encode(x="logged:Q", y=alt.value(-8), text="text:N"),
        height=220,
    )
    return (rows,)


@app.cell(hide_code=True)
def _(advice):
    _best = advice.options[0]
    _low, _high = _best.gain["low"], _best.gain["high"]
    _sure = "the interval does not contain 1" if _low > 1 else "the interval contains 1"
    _changes = "\n".join(
        f"- {change.name}: x{change.gain:.2f} samples per hour; {change.note}"
        for change in advice.changes
    )
    mo.md(
        f"""
    The fastest is **{_best.name}**, **{_best.gain["mean"]:.2f} times** as fast as logged
    ({_low:.2f} to {_high:.2f}; {_sure}). Its tokens are {_best.lag_mean:.1f} versions old on
    average. Compare what a larger eta adds with the age that it costs. The grey lines are 90 %
    intervals that contain the error of such predictions on measured runs of other systems.

    One more change of this option:

    {_changes or "- none of those that were tried gains 2 %"}
    """
    )
    return


@app.cell(hide_code=True)
def _(advice):
    _lines = [*advice.fit.lines, *advice.observed.assumed, *advice.impossible]
    mo.vstack(
        [
            mo.md("## The fit, and what is assumed"),
            mo.md("\n".join(f"- {page_text(line)}" for line in _lines)),
            mo.md(f"The same by hand:\n\n```\n{advice.command(advice.options[0])}\n```"),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Try this

    - Add `workload.answers.max_tokens=8192` to the settings: who gains more from shorter
      responses, your synchronous run or the asynchronous one?
    - Write `gpus=32xH100`: the fit stays that of your 16 GPUs only if the number is right, so look
      at the factors below the picture. A factor far from 1 says that a setting is wrong.
    - Give a log of an asynchronous run, with `rollout_gpus=` and `eta=`: is synchronous slower?
    - On the command line: `areal-lab import run.log --advise gpus=16xH100`, and `--out` for a run
      folder that the other notebooks read (docs/import.md).
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.vstack(
        [
            mo.md("## The code"),
            mo.accordion(code_of(advise, health)),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** about 8 CPU s, 1 s of it before the first picture, without torch and
    without a GPU.
    """)
    return


if __name__ == "__main__":
    app.run()
