# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Response lengths")

with app.setup:
    import altair as alt
    import marimo as mo

    from areal_lab.host.terminal import page_text
    from areal_lab.widgets.chart_parts import (
        BLUE,
        GREY,
        RED,
        on_page,
        plain_axis,
        quickly,
        table,
        words,
    )
    from areal_lab.widgets.source import code_of
    from simulator import fit_lengths, load_simulation, replicate, traces
    from simulator.calibrate.lengths import batch_curve, batch_tail, quantile_curves

    LENGTHS = {
        "trace": "as observed",
        "lognormal": "fitted log-normal",
        "constant": "all of the mean length",
    }
    SCHEDULES = {
        "synchronous": {
            "schedule.name": "synchronous",
            "workload.steps": 9,
            "workload.warmup_steps": 1,
        },
        "asynchronous": {
            "schedule.name": "asynchronous",
            "workload.steps": 16,
            "workload.warmup_steps": 6,
        },
    }
    SAMPLES, CORRELATION = 16, 0.743


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Response lengths

    *How long are your responses, and what does the longest one cost a training step?*

    **The usual answer:** the mean length says how long a step takes, and a log-normal that fits the
    lengths says the rest. **But** a synchronous step waits for the longest of a thousand responses.
    When half of its decode steps are done, four of five responses have ended, and the good fit
    gives the wrong time.
    """)
    return


@app.cell
def _():
    pick = mo.ui.dropdown(list(traces()), value="deepseek_r1_client66", label="Shipped trace")
    return (pick,)


@app.cell
def _():
    upload = mo.ui.file(
        filetypes=[".csv", ".tsv", ".txt"], label="or your own CSV file, a response per row"
    )
    return (upload,)


@app.cell
def _():
    column = mo.ui.text(label="Column with the lengths", placeholder="found by its name")
    return (column,)


@app.cell
def _():
    prompt_column = mo.ui.text(label="Column that names the prompt", placeholder="optional")
    return (prompt_column,)


@app.cell
def _():
    before = {}
    return (before,)


@app.cell(hide_code=True)
def _(column, pick, prompt_column, upload):
    _about = mo.md(f"<small>{traces()[pick.value]}</small>")
    _columns = mo.hstack([column, prompt_column], justify="start", gap=2, wrap=True)
    mo.vstack(
        [
            mo.hstack([pick, upload], justify="start", align="center", gap=2, wrap=True),
            _columns if upload.value else _about,
        ]
    )
    return


@app.cell
def _(column, pick, prompt_column, upload):
    try:
        if upload.value:
            fit = fit_lengths(
                upload.contents(),
                name=upload.name(),
                column=column.value,
                prompt_column=prompt_column.value,
            ).save()
        else:
            fit = fit_lengths(pick.value)
    except ValueError as _error:
        mo.stop(True, mo.callout(str(_error), "danger"))
    return (fit,)


@app.cell(hide_code=True)
def _(fit):
    _half, _tail = fit.quantiles([0.5, 0.99])
    mo.hstack(
        [
            mo.stat(f"{fit.answers:,}", label="responses"),
            mo.stat(f"{_half:,.0f}", label="median, tokens"),
            mo.stat(f"{fit.mean_tokens:,.0f}", label="mean, tokens"),
            mo.stat(f"{_tail:,.0f}", label="99 % quantile"),
            mo.stat(f"{fit.capped_share:.2%}", label="reached the cap"),
        ],
        justify="start",
        wrap=True,
    )
    return


@app.cell
def _():
    prompts = mo.ui.slider(
        steps=[8, 16, 32, 64], value=64, debounce=True, show_value=True, label="Prompts a step"
    )
    return (prompts,)


@app.cell
def _(fit):
    cap = mo.ui.slider(
        steps=[
            *(n for n in (500, 1000, 2000, 4000, 8000, 16000) if n < fit.max_tokens),
            fit.max_tokens,
        ],
        value=fit.max_tokens,
        debounce=True,
        show_value=True,
        label="Cut off at, tokens",
    )
    return (cap,)


@app.cell
def _(cap, fit, prompts):
    alike = CORRELATION if fit.group_correlation is None else fit.group_correlation
    observed = fit.model("trace", max_tokens=cap.value, group_correlation=alike)
    tail = batch_tail(observed, prompts.value, SAMPLES)
    curve = batch_curve(observed, prompts.value, SAMPLES)
    return alike, curve, tail


@app.cell(hide_code=True)
def _(cap, prompts, tail):
    mo.vstack(
        [
            mo.md(f"""
    ## Effect of the tail on a synchronous step

    A synchronous step starts {prompts.value} x {SAMPLES} responses together and trains when the
    last one has ended. When half of its decode steps are done, **{tail.done_at_half.mean:.0%}** of
    the responses have ended: the other half of the steps is for the longest
    **{1 - tail.done_at_half.mean:.0%}**. A slot in the decode batches is empty
    **{tail.waiting.mean:.0%}** of the time, $1 - \\text{{mean}} / \\text{{longest}}$.
    """),
            mo.hstack([prompts, cap], justify="start", gap=2, wrap=True),
        ]
    )
    return


@app.cell(hide_code=True)
def _(before, curve, fit, tail):
    _old = before.get((fit.observed.source, "curve"), curve)
    before[fit.observed.source, "curve"] = curve
    _marks = [
        {"tokens": tail.mean_tokens.mean, "what": "mean response", "at": 0.93},
        {"tokens": tail.longest_tokens.mean, "what": "longest, on average", "at": 0.8},
    ]
    with quickly():
        _across = alt.X(
            "tokens:Q", axis=plain_axis(), title="decode steps since the start of the batch"
        )
        _up = alt.Y("running:Q", axis=plain_axis(format="%"), title="responses still running")
        _area = alt.Chart(table(curve)).mark_area(color=BLUE, opacity=0.35, line={"color": BLUE})
        _last = alt.Chart(table(_old if _old != curve else []))
        _rules = alt.Chart(table(_marks)).encode(x="tokens:Q")
        _chart = on_page(
            _area.encode(_across.scale(domain=[0, fit.max_tokens], nice=False), _up)
            + _last.mark_line(color=GREY, strokeDash=[4, 3], clip=True).encode(
                x="tokens:Q", y="running:Q"
            )
            + _rules.mark_rule(color=RED, strokeWidth=2)
            + words(_rules, align="right", dx=-6).encode(y="at:Q", text="what:N"),
            height=200,
        )
    _chart
    return


@app.cell
def _(alike):
    base = load_simulation(
        "table_1_1.5b_asynchronous",
        [
            *("gpus=16", "rollout_gpus=12", "seeds=3", "schedule.max_concurrent_prompts=0"),
            f"workload.answers.group_correlation={alike}",
        ],
    )
    return (base,)


@app.cell
def _(base, cap, fit, prompts):
    def _config(kind, schedule):
        return base.with_settings(
            {
                **SCHEDULES[schedule],
                **fit.settings(kind, max_tokens=cap.value),
                "workload.prompts_per_batch": prompts.value,
                "trainer.micro_batch_tokens": max(32768, cap.value + 1024),
            }
        )

    _all = [(kind, schedule) for kind in fit.families for schedule in SCHEDULES]
    with mo.status.progress_bar(
        total=3 * len(_all), title="Simulating steps", remove_on_exit=True
    ) as _bar:
        steps = {
            (kind, schedule): replicate(
                _config(kind, schedule), processes=1, on_result=lambda _: _bar.update()
            )
            for kind, schedule in _all
        }
    over = {
        schedule: steps[fit.kind, schedule].ratio(steps["trace", schedule], lambda one: one.step_s)
        for schedule in SCHEDULES
    }
    return over, steps


@app.cell(hide_code=True)
def _(before, fit, steps):
    rows = [
        {
            "lengths": LENGTHS[kind],
            "schedule": schedule,
            "step": found.step_s.mean,
            "low": found.step_s.low,
            "high": found.step_s.high,
            "text": f"{found.step_s.mean:,.0f} s",
        }
        for (kind, schedule), found in steps.items()
    ]
    _old = before.get((fit.observed.source, "steps"), rows)
    before[fit.observed.source, "steps"] = rows
    with quickly():
        _y = alt.Y("lengths:N", title=None, sort=list(LENGTHS.values()), axis=plain_axis())
        _side = alt.YOffset("schedule:N", sort=list(SCHEDULES))
        _end = max(row["high"] for row in [*rows, *_old])
        _across = alt.X("step:Q", title="seconds per training step", axis=plain_axis(tickCount=7))
        _across = _across.scale(domain=[0, 1.4 * _end], nice=False)
        _color = alt.Color("schedule:N", title=None).scale(
            domain=list(SCHEDULES), range=[RED, BLUE]
        )
        _bars = alt.Chart(table(rows)).encode(_y, _side)
        _past = alt.Chart(table(_old if _old != rows else [])).encode(_y, _side, _across)
        _chart = on_page(
            _past.mark_tick(color=GREY, thickness=3, size=18)
            + _bars.mark_bar(opacity=0.75).encode(
                _across, _color.legend(orient="top", labelFontSize=13, symbolSize=200, columns=1)
            )
            + _bars.mark_rule(color=GREY, strokeWidth=3).encode(x="low:Q", x2="high:Q")
            + words(_bars, align="left", dx=8).encode(x="high:Q", text="text:N"),
            height=170,
        )
    _chart
    return (rows,)


@app.cell(hide_code=True)
def _(alike, prompts, steps):
    _sync, _async = steps["trace", "synchronous"], steps["trace", "asynchronous"]
    _gain = _sync.ratio(_async, lambda one: one.step_s)
    _even = steps["constant", "synchronous"].ratio(
        steps["constant", "asynchronous"], lambda one: one.step_s
    )
    mo.md(f"""
    The simulated cluster has R1-Distill-Qwen-1.5B on 16 H800, of which 12 generate, with
    {prompts.value} x {SAMPLES} responses per step and a correlation of {alike:.2f} within a prompt.
    The picture has means of three seeds with 95 % intervals; grey ticks are the values before the
    last change. All lengths have the same mean.

    **Mean against longest.** The mean length determines the time of an asynchronous step. A
    synchronous step takes **{_gain.mean:.1f} times** as long ({_gain.low:.1f} to {_gain.high:.1f});
    without a tail it would take {_even.mean:.1f} times as long, because generation and training
    take turns.
    """)
    return


@app.cell(hide_code=True)
def _(fit):
    _shares = [0.5, 0.9, 0.99, 0.999]
    _rows = [
        f"| {LENGTHS[family]} | {fit.distances[family]:.3f} | "
        + " | ".join(f"{tokens:,.0f}" for tokens in fit.quantiles(_shares, family))
        + f" | {fit.model(family).capped_share():.2%} |"
        for family in LENGTHS
        if family in fit.families
    ]
    _within = fit.within_prompts
    _alike = ""
    if _within:
        _alike = (
            f"Correlation of ln(tokens) within a prompt: **{_within.correlation:.2f}** "
            f"({_within.interval[0]:.2f} to {_within.interval[1]:.2f}, 95 %)."
        )
    _table = "\n".join(
        [
            "| lengths | KS distance | 50 % | 90 % | 99 % | 99.9 % | cut off |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *_rows,
        ]
    )
    _notes = "\n".join(f"- {page_text(note)}" for note in fit.notes)
    mo.vstack(
        [
            mo.md(r"""
    ## Is a fitted log-normal good enough?

    ```python
    fit = fit_lengths("lengths.csv")  # or a run folder, numbers, a trace
    ```

    The fit keeps the mean and maximizes the likelihood of all lengths over the spread $\sigma$. A
    response that reached the cap $c$ counts as at least this long:

    $$ \ln L = \sum_{x < c} \ln \frac{\phi(z(x))}{\sigma} + n_{x = c} \ln (1 - \Phi(z(c))) $$

    $$ z(x) = \frac{\ln x - \mu}{\sigma} $$
    """),
            mo.md(_table),
            mo.md(f"$\\sigma$ = {fit.sigma:.3f}. {_alike}\n\n{_notes}"),
        ]
    )
    return


@app.cell
def _(fit):
    curves = [{**point, "lengths": LENGTHS[point["family"]]} for point in quantile_curves(fit)]
    return (curves,)


@app.cell(hide_code=True)
def _(curves, fit):
    _ticks = {-3.09: "0.1 %", -2.326: "1 %", -1.282: "10 %", -0.674: "25 %", 0: "50 %"}
    _ticks |= {0.674: "75 %", 1.282: "90 %", 2.326: "99 %", 3.09: "99.9 %"}
    _label = " : ".join(f"abs(datum.value - {at}) < 0.01 ? '{text}'" for at, text in _ticks.items())
    _kinds = list(LENGTHS.values())
    _across = plain_axis(values=list(_ticks), labelExpr=f"{_label} : ''")
    _lines = (
        alt.Chart(table(curves))
        .mark_line(strokeWidth=2.5)
        .encode(
            alt.X("score:Q", title="share of the responses up to this length", axis=_across),
            alt.Y("tokens:Q", title="tokens", axis=plain_axis(tickCount=4)).scale(type="log"),
            alt.Color("lengths:N", title=None)
            .scale(domain=_kinds, range=[BLUE, RED, GREY])
            .legend(orient="top", labelLimit=300, labelFontSize=13, symbolSize=300, columns=1),
            alt.StrokeDash("lengths:N").scale(domain=_kinds, range=[[1, 0], [7, 4], [2, 3]]),
            tooltip=[
                "lengths:N",
                alt.Tooltip("share:Q", format=".2%"),
                alt.Tooltip("tokens:Q", format=",.0f"),
            ],
        )
    )
    _cap = alt.Chart(table([{"cap": fit.max_tokens}])).encode(y="cap:Q")
    _name = f"{'cap' if fit.capped_share else 'longest'}: {fit.max_tokens:,} tokens"
    _words = words(_cap, align="left", dy=-9).encode(x=alt.value(6), text=alt.value(_name))
    on_page(_lines + _cap.mark_rule(color=GREY) + _words, height=290)
    return


@app.cell(hide_code=True)
def _(cap, fit, over):
    def _told(ratio):
        longer = "longer" if ratio > 1 else "shorter"
        return f"{abs(ratio - 1):.0%} {longer}" if abs(ratio - 1) > 0.005 else "as long"

    _sync, _async = over["synchronous"], over["asynchronous"]
    _cut = f", both cut off at {cap.value:,} tokens" if cap.value < fit.max_tokens else ""
    mo.md(
        f"""
    The axis of shares is stretched so that a log-normal is a straight line. The fitted one is never
    off by more than **{100 * fit.distance:.1f} points** (Kolmogorov-Smirnov distance; chance alone
    gives up to {100 * fit.chance_distance:.1f} with {fit.answers:,}
    responses). Is this good enough? Simulated
    with the fit instead of the lengths themselves{_cut}, an asynchronous step of the same cluster
    is {_told(_async.mean)}, and a **synchronous** step is **{_told(_sync.mean)}**
    ({_sync.low - 1:+.0%} to {_sync.high - 1:+.0%}). A synchronous step waits for the longest
    response, about which the distance says little: the cap cuts off
    {fit.model(max_tokens=cap.value).capped_share():.2%} of the log-normal and
    {fit.model("trace", max_tokens=cap.value).capped_share() or fit.capped_share:.2%} of the
    responses.
    """
        if fit.kind == "lognormal"
        else f"All responses have {fit.mean_tokens:,.0f} tokens: there is no tail to wait for."
    )
    return


@app.cell
def _(base, cap, fit):
    _sizes = (8, 16, 32, 64)
    with mo.status.progress_bar(
        total=3 * len(_sizes) * len(SCHEDULES), title="Simulating batches", remove_on_exit=True
    ) as _bar:
        by_size = {
            (size, schedule): replicate(
                base.with_settings(
                    {
                        **SCHEDULES[schedule],
                        **fit.settings("trace", max_tokens=cap.value),
                        "workload.prompts_per_batch": size,
                        "trainer.micro_batch_tokens": max(32768, cap.value + 1024),
                    }
                ),
                processes=1,
                on_result=lambda _: _bar.update(),
            ).step_s
            for size in _sizes
            for schedule in SCHEDULES
        }
    growth = by_size[64, "synchronous"].mean / by_size[8, "synchronous"].mean
    return by_size, growth


@app.cell(hide_code=True)
def _(by_size, growth):
    mo.md(f"""
    ## A larger batch hides its own tail

    A synchronous step with 64 prompts takes **{growth:.1f} times** as long as one with 8, not 8
    times: both wait for one response of about the same length. The seconds per prompt fall from
    {by_size[8, "synchronous"].mean / 8:.0f} to {by_size[64, "synchronous"].mean / 64:.0f}. The
    dashed line is the naive expectation: twice the work, twice the time.
    """)
    return


@app.cell(hide_code=True)
def _(by_size, prompts):
    _rows = [
        {"prompts": size, "schedule": name, "step": step.mean, "low": step.low, "high": step.high}
        for (size, name), step in by_size.items()
    ]
    _first = by_size[8, "synchronous"].mean
    _naive = [{"prompts": size, "step": _first * size / 8} for size in (8, 16, 32)]
    _sizes = plain_axis(values=[8, 16, 32, 64])
    _x = alt.X("prompts:Q", title=f"prompts a step, {SAMPLES} responses each", axis=_sizes)
    _x = _x.scale(type="log", base=2, domain=[7, 75], nice=False)
    _y = alt.Y("step:Q", title="seconds per step", axis=plain_axis(tickCount=4))
    _range = [0.8 * min(row["low"] for row in _rows), 1.3 * _naive[-1]["step"]]
    _y = _y.scale(type="log", domain=_range, nice=False)
    _color = alt.Color("schedule:N", title=None).scale(domain=list(SCHEDULES), range=[RED, BLUE])
    _lines = alt.Chart(table(_rows)).encode(
        _x,
        _color.legend(orient="top", labelFontSize=13, columns=1),
        tooltip=["schedule:N", "step:Q"],
    )
    _guess = alt.Chart(table(_naive)).encode(_x, _y)
    _chosen = alt.Chart(table([{"prompts": prompts.value}])).encode(_x)
    on_page(
        _chosen.mark_rule(color=GREY, strokeDash=[1, 3])
        + _guess.mark_line(strokeDash=[6, 4], color=GREY)
        + words(_guess.transform_filter("datum.prompts == 32"), align="left", dx=6).encode(
            text=alt.value("in proportion")
        )
        + _lines.mark_rule(strokeWidth=3).encode(y="low:Q", y2="high:Q")
        + _lines.mark_line(point={"size": 60, "filled": True}).encode(_y),
        height=240,
    )
    return


@app.cell
def _(fit):
    family = mo.ui.dropdown(
        {LENGTHS[kind]: kind for kind in fit.families},
        value=LENGTHS["trace"],
        label="Export lengths",
    )
    return (family,)


@app.cell(hide_code=True)
def _(cap, family, fit, upload):
    _named = fit.stored_as("lengths.csv") if upload.value else fit
    block = _named.to_yaml(family.value, max_tokens=cap.value)
    _downloads = [mo.download(block, filename="lengths.yaml", label="lengths.yaml")]
    if upload.value and family.value == "trace":
        _downloads.append(mo.download(fit.to_csv(), filename="lengths.csv", label="lengths.csv"))
    mo.vstack(
        [
            mo.md("""
    ## Export

    `areal-lab simulate lengths.yaml` reads the block below, alone or as a part of your file.
    """),
            mo.hstack([family, *_downloads], justify="start", align="center", gap=2, wrap=True),
            mo.plain_text(block),
        ]
    )
    return (block,)


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Try this

    - Cut the responses of `deepseek_r1_client66` off at 16,000 tokens, which one in ten exceeds:
      the synchronous step loses 30 % of its time, the asynchronous one 6 %.
    - Choose `deepseek_r1` with 8 prompts per step. This log-normal ends too *early*, and makes the
      synchronous step too short. The tail determines the sign of the error; the distance does not
      show it.
    - Upload your own lengths (a column `tokens`, and `prompt_id` if you have it). A run folder
      needs no file: `simulator.fit_lengths("runs/demo")`.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.vstack(
        [
            mo.md("""
    ## The code

    This page uses `simulator.fit_lengths` and `simulator.replicate`; see *Your own lengths* in
    `docs/simulator.md`. The traces are published logs; their sources and licenses are in
    `simulator/workload/data`. Section 3 of AReaL (arXiv:2505.24298) shows that long responses
    dominate synchronous steps.
    """),
            mo.accordion(code_of(fit_lengths, quantile_curves, batch_tail)),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** about 4 CPU s, 1 s of it before the first picture, without torch and
    without a GPU.
    """)
    return


if __name__ == "__main__":
    app.run()
