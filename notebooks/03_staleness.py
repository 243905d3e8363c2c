# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Staleness")

with app.setup:
    import time

    import marimo as mo

    from areal_lab.capacity import admissible
    from areal_lab.control.order import ORDERS, order_named
    from areal_lab.control.schedule import asynchronous
    from areal_lab.control.straggler import straggler_steps
    from areal_lab.runlog.records import log_of
    from areal_lab.runlog.trained_samples import oldest_first, story, trained_samples
    from areal_lab.widgets.lags import lag_bars, lag_rows
    from areal_lab.widgets.source import code_of
    from areal_lab.widgets.strip import Strip
    from areal_lab.widgets.timeline import timeline_rows
    from simulator import load_simulation, replicate


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Staleness

    *The staleness bound η limits how many versions generation may run ahead of training. How old
    can a token be when it is trained on?*

    **The usual answer:** η versions. Equation 3 of AReaL starts prompts at most η batches ahead, so
    with η = 2 no token should be older than 2 versions. **Make your guess**, and a simulated
    cluster answers. It has four GPUs, four prompts per step, and responses of 200 tokens on
    average.
    """)
    return


@app.cell
def _():
    guess = mo.ui.radio(
        {str(lag): lag for lag in range(7)},
        inline=True,
    )
    return (guess,)


@app.cell
def _(guess):
    # The answer is shown after a guess, and at once where nobody can guess.
    shown = guess.value is not None or mo.app_meta().mode != "run"
    return (shown,)


@app.cell
def _():
    eta = mo.ui.slider(0, 8, 1, 2, label="η", show_value=True)
    order = mo.ui.dropdown(
        {
            "oldest finished first (AReaL)": "oldest_finished_first",
            "strict start order": "strict_start_order",
            "bounded lag, at η": "bounded_lag",
        },
        value="oldest finished first (AReaL)",
        label="order",
    )
    interrupt = mo.ui.switch(True, label="interrupt for new weights")
    spread = mo.ui.slider(0.2, 1.4, 0.2, 0.6, label="spread of lengths", show_value=True)
    return eta, interrupt, order, spread


@app.cell(hide_code=True)
def _(eta, guess, interrupt, order, spread):
    mo.vstack(
        [
            mo.md("My guess: the oldest trained token is this many versions old:"),
            guess,
            mo.hstack([eta, order, interrupt, spread], justify="start", gap=1.5, wrap=True),
        ]
    )
    return


@app.cell
def _(eta, interrupt, order, spread):
    _began_s = time.process_time()
    config = load_simulation("small").with_settings(
        {
            "schedule.eta": eta.value,
            "schedule.batch_order": order.value,
            "schedule.interruptible": interrupt.value,
            "workload.answers.sigma": spread.value,
            "workload.steps": 30,
            "seeds": 5,
        }
    )
    _records = []
    runs = replicate(config, processes=1, log=_records.append)
    log = log_of(_records)
    took_s = time.process_time() - _began_s
    oldest = runs.largest_lag("token")
    return config, log, oldest, runs, took_s


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    Two engines and a trainer work at the same time. When new weights are ready, the engines pause,
    load them and continue the same responses. From then on the earlier tokens are one version
    older. A long response is paused several times. Select a response below the timeline to see the
    time from its start to its training step.
    """)
    return


@app.cell
def _():
    timeline = Strip(
        [],
        colors=["transparent"],
        labels=[""],
        names=[],
        title="What each process does",
        unit="s",
    )
    mo.ui.anywidget(timeline)
    return (timeline,)


@app.cell(hide_code=True)
def _(eta, guess, oldest, runs, shown, took_s):
    mo.stop(not shown, mo.callout("Choose a number above to see the answer.", kind="info"))
    _said = "" if guess.value is None else f"; you said {guess.value}"
    _right = " and are right" * (guess.value == oldest)
    _beyond = runs.older_than(eta.value)
    mo.hstack(
        [
            mo.stat(
                f"{oldest} versions",
                label="oldest trained token",
                caption=f"η is {eta.value}{_said}{_right}",
            ),
            mo.stat(
                f"{_beyond.mean:.1%}",
                label="of the tokens older than η",
                caption=f"95 %: {_beyond.low:.1%} to {_beyond.high:.1%}",
            ),
            mo.stat(
                f"{runs.step_s.mean:.2f} s",
                label="for a training step",
                caption=f"95 %: {runs.step_s.low:.2f} to {runs.step_s.high:.2f} s",
            ),
            mo.stat(
                f"{runs.utilization('training').mean:.0%}",
                label="of the time the trainer works",
                caption=f"5 seeds, simulated in {took_s:.2f} CPU s",
            ),
        ],
        justify="start",
        gap=1,
        wrap=True,
    )
    return


@app.cell
def _():
    get_selected, set_selected = mo.state(None)
    tokens = Strip(
        [],
        colors=["transparent"],
        labels=[""],
        names=[],
        title="Tokens of the trained responses, the oldest first",
        merge="highest",
        height=230,
    )
    # Cells that need the selection run when it changes, and not whenever the pointer rests.
    tokens.observe(lambda change: set_selected(change["new"]), names="selected")
    token_view = mo.ui.anywidget(tokens)
    return get_selected, set_selected, token_view, tokens


@app.cell(hide_code=True)
def _(shown, token_view):
    mo.stop(not shown)
    token_view
    return


@app.cell
def _(eta, log, tokens):
    samples = oldest_first(trained_samples(log))
    tokens.show(**lag_rows(samples, eta=eta.value))
    return (samples,)


@app.cell(hide_code=True)
def _(get_selected, samples):
    selected = get_selected()
    chosen = samples[selected["row"] if selected else 0]
    return chosen, selected


@app.cell(hide_code=True)
def _(chosen, selected, shown):
    mo.stop(not shown)
    mo.md(f"**The {'response you chose' if selected else 'oldest one'}.** {story(chosen)}")
    return


@app.cell
def _():
    held = {"shares": {}}
    return (held,)


@app.cell(hide_code=True)
def _(eta, held, runs, shown):
    mo.stop(not shown)
    _before, held["shares"] = held["shares"], runs.lag_shares("token")
    mo.vstack(
        [
            mo.md(
                "**All tokens of five seeds.** Red: older than η. Pale: before your last change. "
                "Lines: 95 % intervals."
            ),
            lag_bars(held["shares"], eta=eta.value, before=_before),
        ]
    )
    return


@app.cell
def _(chosen, log, selected, timeline):
    timeline.show(**timeline_rows(log))
    if selected:
        timeline.look_at(chosen.started_s, chosen.trained_s)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Equation 3 bounds the number of prompts, not their age

    $$\left\lfloor (N_r - 1) / B \right\rfloor \le i + \eta$$

    ```python
    most_started = admissible(i, batch_size=B, eta=eta)
    ```

    The equation bounds $N_r$, the **number** of prompts that were started. In this example, prompt
    0 does not end, the other prompts end at once, and a batch has one prompt. Every step trains on
    a younger prompt, the count stays within its bound, and prompt 0 becomes one version older. The
    coordinator of real runs computes the rows, for the η and the batch order chosen above.
    """)
    return


@app.cell
def _(eta, order):
    rows = straggler_steps(
        order_named(order.value, asynchronous(eta.value)), eta=eta.value, steps=eta.value + 2
    )
    return (rows,)


@app.cell(hide_code=True)
def _(eta, rows):
    _lines = [
        f"| {row.version} | {row.may_start:.0f} | {row.started} | "
        + (f"prompt {row.trained[0]}" if row.trained else "waits for prompt 0")
        + f" | {row.lag}{', above η' * (row.lag > eta.value)} |"
        for row in rows
    ]
    mo.md(
        "| trainer's version | may be started (eq. 3) | are started | trains on | "
        "age of prompt 0, versions |\n| ---: | ---: | ---: | :--- | ---: |\n" + "\n".join(_lines)
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Three batch orders

    The batch order is a separate setting. All three orders have the same lengths: seed $k$ draws
    the same responses for every order and every η. The grey band is an age of η.
    """)
    return


@app.cell
def _():
    _etas = (0, 1, 2, 3, 4, 8)
    _settings = {"workload.steps": 30, "seeds": 5}
    with mo.status.spinner("Simulating three orders for six η, 5 seeds each: about 2 CPU s"):
        compared = {
            name: {
                one: replicate(
                    load_simulation("small").with_settings(
                        {**_settings, "schedule.eta": one, "schedule.batch_order": name}
                    ),
                    processes=1,
                )
                for one in _etas
            }
            for name in ORDERS
        }
    return (compared,)


@app.cell(hide_code=True)
def _(compared):
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.lags import order_curves

    _charts = order_curves(
        {
            name.replace("_", " "): {one: run.largest_lag("token") for one, run in found.items()}
            for name, found in compared.items()
        },
        {
            name.replace("_", " "): {one: run.step_s for one, run in found.items()}
            for name, found in compared.items()
        },
    )
    columns(*map(mo.as_html, _charts))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    - **Oldest finished first**, the order of the released system, takes the finished responses. The
      trainer never waits for a single response, but tokens become older.
    - **Strict start order** trains in the order of starts. It keeps the bound of η versions, and
      the trainer waits for the slowest response of every batch.
    - **Bounded lag** lets a response be overtaken as long as the bound permits.

    In this small cluster the last two orders cost the same: 0.3 s per step at η = 2, nothing
    from η = 3 on.

    ## Try this

    - Switch *interrupt for new weights* off. No token is older than η, in any order, because the
      engines finish every response before they load weights. A step takes 13 % longer, because
      engines are idle while the last responses end.
    - Drag η from 2 to 8. The step takes 2.5 s from η = 3 on, because the trainer never waits: a
      larger η makes the tokens older, but the step not faster.
    - Set η to 1 and the spread of lengths to 1.2 (of their logarithm; math problems have 0.7). The
      heavier tail makes tokens three versions old, although η is 1.

    ## The code
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.vstack(
        [
            mo.accordion(code_of(admissible, straggler_steps, order_named, trained_samples)),
            mo.md(
                "Equation 3: AReaL (arXiv:2505.24298), section 4.1. Pages: `docs/design.md` "
                "(batch order), `docs/simulator.md`; the same at full size: "
                "`reproductions/lag_by_batch_order.py`."
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 1 CPU s, the page 3 CPU s, without torch. Each
    change of a control simulates five runs of 30 training steps: 0.1 CPU s.
    """)
    return


if __name__ == "__main__":
    app.run()
