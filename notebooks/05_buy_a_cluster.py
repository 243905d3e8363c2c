# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Buy a cluster")

with app.setup:
    import sys
    from functools import partial

    import marimo as mo

    import simulator
    from areal_lab.config.record import find_setting, value_of
    from areal_lab.runlog.records import Log
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.figure import fluid_svg
    from areal_lab.widgets.pareto import chosen_number, pareto_chart
    from areal_lab.widgets.source import code_of
    from areal_lab.widgets.timeline import timeline_strip
    from simulator.plan.bound import least_step_s
    from simulator.plan.frame import TOOLTIPS, outcome_at, plan_points
    from simulator.plan.plots import tornado_content
    from simulator.plan.search import screening_job
    from simulator.plan.summary import cost, hours, verdict
    from simulator.plan.trial import key
    from simulator.report.to_json import cost_parts

    MOST_DRAWN = 20  # tornados that are kept


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Buy a cluster

    *Which GPUs finish this training run before the deadline, for the least money?*

    **The usual answers:** rent the cheapest GPU-hours; or stay synchronous, so that no response is
    stale. Both cost more here than the cheapest of all candidates. **Which of the three would you
    have chosen?**
    """)
    return


@app.cell
def _():
    shipped = simulator.load_plan("plan_small")
    cache = simulator.shipped_trials("plan_small")
    return cache, shipped


@app.cell
def _(shipped):
    deadline = mo.ui.slider(
        steps=[4, 6, 8, 10, 12, 16, 20, 24, 30, 36, 48, 60, 72, 96, 120, 168],
        value=shipped.limits.deadline_h,
        label="deadline (h)",
        show_value=True,
    )
    return (deadline,)


@app.cell
def _():
    objective = mo.ui.dropdown(
        {"lowest cost": "dollars", "shortest time": "hours", "fewest GPUs": "gpus"},
        value="lowest cost",
        label="find the",
    )
    return (objective,)


@app.cell
def _():
    budget = mo.ui.number(
        start=find_setting(simulator.PlanConfig, "limits.budget_dollars").bounds.least,
        value=10_000,
        step=100,
        debounce=True,
        label="budget, $",
    )
    return (budget,)


@app.cell
def _(shipped):
    overhead = mo.ui.slider(
        find_setting(simulator.PlanConfig, "base.cluster.overhead").bounds.least,
        1,
        0.05,
        value=shipped.base.cluster.overhead,
        label="storage, network, operation (share of the price)",
        show_value=True,
    )
    return (overhead,)


@app.function
def number(config, name, label):
    """A control for a setting, with its value and bounds."""
    least, most, *_ = find_setting(type(config), name).bounds
    value = value_of(config, name)
    return mo.ui.number(least, most, value=value, debounce=True, label=label)


@app.function
def several(config, name, options, label):
    """A control for a list of values."""
    return mo.ui.multiselect(options, value=value_of(config, name), label=label)


@app.cell
def _(shipped):
    # By the names of settings.
    run = mo.ui.dictionary(
        {
            "base.model": mo.ui.dropdown(
                list(simulator.MODELS), value=shipped.base.model, label="model"
            ),
            "base.workload.answers.mean_tokens": number(
                shipped, "base.workload.answers.mean_tokens", "mean response (tokens)"
            ),
            "base.workload.answers.max_tokens": number(
                shipped, "base.workload.answers.max_tokens", "longest response (tokens)"
            ),
            "base.workload.prompts_per_batch": number(
                shipped, "base.workload.prompts_per_batch", "prompts per step"
            ),
            "base.workload.samples_per_prompt": number(
                shipped, "base.workload.samples_per_prompt", "responses per prompt"
            ),
            "steps": number(shipped, "steps", "training steps"),
        }
    )
    return (run,)


@app.cell
def _(shipped):
    candidates = mo.ui.dictionary(
        {
            "candidates.gpu": several(shipped, "candidates.gpu", list(simulator.GPUS), "GPU types"),
            "candidates.nodes": several(
                shipped, "candidates.nodes", [1, 2, 4, 8, 12, 16, 24, 32], "nodes"
            ),
            "candidates.placement": several(
                shipped,
                "candidates.placement",
                find_setting(simulator.PlanConfig, "candidates.placement").choices,
                "placement",
            ),
            "candidates.eta": several(shipped, "candidates.eta", [0.0, 1.0, 2.0, 4.0, 8.0], "eta"),
            "candidates.rollout_share": several(
                shipped,
                "candidates.rollout_share",
                [0.25, 0.5, 0.625, 0.75, 0.875],
                "share that generates",
            ),
            "candidates.rollout_tensor_parallel": mo.ui.multiselect(
                [1, 2, 4, 8], value=[1], label="GPUs per engine"
            ),
            "candidates.trainer_tensor_parallel": mo.ui.multiselect(
                [1, 2, 4, 8], value=[1], label="trainer TP"
            ),
            "candidates.trainer_pipeline_parallel": mo.ui.multiselect(
                [1, 2, 4, 8], value=[4], label="trainer PP"
            ),
        }
    )
    return (candidates,)


@app.cell
def _(candidates):
    _names = {
        f"{bound:g}" if bound else "0, synchronous": bound
        for bound in sorted(candidates.value["candidates.eta"] or [0.0])
    }
    eta = mo.ui.radio(
        _names,
        value=list(_names)[-1],
        inline=True,
        label="staleness allowed, eta (versions)",
    )
    return (eta,)


@app.cell
def _(candidates):
    # No price is published for some GPUs: it is $2 until you set yours.
    typical = {
        name: simulator.find_gpu(name).price.typical
        for name in candidates.value["candidates.gpu"] or ["H100"]
    }
    prices = mo.ui.dictionary(
        {
            name: mo.ui.slider(
                0.1, 12, 0.05, value=round(price or 2.0, 2), label=name, show_value=True
            )
            for name, price in typical.items()
        }
    )
    return prices, typical


@app.cell
def _(budget, candidates, deadline, eta, objective, overhead, prices, run, shipped, typical):
    changed = [name for name, price in prices.value.items() if price != typical[name]]
    mo.stop(
        not candidates.value["candidates.gpu"],
        mo.callout("Choose at least one type of GPU.", kind="danger"),
    )
    try:
        question = shipped.with_settings(
            {
                **run.value,
                **candidates.value,
                "objective": objective.value,
                "limits.deadline_h": deadline.value,
                "limits.eta": eta.value,
                "limits.budget_dollars": budget.value,
                "base.cluster.overhead": overhead.value,
                "prices": [
                    simulator.PriceEntry(gpu=name, typical=prices.value[name]) for name in changed
                ],
            }
        )
        simulator.check_plan(question)
        error = None
    except ValueError as refused:
        question, error = None, str(refused)
    mo.stop(question is None, mo.callout(error, kind="danger"))
    cheapest_gpu = min(prices.value, key=prices.value.get)
    return cheapest_gpu, question


@app.cell
def _():
    latest = {}  # searches by name: their candidates serve another deadline, too
    return (latest,)


@app.cell
def _(cache, cheapest_gpu, latest, question):
    _quick = question.with_settings({"search.sensitivity": 0})
    searches = {
        name: simulator.PlanSearch(plan_config, cache, reuse=latest.get(name))
        for name, plan_config in {
            "recommended": question,
            "synchronous": _quick.with_settings({"limits.eta": 0}),
            "cheapest": _quick.with_settings({"candidates.gpu": [cheapest_gpu]}),
        }.items()
    }
    latest.update(searches)
    return (searches,)


@app.cell
def _():
    go = mo.ui.switch(label="simulate what is missing")
    get_busy, set_busy = mo.state(False)
    return get_busy, go, set_busy


@app.cell
def _(get_busy):
    tick = mo.ui.refresh(default_interval="1s" if get_busy() else None)
    return (tick,)


@app.cell
def _(cache, get_busy, go, searches, set_busy, tick):
    # What is known is there at once. The rest is simulated while the switch is on, for about a
    # second at a time, so that each turn shows what was found so far.
    tick
    _script = mo.app_meta().mode == "script"
    cache.paused = not (go.value or _script)
    _for_s = 0.3 if go.value else float("inf")
    _ended = [search.advance(_for_s) for search in searches.values()]
    complete = all(_ended)
    if (go.value and not complete) != get_busy():
        set_busy(go.value and not complete)
    plan, *_others = [search.plan for search in searches.values()]
    rivals = dict(zip(["stay synchronous", "cheapest GPU-hours"], _others, strict=True))
    settled = all(one.settled for one in (plan, *_others))
    return complete, plan, rivals, settled


@app.cell(hide_code=True)
def _(budget, deadline, eta, objective, overhead, prices):
    _rows = [
        [objective, deadline, eta],
        [mo.md("$ per GPU-hour:"), *prices.elements.values()],
        [budget, overhead],
    ]
    mo.vstack([mo.hstack(row, justify="start", gap=1.5, wrap=True) for row in _rows], gap=0.5)
    return


@app.cell(hide_code=True)
def _(go, searches, settled, tick):
    _step = searches["recommended"].step
    _told = mo.md(f"{_step.stage}: {_step.done} of {_step.total}")
    mo.stop(settled)
    mo.callout(
        mo.hstack([go, _told, tick], justify="start", gap=1),
        kind="info",
        title="These settings are not simulated yet",
    )
    return


@app.function
def card(title, plan):
    """The recommendation of a plan, as a box."""
    best = plan.best
    if best is None:
        none = "no candidate is within the limits" if plan.settled else "not simulated yet"
        return mo.stat("none", label=title, caption=none)
    return mo.vstack([mo.stat(cost(best), label=title), mo.md(card_text(best, plan))], gap=0)


@app.function
def card_text(best, plan):
    """What is bought, its time, and whether the interval exceeds the deadline."""
    late = best.predicted_hours.high > plan.config.limits.deadline_h
    told = f"{best.candidate.hardware}, {best.candidate.schedule}: {hours(best)}"
    return f"{told}. It may miss the deadline." if late else f"{told}."


@app.cell(hide_code=True)
def _(cheapest_gpu, plan, rivals):
    columns(
        card(f"cheapest GPU-hours ({cheapest_gpu})", rivals["cheapest GPU-hours"]),
        card("stay synchronous", rivals["stay synchronous"]),
        card("the recommendation", plan),
    )
    return


@app.function
def sentences(lines):
    """Lines of text with capitals and full stops, as a list."""
    return "\n".join(f"- {line[0].upper()}{line[1:].rstrip('.')}." for line in lines)


@app.cell(hide_code=True)
def _(plan, rivals):
    _times = {
        name: rival.best.value("dollars") / plan.best.value("dollars")
        for name, rival in rivals.items()
        if rival.best and plan.best
    }
    _dearer = [
        f"to {name} costs {times:.2g} times as much"
        if name.startswith("stay")
        else f"the {name} cost {times:.2g} times as much"
        for name, times in _times.items()
        if times > 1.01
    ]
    mo.md(sentences([*simulator.recommendation_lines(plan), *_dearer]))
    return


@app.cell
def _():
    held = {"best": None, "key": None}  # what is shown, to tell what has changed
    get_shown, set_shown = mo.state(None)
    return get_shown, held, set_shown


@app.cell
def _(candidates, held, plan, rivals):
    _points = plan_points(
        plan, {name: rival.best for name, rival in rivals.items() if rival.best is not None}
    )
    _best = next((point for point in _points if point["best"]), None)
    _before, held["best"] = held["best"], _best
    mo.stop(not _points, mo.callout("Nothing to show yet: see the switch above.", kind="info"))
    front = mo.ui.altair_chart(
        pareto_chart(
            _points,
            groups=candidates.value["candidates.gpu"],
            titles=("cost of the run ($, typical prices)", "duration of the run (h)"),
            limits={"x": plan.config.limits.budget_dollars, "y": plan.config.limits.deadline_h},
            before=_before,
            tooltips=TOOLTIPS,
        ),
        chart_selection=False,
        legend_selection=False,
    )
    pick = mo.ui.dropdown(
        {
            f"{point['hardware']}, {point['schedule']}, {point['split']}": point["number"]
            for point in _points
            if point["level"] != "excluded"
        },
        label="or choose it here:",
    )
    front
    return front, pick


@app.cell(hide_code=True)
def _(cache, pick, plan):
    mo.vstack(
        [
            mo.md(
                f"""
    Large points are the front: no other candidate beats them in time, cost and GPUs at once. The
    number is their GPUs. Bars and brackets are 90 % intervals, with the model's error on measured
    runs and {plan.config.search.seeds} seeds. The ring is the recommendation (pale: before your
    last change). Circles are asynchronous, squares synchronous. Hollow points are {plan.bounded} of
    {len(plan.space.possible)} candidates, drawn at the lower bound that excludes them.
    {cache.made_by} simulated the first question.

    **Click a point to see what its GPUs do,**
    """
            ),
            pick,
        ]
    )
    return


@app.cell
def _(front, held, pick, plan, rivals, set_shown):
    _clicked = chosen_number(front.selections)
    _asked = pick.value if _clicked is None else _clicked
    _number = plan.best.candidate.number if _asked is None and plan.best else _asked
    _rivals = [rival.best for rival in rivals.values() if rival.best]
    chosen = outcome_at(plan, _number, _rivals)
    # The timeline is simulated if it is another candidate, not whenever a slider moves; in a
    # browser, where that takes seconds, if somebody asks for it.
    _key = chosen and key(screening_job(plan.config, chosen.candidate))
    if _key != held["key"] and (_asked is not None or sys.platform != "emscripten"):
        held["key"] = _key
        set_shown(chosen)
    return (chosen,)


@app.cell(hide_code=True)
def _(chosen):
    mo.stop(
        chosen is None,
        mo.md("*This one was excluded: another candidate beats even its lower bound.*"),
    )
    columns(
        mo.stat(chosen.candidate.hardware, label="candidate", caption=chosen.candidate.split),
        mo.stat(hours(chosen), label="time", caption=chosen.candidate.schedule),
        mo.stat(cost(chosen), label="cost", caption=f"${chosen.hourly.dollars or 0:,.2f}/h"),
        mo.stat(
            f"{chosen.engine_share:.0%}, {chosen.trainer_share:.0%}",
            label="engines, trainer busy",
            caption=chosen.limit,
        ),
        least_px=200,
    )
    return


@app.cell
def _(get_shown):
    shown = get_shown()
    mo.stop(shown is None)
    _records = []
    _config = shown.candidate.config.with_settings(
        {"workload.steps": 8, "workload.warmup_steps": 2}
    )
    simulator.simulate(_config, log=_records.append)
    strip = timeline_strip(
        Log(_records[0], tuple(_records[1:])),
        title=f"{shown.candidate.hardware}, {shown.candidate.schedule}: the first 8 steps, seed 1",
        cells=1200,
    )
    mo.ui.anywidget(strip)
    return (strip,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Why a synchronous run costs more

    Click *stay synchronous* above, and look at the ends of its engines' rows. A batch is complete
    when its longest response ends, and until then most GPUs wait. If the engines may run ahead, the
    trainer has other responses to train on, and the slower side determines the time. In closed
    form, with the time to train on a batch $t_{train}$, to generate it with full engines
    $t_{work}$, to generate its longest response $t_{longest}$, and to generate the longest response
    of one prompt, on average, $t_{long}$:

    $$t_{sync} \ge \max(t_{work},\ t_{longest}) + t_{train} + t_{update}$$

    $$t_{async} \ge \max\Big(t_{train},\ t_{work},\ \frac{t_{long} + t_{train}}{\eta + 1}\Big)$$

    `least_step_s` computes this bound in a millisecond. It excludes most candidates without a
    simulation.
    """)
    return


@app.cell
def _(plan, rivals):
    _shown = {"recommendation": plan.best, **{name: one.best for name, one in rivals.items()}}
    bounds_s = {
        name: (least_step_s(best.candidate.config), best.trials[0].step_s)
        for name, best in _shown.items()
        if best
    }
    _rows = [
        f"| {name} | {_shown[name].candidate.hardware} | {least:.1f} | {found:.1f} |"
        for name, (least, found) in bounds_s.items()
    ]
    mo.md(
        "| answer | GPUs | lower bound (s per step) | simulated, seed 1 (s per step) |\n"
        "| :-- | :-- | --: | --: |\n" + "\n".join(_rows)
    )
    return (bounds_s,)


@app.cell(hide_code=True)
def _(plan):
    mo.md(
        sentences(verdict(one) for one in plan.comparisons)
        or "*Both sides are compared when all candidates are simulated.*"
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Sensitivity of the recommendation

    For the candidates nearest to the recommendation, each input is set to both ends of its error,
    one at a time. The results show the cost, and whether another candidate becomes better.
    """)
    return


@app.cell
def _():
    drawn = {}  # tornados by their content: many changes leave it as it is
    return (drawn,)


@app.cell(hide_code=True)
def _(complete, drawn, go, plan, settled, tick):
    _content = tornado_content(plan)
    if plan.sensitivity and _content not in drawn:
        if len(drawn) >= MOST_DRAWN:
            drawn.clear()
        drawn[_content] = fluid_svg(partial(simulator.draw_tornado, plan))
    _left = mo.hstack([mo.md("Not all of it is simulated yet."), go, tick], justify="start", gap=1)
    mo.vstack(
        [
            *([mo.callout(_left, kind="info")] if settled and not complete else []),
            *([drawn[_content]] if plan.sensitivity else []),
            mo.md(sentences(simulator.sensitivity_lines(plan))),
        ]
    )
    return


@app.cell(hide_code=True)
def _(plan):
    mo.stop(plan.best is None)
    _errors = {None: "unknown", 0.0: "measured or given"}
    _rows = [
        f"| {part.name} | {_errors.get(part.error) or f'{part.error:.0%}'} | {part.source} |"
        for part in cost_parts(plan.best.candidate.config)
    ]
    _parts = mo.md(
        """
    The table lists the errors of the cost model for each part. Two measured trainers differ by
    42 %, and yours may differ as much: time one of your training steps on one node, and set
    `base.trainer.mfu`. The model does not include checkpoints that block, evaluation, lengths that
    change through learning, and the cost of staleness in learning.

    | part | error | source |
    | :-- | --: | :-- |
    """
        + "\n    ".join(_rows)
    )
    mo.vstack([mo.md(sentences(simulator.model_error_lines(plan))), _parts])
    return


@app.cell(hide_code=True)
def _(prices):
    _catalogue = {name: simulator.find_gpu(name).price for name in prices.value}
    _rows = [
        f"| {name} | {prices.value[name]:.2f} | {price.low or '-'} | {price.typical or '-'} "
        f"| {price.high or '-'} | {price.source} ({price.date}) |"
        for name, price in _catalogue.items()
    ]
    mo.md(
        "| $ per GPU-hour | yours | low | typical | high | source of low, typical and high |\n"
        "| :-- | --: | --: | --: | --: | :-- |\n" + "\n".join(_rows)
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Your own run

    After a change, turn on the switch that appears above the answers to simulate it. If you turn it
    off, the page keeps the results so far.
    """)
    return


@app.cell(hide_code=True)
def _(candidates, run):
    mo.accordion(
        {
            "Another model, batch or context": mo.hstack(
                list(run.elements.values()), justify="start", gap=1.5, wrap=True
            ),
            "Other GPUs, sizes and layouts": mo.hstack(
                list(candidates.elements.values()), justify="start", gap=1.5, wrap=True
            ),
        }
    )
    return


@app.cell(hide_code=True)
def _(plan, question):
    _text = simulator.plan_yaml(question)
    mo.vstack(
        [
            mo.md(
                """
    The plan file has only what differs from the defaults; `areal-lab plan my_plan.yaml` searches
    it on all processors.
    """
            ),
            mo.hstack(
                [
                    mo.download(
                        _text.encode(),
                        filename="my_plan.yaml",
                        mimetype="application/yaml",
                        label="Plan file (YAML)",
                    ),
                    mo.download(
                        simulator.plan_csv(plan).encode(),
                        filename="candidates.csv",
                        mimetype="text/csv",
                        label="All candidates (CSV)",
                    ),
                ],
                justify="start",
            ),
            mo.accordion({"my_plan.yaml": mo.md(f"```yaml\n{_text}```")}),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Try this

    - **Forbid staleness** (eta 0). The recommendation is not a slower H100 cluster but another GPU,
      twice as many of them, at more than twice the cost.
    - **Move the deadline from 24 to 8 hours.** Four times the GPUs cost only a third more. Then
      forbid staleness, too: no cluster of the list meets the deadline.
    - **Raise the price of the H100 to $5** (its high price in the table): the recommendation is
      the H200. Reset it, and lower the price of the A100 until it is recommended: at about $0.85,
      below the lowest offered price.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The code

    `docs/plan.md` explains the plan file and the search, `docs/simulator.md` the cost model. The
    last term of the lower bound is Little's law under the paper's rule of staleness
    (arXiv:2505.24298, eq. 3).
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.accordion(
        code_of(
            simulator.PlanSearch,
            least_step_s,
            simulator.TrialCache,
            simulator.plan_yaml,
            pareto_chart,
        )
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 2 CPU s without torch, because the package
    contains the simulations of the first question. Another model or batch takes 5 to 30 CPU s, and
    only when you request it.
    """)
    return


if __name__ == "__main__":
    app.run()
