# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="How stale may it be?")

with app.setup:
    import sys
    from pathlib import Path

    import marimo as mo

    # `reproductions` is looked for in the checkout, from any folder.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

    from areal_lab.control.drift import advise_on_lag, next_eta
    from areal_lab.control.schedule import MAX_DRIFT, SAFE_DRIFT
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.source import code_of
    from reproductions.learning.bound_charts import (
        cost_of_bounds,
        drift_by_eta,
        drift_by_step,
        legend,
    )
    from reproductions.learning.bounded import evidence_of, practice, schedule, tables
    from reproductions.learning.equal_hours import (
        BOUNDS_OF_DRIFT,
        by_bound,
        by_eta,
        gain_of_bound,
        shared_etas,
    )
    from reproductions.report.results import load


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # How stale may it be?

    *Which η does one bound on drift permit in each setting, and what does it cost against the best
    η?*

    **The usual answer:** a fixed η, such as 4, for every run. But the best η depends on the task
    and on the learning rate. **Drift**, the distance that the policy moves while a sample waits,
    can be bounded instead: run as asynchronously as the drift allows. Drag the bound. Is there one
    bound that is good for all four settings, and one η that is?
    """)
    return


@app.cell
def _():
    saved = load("table_2")
    return (saved,)


@app.cell
def _():
    study = load("bounded_drift")
    mapped = load("where_staleness_hurts")
    return mapped, study


@app.cell
def _(mapped, saved, study):
    evidence = evidence_of(study.data, saved.data, mapped.data)
    return (evidence,)


@app.cell
def _():
    bound = mo.ui.slider(
        steps=list(BOUNDS_OF_DRIFT), value=MAX_DRIFT, label="bound on drift, nats", show_value=True
    )
    return (bound,)


@app.cell
def _():
    objective = mo.ui.radio(
        ["decoupled", "naive"], value="decoupled", inline=True, label="objective"
    )
    return (objective,)


@app.cell
def _(bound, evidence, objective):
    settings = evidence.table_2[objective.value]
    chosen = by_bound(settings, bound.value)
    synchronous = by_eta(settings, "0")
    best_eta = min(shared_etas(settings), key=lambda eta: by_eta(settings, eta).regret)
    single = by_eta(settings, best_eta)
    gain = gain_of_bound(settings, bound.value, best_eta)
    return best_eta, chosen, gain, settings, single, synchronous


@app.cell
def _():
    before = {}
    return (before,)


@app.cell(hide_code=True)
def _(before, best_eta, bound, chosen, gain, objective, single, synchronous):
    _last = before.get("reward", chosen.reward)
    before["reward"] = chosen.reward
    mo.vstack(
        [
            mo.hstack([bound, objective], justify="start", align="center", gap=1.5, wrap=True),
            columns(
                mo.stat(
                    f"{chosen.speed:.2f} x",
                    label="steps per hour",
                    caption="of synchronous; mean of the settings",
                    bordered=True,
                ),
                mo.stat(
                    f"{chosen.reward:.3f}",
                    label="reward at equal hours",
                    caption=f"{_last:.3f} before; synchronous {synchronous.reward:.3f}",
                    bordered=True,
                ),
                mo.stat(
                    f"{gain.mean:+.3f}",
                    label=f"against η = {best_eta} everywhere",
                    caption=f"95 %: {gain.low:+.3f} to {gain.high:+.3f}",
                    bordered=True,
                ),
                mo.stat(
                    f"{chosen.regret:.3f}",
                    label="below the best η of each",
                    caption=f"worst {chosen.worst:.3f}; η = {best_eta}: {single.regret:.3f}",
                    bordered=True,
                ),
                least_px=240,
            ),
        ],
        gap=0.5,
    )
    return


@app.cell(hide_code=True)
def _(bound, settings):
    mo.vstack(
        [
            mo.md(legend([one.name for one in settings])),
            columns(
                mo.as_html(drift_by_eta(settings, bound.value)),
                mo.as_html(cost_of_bounds(settings, bound.value)),
            ),
        ],
        gap=0.2,
    )
    return


@app.function(hide_code=True)
def verdict(gain):
    """What the interval of a difference says, as a part of a sentence."""
    if gain.low > 0:
        return "better than"
    return "worse than" if gain.high < 0 else "not told apart from"


@app.cell(hide_code=True)
def _(best_eta, bound, chosen, gain, objective, settings):
    _permits = "; ".join(
        f"η = {eta} for {one.name}" for one, eta in zip(settings, chosen.chosen, strict=True)
    )
    _best = "; ".join(f"{one.best} for {one.name}" for one in settings)
    mo.md(f"""
    A bound of {bound.value:g} permits {_permits}. The best η in hindsight is {_best}. **This bound
    is {verdict(gain)} η = {best_eta} everywhere**, the best single η ({objective.value} PPO,
    {gain.mean:+.3f} of reward). The interval holds 95 % of the means over seeds that are drawn
    again with replacement; four settings are few, and this is not in it.

    All cells of a setting are compared after the same simulated hours, those of its shortest run: a
    cell with more steps per hour has done more steps by then. The reward is that of the newest
    weights on 1,024 held-out problems, averaged over the last quarter of these hours; 5 seeds.
    The bound takes the largest η whose recorded drift is within it. It knows neither the task nor
    the learning rate.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The schedule that sets η by drift

    Above, η was chosen after the run. The schedule `bounded_drift` sets it in the run, from the
    drift of every batch:

    $$ \text{drift} = \frac{1}{N} \sum_t |\log \pi_\theta - \log \pi_{behav}| $$

    $$ \eta + 1 \to (\text{lag} + 1) \cdot \frac{\text{bound}}{\text{drift}} $$

    ```python
    eta = next_eta(DriftBound(max_drift=0.08), eta, lag, measured)
    ```

    η falls at once and rises slowly, because a batch shows the effect of a higher η only after
    that many versions.
    """)
    return


@app.cell
def _(evidence):
    mo.stop(not evidence.cells, mo.md("*No run of the schedule is packaged.*"))
    cell = mo.ui.dropdown(
        {one.name: one for one in evidence.cells}, value=evidence.cells[-1].name, label="runs"
    )
    return (cell,)


@app.cell(hide_code=True)
def _(cell, evidence):
    mo.vstack(
        [
            cell,
            drift_by_step(
                evidence,
                cell.value,
                ("eta 0", "eta 1"),
                MAX_DRIFT,
            ),
        ],
        gap=0.2,
    )
    return


@app.cell(hide_code=True)
def _(evidence, study):
    mo.stop(not evidence.cells)
    answers = tables(evidence)["The schedule in every cell"]
    _told = [
        (
            one["task, rate"].replace("-", "\u2011"),  # no line breaks after it
            *(one["best eta"], one["schedule minus it"].replace(" ", "\u00a0")),
            f"{one['steps within, bounded drift']}, {one['steps within, eta 4']}",
        )
        for one in answers
    ]
    _rows = "\n".join(f"| {' | '.join(one)} |" for one in _told)
    *_, _shared = schedule(evidence)
    mo.md(f"""
| task, rate | best η | schedule minus it | steps within: schedule, η = 4 |
| --- | --- | --- | --- |
{_rows}

Reward at equal hours, minus that of the fixed η that is best for the cell in hindsight, seed by
seed with its 95 % interval; and steps whose drift is at most {MAX_DRIFT}.
{_shared}

Made by {study.origin}.
""")
    return (answers,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Your own log

    Any framework that logs the mean $|\log \pi_\theta - \log \pi_{behav}|$ and the lag of its
    tokens tells which lag its drift permits. Enter what your log has.
    """)
    return


@app.cell
def _():
    logged_drift = mo.ui.number(0.001, 5, step=0.001, value=0.15, label="drift, nats")
    logged_lag = mo.ui.number(0.1, 100, step=0.1, value=8, label="mean lag, versions")
    minibatches = mo.ui.number(1, 64, step=1, value=4, label="minibatches")
    return logged_drift, logged_lag, minibatches


@app.cell
def _(logged_drift, logged_lag, minibatches, objective):
    advice = advise_on_lag(
        logged_drift.value,
        logged_lag.value,
        max_drift=SAFE_DRIFT[objective.value],
        minibatches=minibatches.value,
    )
    return (advice,)


@app.cell(hide_code=True)
def _(advice, evidence, logged_drift, logged_lag, minibatches, objective):
    _state = "is expected to cost reward" if advice.hurts else "is within the bound"
    _errors = "\n".join(f"- {one}" for one in practice(evidence))
    mo.vstack(
        [
            mo.hstack([logged_drift, logged_lag, minibatches], justify="start", gap=1.5, wrap=True),
            mo.md(f"""
With {objective.value} PPO this drift **{_state}**. It permits a mean lag of
**{advice.permitted_lag:.1f} versions** at the same learning rate, or the same lag at
**{advice.rate_factor:.2f} times** the learning rate.

{_errors}

The rule comes from models of 102,000 parameters with responses of a few tokens. For a large model
the direction should hold; the bound may be another one.
"""),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Try this

    - Drag the bound to 0.02. Every setting trains synchronously, with half of the steps, and the
      reward at equal hours falls by 0.05.
    - Drag it to 0.5. Sorting at a rate of 3e-4 gets η = 16, and its loss outweighs what the others
      gain: the mean reward is below that of synchronous training.
    - Choose naive PPO. Its best bound is lower, because its clip is around the old policy.

    ## The code
    """)
    return


@app.cell(hide_code=True)
def _(saved):
    mo.vstack(
        [
            mo.accordion(code_of(by_bound, next_eta, advise_on_lag)),
            mo.md(
                f"Runs: {saved.origin}. Pages: `docs/train.md` (let the measured drift set eta), "
                "`docs/design.md`; the study: `python -m reproductions.bounded_drift`."
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** 2 CPU s without torch, because the runs are packaged.
    """)
    return


if __name__ == "__main__":
    app.run()
