# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[train,notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Does staleness hurt?")

with app.setup:
    import sys
    import tempfile
    from pathlib import Path

    import marimo as mo

    # `reproductions` and `cosim` are looked for in the checkout, from any folder.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.source import code_of
    from reproductions.learning.charts import curves_of, learning_curves, legend, loss_charts
    from reproductions.learning.compare import is_below_zero, mean, written
    from reproductions.learning.curves import (
        beginning,
        costs,
        extent,
        rank_correlations,
        reward_at,
        step_at,
    )
    from reproductions.learning.runs import Run, run_of
    from reproductions.learning.setting import BOUNDS, Setting, settings_of
    from reproductions.report.results import load

    CONFIGS = {"addition": "cosim", "sorting": "cosim_sorting"}


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Does staleness hurt?

    *How much reward does eta cost, how many hours does it save, and how much of the loss does the
    decoupled objective prevent?*

    **The usual answer:** a little staleness costs nothing. A cluster that generates while it trains
    learns from old samples: a token may be up to η versions old. Here a model of 102,000 parameters
    learns under the schedule of the paper's 128 GPUs, scaled to its batch. **Over steps staleness
    can cost reward, over hours it pays:** choose η, and see for which objective.
    """)
    return


@app.cell
def _():
    saved = load("table_2")
    return (saved,)


@app.cell
def _(saved):
    settings = [one for one in settings_of(saved.data) if one.task in CONFIGS]
    etas = [eta for eta in BOUNDS if any(eta in one.bounds for one in settings)]
    room = extent(settings)
    return etas, room, settings


@app.cell
def _(settings):
    _names = {f"{one.task}, learning rate {one.rate}": one for one in settings}
    _fast = [name for name, one in _names.items() if one.rate == "3e-4"]
    setting = mo.ui.dropdown(_names, value=[*_fast, *_names][0], label="task")
    return (setting,)


@app.cell
def _(etas):
    bound = mo.ui.radio(etas, value="8" if "8" in etas else etas[-1], inline=True, label="η =")
    return (bound,)


@app.cell
def _():
    before = {}
    return (before,)


@app.cell
def _(bound, setting):
    eta = bound.value
    mo.stop(
        eta not in setting.value.bounds,
        mo.vstack(
            [
                mo.hstack([setting, bound], justify="start", gap=2),
                mo.md(f"*No runs of {setting.value.name} with η = {eta} are packaged.*"),
            ]
        ),
    )
    curves = curves_of(setting.value, eta)
    losses = {name: setting.value.loss(name, eta) for name in ("naive", "decoupled")}
    gains = {name: setting.value.hours_gained(name, eta) for name in losses}
    hours = mean(curves["decoupled"], lambda run: run.hours).mean
    return curves, eta, gains, hours, losses


@app.function(hide_code=True)
def signed(found):
    """A difference with its interval, as text."""
    return written(found, sign="+").replace("-", "\N{MINUS SIGN}")


@app.function(hide_code=True)
def interval(found):
    """The half of its interval, as text."""
    return " ".join(written(found).split(" ")[1:]) or "one seed"


@app.function(hide_code=True)
def whom(names):
    """The objectives among these, as a part of a sentence."""
    known = {"naive": "naive PPO", "decoupled": "the decoupled objective"}
    return {0: "neither objective beyond chance", 2: "both objectives"}.get(
        len(names), " ".join(known[name] for name in names)
    )


@app.cell(hide_code=True)
def _(bound, curves, gains, losses, setting):
    _lag = mean(curves["decoupled"], lambda run: run.lag).mean
    _drift = {name: mean(curves[name], lambda run: run.drift).mean for name in losses}
    mo.vstack(
        [
            mo.hstack(
                [setting, bound],
                justify="start",
                align="center",
                gap=1.5,
                wrap=True,
            ),
            mo.hstack(
                [
                    *(
                        mo.stat(
                            signed(found).split(" ")[0],
                            label=f"reward, {name}",
                            caption=f"{interval(found)} against synchronous",
                            bordered=True,
                        )
                        for name, found in losses.items()
                    ),
                    *(
                        mo.stat(
                            f"{found.mean:.2f} x",
                            label=f"hours saved, {name}",
                            caption=f"{interval(found)} at equal reward",
                            bordered=True,
                        )
                        for name, found in gains.items()
                    ),
                ],
                justify="start",
                wrap=True,
                gap=0.5,
            ),
            mo.md(
                f"Mean lag **{_lag:.1f} versions**; drift **{_drift['naive']:.3f}** with naive "
                f"PPO, **{_drift['decoupled']:.3f}** with the decoupled objective."
            ),
        ],
        gap=0.5,
    )
    return


@app.cell(hide_code=True)
def _(eta, gains, losses):
    _costs = [name for name, found in losses.items() if is_below_zero(found)]
    _pays = [name for name, found in gains.items() if found.low > 1]
    mo.md(f"""
    **Over steps η = {eta} costs {whom(_costs)}. Over hours it pays for {whom(_pays)}.**
    """)
    return


@app.cell(hide_code=True)
def _(before, curves, hours, room, setting):
    _same = before.get("setting") == setting.value.name
    _old = [before["curves"]] if _same and before["curves"] is not curves else []
    before.update(setting=setting.value.name, curves=curves)
    mo.vstack(
        [
            mo.md(legend(list(curves))),
            columns(*map(mo.as_html, learning_curves(curves, room, past=_old, mark_hours=hours))),
        ],
        gap=0.2,
    )
    return


@app.cell(hide_code=True)
def _(curves, eta, gains, hours, losses, setting):
    then = {name: reward_at(runs, hours) for name, runs in curves.items()}
    _steps = setting.value.steps
    mo.md(f"""
    After {_steps} steps with η = {eta} naive PPO is {signed(losses["naive"])} from synchronous
    training, the decoupled objective {signed(losses["decoupled"])}. A synchronous run needs
    {gains["decoupled"].mean:.2f} times the hours for the final reward of the decoupled run, and
    {gains["naive"].mean:.2f} times the hours for that of naive PPO. The {_steps} steps take
    {hours:.1f} simulated hours (dashed). By then the synchronous run has done
    {step_at(curves["synchronous"], hours):.0f} steps and its reward is
    {then["synchronous"].mean:.2f}; the decoupled run is at {then["decoupled"].mean:.2f}, naive PPO
    at {then["naive"].mean:.2f}.

    Lines are means over {len(curves["naive"])} seeds in bands of their 95 % intervals (Student's
    t); a pale line is the previous η. Reward is the share of 1,024 held-out problems that the
    newest weights solve. A loss of reward is taken over the last quarter of the steps, paired by
    seed. The text says "costs" if the interval excludes 0, and "pays" if it excludes 1. Hours to
    equal reward are 0 for a run that ends at or below its start.
    """)
    return (then,)


@app.cell(hide_code=True)
def _(eta, setting, settings):
    cells = costs(settings)
    correlations = rank_correlations(cells)
    mo.vstack(
        [
            mo.md("## Predictor of the lost reward"),
            mo.md(legend(["naive", "decoupled"], [one.name for one in settings])),
            columns(*map(mo.as_html, loss_charts(cells, chosen=(setting.value.name, eta)))),
        ],
        gap=0.2,
    )
    return cells, correlations


@app.cell(hide_code=True)
def _(cells, correlations, curves, eta):
    _clipped = {
        name: mean(runs, lambda run: run.clip_fraction).mean for name, runs in curves.items()
    }
    mo.md(f"""
    The **drift**, the distance that the policy moves during the lag, predicts the loss of reward
    better than the lag itself. Over {len(cells)} cells the rank correlation of the reward lost is
    **{correlations[0]:.2f} with drift** and {correlations[1]:.2f} with lag (Spearman). Within one
    task and learning rate both grow with η; across tasks and learning rates only drift predicts the
    loss. Point at a dot for its numbers; rings mark the choice above.

    Naive PPO clips around the policy that sampled, up to η versions ago; the decoupled objective
    clips around the newest policy before the step. With η = {eta} the clip therefore removes the
    gradient from {_clipped["naive"]:.1%} of the tokens with naive PPO, and from
    {_clipped["decoupled"]:.1%} with the decoupled objective.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Both, as formulas

    $$ L = -\frac{1}{N} \sum_t \frac{\pi_{prox}}{\pi_{behav}} \min(u_t A_t,
    \mathrm{clip}(u_t, 1 \pm \epsilon)\, A_t) $$

    $$ u = \frac{\pi_\theta}{\pi_{prox}} $$

    $$ \text{drift} = \frac{1}{N} \sum_t |\log \pi_\theta - \log \pi_{behav}| $$

    ```python
    decoupled_ppo(
        logprobs, proximal_logprobs, behavior_logprobs, advantages, mask
    )
    ppo(logprobs, behavior_logprobs, advantages, mask)  # naive
    (logprobs - behavior_logprobs).abs().mean()  # drift
    ```

    $\pi_{behav}$ sampled a token, up to η versions ago; $\pi_{prox}$ is the policy before the
    training step. Naive PPO takes $\pi_{behav}$ for both.
    """)
    return


@app.cell
def _():
    objective = mo.ui.dropdown(["naive", "decoupled"], value="naive", label="objective")
    return (objective,)


@app.cell
def _():
    own_eta = mo.ui.dropdown(["0", *BOUNDS], value="8", label="η")
    return (own_eta,)


@app.cell
def _():
    rate = mo.ui.dropdown(["3e-5", "1e-4", "3e-4", "1e-3"], value="3e-4", label="learning rate")
    return (rate,)


@app.cell
def _():
    steps = mo.ui.slider(8, 60, value=30, show_value=True, label="steps")
    return (steps,)


@app.cell
def _():
    seed = mo.ui.dropdown({str(one): one for one in range(1, 10)}, value="1", label="seed")
    return (seed,)


@app.cell
def _():
    start = mo.ui.run_button(label="Train")
    return (start,)


@app.cell
def _():
    get_runs, set_runs = mo.state([])
    return get_runs, set_runs


@app.cell(hide_code=True)
def _(objective, own_eta, rate, seed, setting, start, steps):
    mo.vstack(
        [
            mo.md(f"""
    ## Your own run

    The run learns {setting.value.task}, the task chosen above, in this process and on one core:
    about **{8 + steps.value / 4:.0f} s** of CPU. With the settings and seed of a packaged run it
    repeats this run: the same problems, the same samples. Its line is drawn over the packaged
    lines.
    """),
            mo.hstack(
                [objective, own_eta, rate, seed, steps, start],
                justify="start",
                align="center",
                gap=1,
                wrap=True,
            ),
        ]
    )
    return


@app.cell
def _(objective, own_eta, rate, seed, set_runs, setting, start, steps):
    mo.stop(not start.value)
    with (
        tempfile.TemporaryDirectory() as _folder,
        mo.status.progress_bar(
            total=steps.value, title="Loading torch", remove_on_exit=True
        ) as _bar,
    ):
        from cosim.load import load_cosim
        from cosim.run import run_cosim

        _choice = {"objective": objective.value, "eta": own_eta.value}
        _settings = {
            **_choice,
            "eta": float(own_eta.value),
            "actor.optimizer.lr": float(rate.value),
            "total_train_steps": steps.value,
            "seed": seed.value,
            "run_dir": _folder,
        }
        result = run_cosim(
            load_cosim(CONFIGS[setting.value.task], _settings),
            on_step=lambda step: _bar.update(
                title=f"Step {step.step} of {step.total_steps}",
                subtitle=f"reward of the batch {step.reward_mean:.2f}",
            ),
        )
        own = run_of(
            result.folder,
            {"task": setting.value.task, **_choice, "rate": rate.value},
            seed.value,
        )
    set_runs(lambda runs: [*runs, own])
    return (own,)


@app.cell(hide_code=True)
def _(curves, eta, get_runs, room, setting):
    _runs = [run for run in get_runs() if run.choice["task"] == setting.value.task]
    mo.stop(not _runs, mo.md("*Your line comes here; earlier ones stay, pale.*"))
    _last = _runs[-1]
    mo.vstack(
        [
            mo.md(legend([*curves, "yours"])),
            columns(
                *map(
                    mo.as_html,
                    learning_curves(
                        {**curves, "yours": {_last.seed: _last}},
                        beginning(room, _runs, 60),
                        past=[{"yours": {run.seed: run}} for run in _runs[:-1]],
                    ),
                )
            ),
            mo.md(f"""
    Yours: {_last.choice["objective"]} PPO, η = {_last.choice["eta"]}, learning rate
    {_last.choice["rate"]}, seed {_last.seed}. Held-out reward {_last.before:.3f} before,
    {_last.reward:.3f} over the last quarter of {_last.steps} steps; lag {_last.lag:.1f} versions,
    drift {_last.drift:.3f}; {_last.hours:.1f} simulated hours, {_last.cpu_s:.0f} s of CPU. The
    other lines: η = {eta}, as above.
    """),
        ]
    )
    return


@app.cell(hide_code=True)
def _(cells, setting):
    _one = setting.value
    _hours = ", ".join(
        f"{mean(_one.of('decoupled', eta), lambda run: run.hours).mean:.1f} h at {eta}"
        for eta in ("0", *_one.bounds)
    )
    _naive = "; ".join(
        f"η {cell.eta}: lag {cell.lag:.0f}, drift {cell.drift:.2f}, {cell.loss.mean:+.3f}"
        for cell in cells
        if (cell.setting, cell.objective) == (_one.name, "naive") and cell.eta in _one.bounds
    )
    mo.md(f"""
    ## Try this

    - Choose η = 2. The hours are those of η = 8, and the reward is higher: from 2 on the trainer is
      the bottleneck, and more staleness gains nothing. {_one.steps} steps take {_hours}.
    - Choose η = inf with addition. Naive PPO does not lose more than at 8, although its tokens are
      several times as old, because its drift hardly grows. {_one.name}: {_naive}.
    - Train addition with a learning rate of 1e-3 for 30 steps. With η = 8 the reward of naive PPO
      falls from 0.49 to 0.00, with a drift of 1.9. The decoupled objective keeps 0.20 (drift 0.7);
      the synchronous run, η = 0, is at 0.49 again (drift 0.09). Seed 1.

    ## The code
    """)
    return


@app.cell(hide_code=True)
def _(saved):
    mo.vstack(
        [
            mo.accordion(
                code_of(Setting.loss, Setting.hours_gained, Run.hours_to, reward_at, costs)
            ),
            mo.md(f"""
    `areal_lab/functional/losses/policy.py` has the decoupled objective (AReaL, arXiv:2505.24298,
    eq. 5), `areal_lab/training/metrics.py` has drift, `docs/cosim.md` describes the co-simulation,
    and `reproductions/table_2.py` computes the paper's table from these runs. Packaged runs:
    {saved.origin}.
    """),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** 2 CPU s without torch, because the runs are packaged. The button *Train*
    starts real training: torch, 0.8 GB, and about 8 CPU s plus 0.25 CPU s per step.
    """)
    return


if __name__ == "__main__":
    app.run()
