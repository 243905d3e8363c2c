# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[train,notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Train live")

with app.setup:
    import os
    from datetime import datetime
    from pathlib import Path

    import marimo as mo

    from areal_lab import AttachedRun, attach_run, live_runs, load_config, read_run, start_run
    from areal_lab.capacity import admissible
    from areal_lab.config.problem import ConfigError
    from areal_lab.control.coordinator import Coordinator
    from areal_lab.engines.launch.environments import installed
    from areal_lab.host.terminal import page_text
    from areal_lab.live.mailbox import RequestRefused, RunEnded
    from areal_lab.live.snapshot import snapshot_of
    from areal_lab.runlog.incidents import in_words, requests
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.lags import lag_bars
    from areal_lab.widgets.run_charts import (
        idle_chart,
        lag_chart,
        recent_lags,
        reward_chart,
        steps_of,
    )
    from areal_lab.widgets.source import code_of
    from areal_lab.widgets.strip import Strip
    from areal_lab.widgets.timeline import timeline_rows


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Train live

    *What does an asynchronous run do at this moment, and what happens when you pause it, or change
    eta, while it runs?*

    **The usual answer:** when eta is set to 0, the next batch is fresh. **But** in this recorded
    run eta went from 8 to 0 six batches ago, and every token is still 8 versions old. Tokens beyond
    the bound are red. **Move the time: when are the tokens fresh, and why then?** Start your own
    run, and try it.
    """)
    return


@app.cell
def _():
    recorded = read_run(Path(__file__).parent / "data" / "requests").log
    return (recorded,)


@app.cell
def _():
    moment = 25.4  # seconds of the recorded run, six batches after eta became 0
    return (moment,)


@app.cell
def _(moment, recorded):
    get_started, set_started = mo.state("")
    get_said, set_said = mo.state("")
    # The charts are drawn again when a step was added, not at every look.
    get_drawn, set_drawn = mo.state(recorded.until(moment))
    drawn = {}
    return drawn, get_drawn, get_said, get_started, set_drawn, set_said, set_started


@app.cell
def _():
    # Relative, so that an exported page does not name the folders of this machine.
    _default = os.path.relpath(Path(__file__).parents[1] / "runs")
    runs_folder = mo.ui.text(
        value=str(mo.cli_args().get("runs") or _default), label="folder of runs"
    )
    return (runs_folder,)


@app.cell
def _():
    look_again = mo.ui.button(label="look for live runs")
    return (look_again,)


@app.cell
def _(get_started, look_again, runs_folder):
    (get_started(), look_again.value)
    alive = {run.folder.name: str(run.folder) for run in live_runs(runs_folder.value)}
    choices = {**alive, "recorded: eta 8, then 0, then 8, a pause, a stop": ""}
    which = mo.ui.dropdown(choices, value=next(iter(choices)), label="show")
    return alive, which


@app.cell
def _(moment, recorded):
    now = mo.ui.slider(
        *(1.0, recorded.end_s, 0.1, moment),
        label="time in the recorded run (s)",
        show_value=True,
        full_width=True,
    )
    return (now,)


@app.cell
def _():
    tick = mo.ui.refresh(options=["0.5s", "1s", "3s"], default_interval="1s", label="look every")
    return (tick,)


@app.cell
def _(which):
    run = attach_run(which.value) if which.value else None
    return (run,)


@app.cell
def _():
    eta = mo.ui.number(0, 64, 0.5, value=0, label="eta")
    return (eta,)


@app.cell
def _(eta, run, set_said):
    def ask(what, *given):
        try:
            reply = getattr(run, what)(*given)
        except (RequestRefused, RunEnded, TimeoutError) as error:
            reply = str(error)
        set_said(f"{what.removeprefix('set_')}: {reply}")

    buttons = mo.hstack(
        [
            mo.ui.button(label="Pause", on_click=lambda _: ask("pause")),
            mo.ui.button(label="Resume", on_click=lambda _: ask("resume")),
            eta,
            mo.ui.button(label="Set eta", on_click=lambda _: ask("set_eta", eta.value)),
            mo.ui.button(label="Stop", kind="danger", on_click=lambda _: ask("stop")),
        ],
        justify="start",
        gap=0.7,
        wrap=True,
    )
    return (buttons,)


@app.cell
def _():
    task = mo.ui.dropdown(
        {
            "add numbers below 100, 75,000 parameters (1 GB)": "tiny",
            "arithmetic, SmolLM2 135M (5 GB)": "arithmetic",
        },
        value="add numbers below 100, 75,000 parameters (1 GB)",
        label="train",
    )
    return (task,)


@app.cell
def _():
    engine = mo.ui.dropdown(
        [name for name in ("embedded", "sglang", "vllm") if installed(name)],
        value="embedded",
        label="engine",
    )
    return (engine,)


@app.cell
def _():
    first_eta = mo.ui.slider(0, 16, 1, 8, label="eta (versions)", show_value=True)
    return (first_eta,)


@app.cell
def _():
    ahead = mo.ui.switch(value=True, label="slow the trainer, so that generation runs ahead")
    return (ahead,)


@app.cell
def _():
    length = mo.ui.number(1, 100_000, 1, value=1000, label="training steps")
    return (length,)


@app.cell
def _():
    start = mo.ui.run_button(label="Start a run", kind="success")
    return (start,)


@app.cell(hide_code=True)
def _(ahead, engine, first_eta, length, runs_folder):
    start_form = mo.vstack(
        [
            mo.md(
                "It has its own processes. Close this page or restart the notebook: it continues, "
                "and *show* offers it again; `areal-lab runs` lists it. SGLang and vLLM are "
                "offered where they are installed, and take a minute to start."
            ),
            mo.hstack([engine, first_eta], justify="start", gap=1.5, wrap=True),
            mo.hstack([ahead, length], justify="start", gap=1.5, wrap=True),
            runs_folder,
        ]
    )
    return (start_form,)


@app.cell(hide_code=True)
def _(alive, buttons, get_said, look_again, now, run, start, start_form, task, tick, which):
    mo.vstack(
        [
            mo.hstack(
                [which, look_again, mo.md(f"alive at the last look: {len(alive)}")],
                justify="start",
                gap=1,
                wrap=True,
            ),
            now if run is None else mo.hstack([buttons, tick], wrap=True),
            mo.md("" if run is None else page_text(get_said()) or "Ask the run: it replies here."),
            mo.hstack([start, task], justify="start", gap=1, wrap=True),
            mo.accordion({"Engine, eta and length of a run that you start": start_form}),
        ]
    )
    return


@app.cell
def _(ahead, engine, first_eta, length, runs_folder, set_started, start, task):
    mo.stop(not start.value)
    # As in the recorded run: small micro-batches take the trainer longer, and change no result.
    slower = ["actor.max_tokens_per_mb=24", "rollout.max_concurrent_rollouts=96"]
    settings = [
        f"rollout.backend={engine.value}",
        f"eta={first_eta.value}",
        f"total_train_steps={length.value}",
        f"run_dir={runs_folder.value}",
        "evaluation.max_problems=0",
        *(slower if ahead.value and task.value == "tiny" else []),
    ]
    try:
        with mo.status.spinner("Checking the settings and starting the run"):
            started = start_run(load_config(task.value, settings))
        set_started(str(started.folder))
        said_start = mo.md(f"Started: {page_text(started.folder)}. It is shown above.")
    except ConfigError as error:
        said_start = mo.callout(mo.plain_text(str(error)), kind="danger")
    said_start
    return


@app.cell
def _(now, recorded, run, tick):
    tick.value
    snapshot = snapshot_of(recorded.until(now.value)) if run is None else run.snapshot()
    return (snapshot,)


@app.cell
def _(now, recorded, run, snapshot):
    mo.stop(
        snapshot.counts is None,
        mo.md(f"**{snapshot.state}**: {page_text(snapshot.error or snapshot.phase)}").style(
            {"font-size": "1.25rem"}
        ),
    )
    log = recorded.until(now.value) if run is None else run.log_until_now()
    steps = steps_of(log)
    return log, steps


@app.cell(hide_code=True)
def _(snapshot, steps):
    _oldest = f"{steps[-1].lag_max}" if steps else "-"
    _waits = f"waits for {snapshot.waiting_for}" if snapshot.waiting_for else ""
    _more = f"({snapshot.status})" if snapshot.status else _waits
    mo.vstack(
        [
            mo.md(f"**{snapshot.state}** {page_text(_more)}").style({"font-size": "1.25rem"}),
            columns(
                mo.stat(f"{snapshot.eta:g}", label="eta (versions)"),
                mo.stat(_oldest, label="oldest token of the last batch (versions)"),
                mo.stat(snapshot.step, label="training steps done"),
                mo.stat(snapshot.counts.in_flight, label="groups in flight"),
                mo.stat(snapshot.counts.finished, label="groups ready to train on"),
                least_px=150,
            ),
        ]
    )
    return


@app.cell
def _(drawn, log, run, set_drawn, steps):
    _what = (run, len(steps), len(list(requests(log))))
    if drawn.get("what") != _what:
        drawn["what"] = _what
        set_drawn(log)
    return


@app.cell(hide_code=True)
def _(get_drawn):
    lag_chart(get_drawn())
    return


@app.cell
def _(recorded):
    strip = mo.ui.anywidget(
        Strip(
            title="What each process did in the last 60 s",
            unit="s",
            height=80,
            **timeline_rows(recorded, cells=600),
        )
    )
    return (strip,)


@app.cell
def _(log, strip):
    minute = (max(0.0, log.end_s - 60), max(60.0, log.end_s))
    strip.widget.show(**timeline_rows(log, window=minute, cells=600))
    return (minute,)


@app.cell(hide_code=True)
def _(strip):
    strip
    return


@app.cell(hide_code=True)
def _(get_drawn):
    reward_chart(get_drawn())
    return


@app.cell(hide_code=True)
def _(get_drawn):
    idle_chart(get_drawn(), last_s=60)
    return


@app.cell(hide_code=True)
def _(log, snapshot):
    mo.vstack(
        [
            mo.md("tokens of the last ten batches by lag; lines: least and most of one batch"),
            lag_bars(recent_lags(log), eta=snapshot.eta),
        ]
    )
    return


@app.cell
def _(log, snapshot):
    counted, batch_groups = snapshot.counts, log.header.limits["batch_groups"]
    admitted = admissible(counted.pushed_version, batch_size=batch_groups, eta=snapshot.eta)
    return admitted, batch_groups, counted


@app.cell(hide_code=True)
def _(admitted, batch_groups, counted, snapshot):
    mo.md(rf"""
    ## Explanation

    Eq. 3 bounds how many groups may have been **started** while the engines hold version $v$:

    $N \le (v + 1 + \eta)\, B$   `capacity.admissible(v, batch_size=B, eta=eta)`

    Now $v = {counted.pushed_version}$, $\eta = {snapshot.eta:g}$ and $B = {batch_groups}$ admit
    {admitted:g} groups, and **{counted.started} were started**; {counted.trained} of them are
    trained on. A lower eta admits no group until the version has caught up, but drops none: groups
    that were admitted before are trained on as late as without the change. A pause drops nothing
    either: the running step ends, its weights are loaded, and every unfinished response keeps its
    tokens.
    """)
    return


@app.cell(hide_code=True)
def _(log, run):
    _lines = (
        [f"{t_s:8.1f} s   {in_words(one)}" for t_s, one in requests(log)]
        if run is None
        else [
            f"{datetime.fromtimestamp(one.at_s):%H:%M:%S}   {one.asked:<8}   {one.reply}   "
            f"({one.sender})"
            for one in run.asked()
        ]
    )
    mo.vstack(
        [
            mo.md("""
    ## Requests so far

    Each request is an event of the coordinator: the run logs it, and a replay of the log makes the
    same decisions. An impossible request is refused with the reason, and the run continues.
    """),
            mo.plain_text("\n".join(_lines) or "nothing"),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Try this

    - Move the time from 20 to 28 s. After eta became 0, exactly eight more batches have the old
      age, one for each version of the old eta, because they had already been admitted. Move it to
      51 s: a rising eta takes longer, because the engine must get ahead first.
    - Start a run, and pause it while the trainer works. The step still ends and its weights are
      loaded; only then is everything *paused by hand*. Nothing is lost: compare *groups in flight*
      before and after.
    - Set eta to 0 in your run, wait until the lag is 0, and look at what the trainer waits for. Set
      eta to 1: that wait is gone, for one version of lag.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.vstack(
        [
            mo.md("## The code"),
            mo.accordion(
                code_of(start_run, AttachedRun.pause, Coordinator.refusal, admissible, lag_chart)
            ),
            mo.md(
                "Pages: `docs/train.md` (control a run, or find it again), `docs/design.md` "
                "(requests). Equation 3: AReaL (arXiv:2505.24298), section 4.1."
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 2 CPU s, without torch in the notebook's process.
    A run that you start uses separate processes: for the small model two cores and 1 GB, until you
    stop it.
    """)
    return


if __name__ == "__main__":
    app.run()
