# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Trajectories")

with app.setup:
    import marimo as mo

    from areal_lab.host.terminal import page_text
    from areal_lab.runlog.compare import groups_by_contrast, paired_samples
    from areal_lab.runlog.read_run import find_runs, read_run
    from areal_lab.runlog.token_columns import clipped_by_lag
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.run_charts import clipping_chart, parting_chart
    from areal_lab.widgets.source import code_of
    from areal_lab.widgets.strip import Strip
    from areal_lab.widgets.token_colors import heads_of, quantities, token_colors, token_text


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Trajectories

    *A run trained on these tokens. How old was each token, and did the loss train on it or drop
    it?*

    **The usual answer:** old tokens are far off policy, so the loss drops them. Standard PPO would,
    because it clips around the policy that sampled a token. Decoupled PPO clips around the policy
    from which the step starts, and drops almost none.
    """)
    return


@app.cell
def _():
    _packaged = sorted((mo.notebook_dir() / "data").glob("haiku-*"), reverse=True)
    folders = {folder.name: folder for folder in [*_packaged, *find_runs("runs")]}
    picked = mo.ui.dropdown(list(folders), value=next(iter(folders)), label="Run")
    typed = mo.ui.text(
        value=mo.cli_args().get("run") or "", placeholder="or the path of a run folder"
    )
    again = mo.ui.button(label="Read again", tooltip="Reads what a live run wrote meanwhile")
    return again, folders, picked, typed


@app.cell(hide_code=True)
def _(again, folders, picked, typed):
    again.value  # a click runs this cell
    try:
        run = read_run(typed.value or folders[picked.value])
        groups = groups_by_contrast(run).reset_index()
        _about = mo.md(page_text(run.title.replace("|", "·")))
    except ValueError as _error:
        run = groups = None
        _about = mo.callout(mo.md(page_text(_error)), kind="danger")
    if run is not None and len(run.tokens) == 0:
        _about = mo.callout(
            mo.md(f"{page_text(run.title)}: this run has no trajectories."), kind="warn"
        )
    mo.vstack([mo.hstack([picked, typed, again], justify="start", gap=1, wrap=True), _about])
    return groups, run


@app.cell(hide_code=True)
def _(run):
    mo.stop(
        run is None or "logprobs" not in run.tokens,
        mo.md("""
    This run has no training fields, so the effect of the loss on its tokens is unknown. Record the
    fields with `areal-lab train ... token_fields=true`. The tokens themselves are below.
    """),
    )
    epsilon = mo.ui.slider(0.05, 0.5, 0.05, 0.2, label="ε", show_value=True)
    return (epsilon,)


@app.cell
def _(epsilon, run):
    by_lag = clipped_by_lag(run.tokens, clip_epsilon=epsilon.value)
    oldest = by_lag.iloc[-1]
    return oldest, by_lag


@app.cell(hide_code=True)
def _(oldest):
    mo.md(f"""
    Of the tokens with an age of {oldest.name} versions, standard PPO would have dropped
    **{oldest.standard_ppo:.0%}**; decoupled PPO dropped **{oldest.decoupled_ppo:.1%}**. It trains
    on an old token with a weight, shown below in orange and purple.
    """)
    return


@app.cell(hide_code=True)
def _(epsilon, by_lag, run):
    _chart = clipping_chart(by_lag, clipped_by_lag(run.tokens))
    _formula = mo.md(r"""
    $$\underbrace{\frac{\pi_{prox}}{\pi_{behav}}}_{\text{weight}}\;
    \min\Big(u A,\ \mathrm{clip}(u, 1 \pm \epsilon)\, A\Big)$$

    $$u = \frac{\pi_\theta}{\pi_{prox}}$$

    `clipped_by_lag(run.tokens, clip_epsilon=ε)`

    (AReaL, eq. 5; pale marks: ε = 0.2)
    """)
    columns(mo.as_html(_chart), mo.vstack([_formula, epsilon]), least_px=400)
    return


@app.cell
def _(groups, run):
    mo.stop(run is None or len(run.tokens) == 0)
    _known = quantities(run.tokens)
    quantity = mo.ui.dropdown(
        _known, value="weight" if "weight" in _known else "lag", label="Color tokens by"
    )
    _columns = ["group", "about", "reward_std", "versions", "lag_mean", "weight_change", "step"]
    table = mo.ui.table(
        groups[[name for name in _columns if name in groups]].round(3),
        selection="multi",
        initial_selection=list(range(min(6, len(groups)))),
        page_size=6,
        show_download=False,
    )
    return quantity, table


@app.cell
def _(run, table):
    _of_group = run.samples["group"]
    shown = [
        row for group in table.value["group"] for row in _of_group.index[_of_group == group]
    ] or list(range(len(run.samples)))
    _samples = run.samples.loc[shown].itertuples()
    get_clicked, set_clicked = mo.state(None)
    _first = token_colors(run.tokens, "lag")
    strip = Strip(
        _first.rows(run.tokens, shown),
        colors=_first.colors,
        labels=_first.labels,
        names=[f"group {one.group}.{one.sample}, reward {one.reward:.2g}" for one in _samples],
        title="Response tokens",
        texts=[run.tokens.labels(row) for row in shown],
        merge="most",
    )
    strip.observe(lambda change: set_clicked(change["new"]), names="selected")
    return get_clicked, shown, strip


@app.cell
def _(quantity, run, shown, strip):
    colors = token_colors(run.tokens, quantity.value)
    strip.recolor(colors.rows(run.tokens, shown), colors.colors, colors.labels)
    return (colors,)


@app.cell(hide_code=True)
def _(colors, quantity, strip):
    mo.vstack(
        [
            mo.hstack([quantity, mo.md(page_text(colors.meaning))], justify="start", wrap=True),
            mo.ui.anywidget(strip),
            mo.md("Click a token to read its group:"),
        ]
    )
    return


@app.cell(hide_code=True)
def _(colors, get_clicked, groups, run, shown, table):
    _clicked = get_clicked()
    _marked = None if _clicked is None else (shown[_clicked["row"]], _clicked["cell"])
    _varied = (table.value if len(table.value) else groups).sort_values("versions")
    focus = int(_varied.iloc[-1]["group"] if _marked is None else run.samples["group"][_marked[0]])
    _members = run.samples[run.samples["group"] == focus]
    _text = token_text(
        run.tokens, list(_members.index), colors, heads=heads_of(_members), marked=_marked
    )
    mo.Html(_text).style(max_height="26rem", overflow_y="auto")
    return (focus,)


@app.cell(hide_code=True)
def _(table):
    mo.vstack(
        [
            mo.md("""
            **Groups**, sorted by the difference between their samples. The selection is shown
            above; without a selection all samples are shown.
            """),
            table,
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Two runs, the same prompts

    Runs with the same seed have the same prompts and the same random numbers. **How long do their
    responses stay the same?** They are equal token for token while the weights are equal. After one
    small update, most differ from their first token on: a random number selects a token from the
    cumulative probabilities, and a shift of these changes the selected token.
    """)
    return


@app.cell
def _(folders):
    _second = list(folders)[:2][-1]  # the other recorded one; your runs come after them
    second_picked = mo.ui.dropdown(list(folders), value=_second, label="Second run")
    return (second_picked,)


@app.cell
def _(folders, run, second_picked):
    mo.stop(run is None or len(run.tokens) == 0)
    try:
        second = read_run(folders[second_picked.value])
        pairs = paired_samples(run, second)
    except ValueError as _error:
        mo.stop(
            True,
            mo.vstack([second_picked, mo.callout(mo.md(page_text(_error)), kind="danger")]),
        )
    return pairs, second


@app.cell(hide_code=True)
def _(pairs, second_picked):
    mo.stop(len(pairs) == 0, mo.vstack([second_picked, mo.md("The runs share no prompt.")]))
    _columns = ["about", "sample", "reward_first", "reward_second", "reward_change", "same_tokens"]
    pair_table = mo.ui.table(
        pairs.sort_values("reward_change", ascending=False, ignore_index=True)[
            [*_columns, "row_first", "row_second"]
        ].round(2),
        selection="single",
        initial_selection=[0],
        page_size=5,
        show_download=False,
    )
    mo.vstack([second_picked, parting_chart(pairs), pair_table])
    return (pair_table,)


@app.cell(hide_code=True)
def _(colors, pair_table, quantity, run, second):
    mo.stop(len(pair_table.value) == 0)
    _pair = pair_table.value.iloc[0]
    _known = quantities(second.tokens)
    _texts = [
        token_text(of.tokens, [row], own, heads=heads_of(of.samples.loc[[row]]))
        for of, row, own in [
            (run, int(_pair["row_first"]), colors),
            (
                second,
                int(_pair["row_second"]),
                token_colors(second.tokens, quantity.value if quantity.value in _known else "lag"),
            ),
        ]
    ]
    mo.hstack([mo.Html(text) for text in _texts], widths="equal", gap=2, align="start")
    return


@app.cell(hide_code=True)
def _():
    mo.md("""
    ## Try this

    - Color the tokens by `ratio`, which decoupled PPO clips: almost all are grey. Then color them
      by `weight` again, which it does not clip.
    - Color by `entropy`, and look at dark blue tokens, at which the policy was certain. Then color
      by `weight`: these tokens keep a weight of 1 at any age. An update changes certain tokens
      least.
    - Take the run `haiku-eta0`: without staleness all weights are 1, and both losses drop the same
      tokens.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.vstack(
        [
            mo.md("""
            ## The code

            `run = areal_lab.read_run(folder)`; `run.tokens["lag"]` is a numpy array, `run.samples`
            a frame. `python -m tools.record_responses` recorded the packaged runs.
            """),
            mo.accordion(
                code_of(
                    read_run,
                    clipped_by_lag,
                    groups_by_contrast,
                    paired_samples,
                    token_colors,
                    token_text,
                )
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 2 CPU s without torch; a run of 500,000 tokens
    takes 2 CPU s more, and 350 MB in total.
    """)
    return


if __name__ == "__main__":
    app.run()
