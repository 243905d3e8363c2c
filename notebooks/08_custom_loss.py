# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[train,notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="A custom loss")

with app.setup:
    import marimo as mo
    import numpy as np

    from areal_lab.runlog.seeds import load_seed_results
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.pushes import push_curves, push_fields
    from areal_lab.widgets.seed_charts import final_reward_rows, gradient_panels, reward_bands
    from areal_lab.widgets.source import code_of


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # A custom loss

    *A loss has five lines. Which mistake in them ruins the training, and which check shows it
    before training?*

    **The usual answer:** a loss that throws half of the data away is worse than one that keeps all
    of it. **Here it is the other way round.** Two mistakes are easily made in PPO's
    $\min(r A, \mathrm{clip}(r, 1 \pm \epsilon)\, A)$:

    - **Clip from above** forgets the lower end of the clip. Responses that were worse than others
      to their prompt then have almost no gradient. It learns as much as PPO.
    - **No ratio** ignores that responses are two versions old when they are trained on, and
      maximizes $A \log \pi_\theta$: all data, nothing clipped. It loses two thirds of what PPO
      gains.
    """)
    return


@app.cell
def _():
    recorded = load_seed_results()
    return (recorded,)


@app.cell
def _(recorded):
    shown = mo.ui.multiselect(
        recorded.losses, value=["PPO", "clip from above", "no ratio"], label="recorded losses"
    )
    return (shown,)


@app.cell(hide_code=True)
def _(recorded, shown):
    mo.vstack(
        [shown, reward_bands(recorded.of(*shown.value).curves(), losses=recorded.losses)],
        gap=0.3,
    )
    return


@app.cell
def _(recorded):
    final = recorded.final_rewards()
    differences = recorded.differences("PPO")
    return differences, final


@app.cell(hide_code=True)
def _(differences, final):
    mo.md(f"""
    Lines are means of {final["PPO"].n} seeds in bands of their 95 % intervals (Student's t), of
    rewards that are running means of 5 steps. On held-out problems **clip from above** ends
    {signed(differences["clip from above"])} from PPO, paired by seed; **no ratio** ends
    {signed(differences["no ratio"])} from it. The held-out rewards themselves are below.
    """)
    return


@app.function(hide_code=True)
def signed(difference):
    """A difference with its interval, as text."""
    return f"{difference.mean:+.3f} ± {difference.ci95:.3f}".replace("-", "\N{MINUS SIGN}")


@app.cell(hide_code=True)
def _(final, recorded, shown):
    final_reward_rows(
        {name: final[name] for name in shown.value},
        losses=recorded.losses,
        start=recorded.start_reward().mean,
    )
    return


@app.cell(hide_code=True)
def _(recorded):
    mo.md(f"""
    These are {len(recorded.runs)} runs of `areal-lab train {recorded.about["config"]}`, with a
    staleness bound of η = 4. Recorded by `{recorded.about["made_by"]}` on
    {recorded.about["made_at"]} with areal_lab {recorded.about["versions"]["areal_lab"]} and torch
    {recorded.about["versions"]["torch"]}, on {recorded.about["machine"]}.

    ## Five lines

    Write your own loss, or start from one of ours. `torch` and everything in `areal_lab.functional`
    are available without an import. The text runs unchecked in this process: serve this page to
    trusted people only.
    """)
    return


@app.cell
def _():
    import torch

    from areal_lab.functional import (
        anchored_at_behavior,
        drifting_policy,
        gradient_alignment_by_lag,
        gradient_check,
        gradient_spread_by_lag,
        loss_surface,
        per_sample_gradients,
        ppo,
        unbiased_gradient,
    )
    from areal_lab.training.objective import typed_loss

    torch.set_num_threads(1)  # for small tensors, more threads wait longer than they compute

    return (
        anchored_at_behavior,
        drifting_policy,
        gradient_alignment_by_lag,
        gradient_check,
        gradient_spread_by_lag,
        loss_surface,
        per_sample_gradients,
        ppo,
        torch,
        typed_loss,
        unbiased_gradient,
    )


@app.cell
def _(typed_loss):
    example = mo.ui.dropdown(list(typed_loss.EXAMPLES), value="clip from above", label="start from")
    return (example,)


@app.cell
def _(example, typed_loss):
    editor = mo.ui.code_editor(
        typed_loss.EXAMPLES[example.value], language="python", min_height=110
    )
    return (editor,)


@app.cell(hide_code=True)
def _(editor, example):
    mo.vstack([example, editor], gap=0.3)
    return


@app.cell
def _(editor, typed_loss):
    typed = typed_loss.read_loss(editor.value)
    return (typed,)


@app.cell(hide_code=True)
def _(typed):
    mo.callout(mo.md(verdict(typed)), kind="danger" if typed.problem else "success")
    return


@app.function(hide_code=True)
def verdict(typed):
    """Whether a loss can train, and the gradient of each of its inputs, as Markdown."""
    if typed.problem:
        return f"**It cannot train:** {typed.problem}"
    found = ", ".join(f"`{name}` {one.largest:.2f}" for name, one in typed.check.inputs.items())
    masked = any(one.largest_masked for one in typed.check.inputs.values())
    return (
        "**It can train.** `gradient_check` called it once, on 15 tokens, and found these largest "
        f"gradients: {found}. The trainer passes all but the first as constants."
        + (" **Masked tokens get a gradient too:** reduce with `token_mean`." if masked else "")
    )


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Its gradient

    $$r = \pi_\theta / \pi_{prox}, \quad w = \pi_{prox} / \pi_{behav}$$

    $$\text{push} = -\partial L / \partial \log \pi_\theta$$

    The picture shows the push along $r$, at $w = 1$, on a good token, which should become more
    likely, and on a bad token, which should become less likely. **Clip from above** pushes a bad
    token only if it has become 1.2 times as likely. **No ratio** pushes a bad token down just as
    hard when it is already unlikely.
    """)
    return


@app.cell
def _(anchored_at_behavior, ppo, typed):
    mo.stop(typed.function is None, mo.md("*Nothing to draw: the loss cannot train.*"))
    losses = {"yours": typed.function, "PPO": anchored_at_behavior(ppo)}
    return (losses,)


@app.cell
def _(loss_surface, losses, torch):
    line = np.linspace(0.4, 1.8, 141)
    pushes = {
        name: -loss_surface(
            loss,
            ratios=torch.as_tensor(line),
            weights=torch.tensor([1.0], dtype=torch.float64),
            advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        )
        .gradient[:, 0]
        .numpy()
        for name, loss in losses.items()
    }
    return line, pushes


@app.cell(hide_code=True)
def _(line, pushes):
    curves = {
        title: push_curves(
            line.tolist(),
            pushes["yours"][:, sign].tolist(),
            pushes["PPO"][:, sign].tolist(),
            names=("yours", "PPO"),
        )
        for sign, title in enumerate(["a good token, A = +1", "a bad token, A = \N{MINUS SIGN}1"])
    }
    columns(*(mo.vstack([mo.md(title), curve], gap=0) for title, curve in curves.items()))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    The next picture shows the push over both ratios. An arrow shows the direction in which descent
    moves a token; a hollow dot has no gradient.
    """)
    return


@app.cell
def _(loss_surface, losses, torch):
    ratios = np.geomspace(0.25, 4, 13)
    weights = np.geomspace(0.25, 4, 7)
    signs = {"a good token, A = +1": 0, "a bad token, A = \N{MINUS SIGN}1": 1}
    surfaces = {
        name: loss_surface(
            loss,
            ratios=torch.as_tensor(ratios),
            weights=torch.as_tensor(weights),
            advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        )
        for name, loss in losses.items()
    }
    fields = {
        f"{name}: {sign}": -surface.gradient[:, :, index].numpy()
        for name, surface in surfaces.items()
        for sign, index in signs.items()
    }
    return fields, ratios, weights


@app.cell(hide_code=True)
def _(fields, ratios, weights):
    _planes = push_fields(fields, ratios.tolist(), weights.tolist())
    _pairs = [columns(*map(mo.as_html, _planes[at : at + 2])) for at in range(0, len(_planes), 2)]
    mo.vstack(_pairs)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ```python
    push = -loss_surface(loss, ratios=r, weights=w, advantages=A).gradient
    ```

    ## Gradients of single samples

    A small policy (64 states, 6 actions) drifts through five versions. The last version trains on
    samples of all five, 4,000 of each, and `vmap(grad(loss))` computes one gradient per sample.
    Does the mean gradient of old samples still have the direction of the unbiased gradient?
    """)
    return


@app.cell
def _():
    kept = mo.ui.slider(
        steps=[0.8, 0.9, 0.95, 0.98, 0.99, 0.995],
        value=0.99,
        label="correlation of the logits of successive versions",
        show_value=True,
        debounce=True,
    )
    kept
    return (kept,)


@app.cell
def _(drifting_policy, kept, unbiased_gradient):
    policy = drifting_policy(samples=20_000, kept=kept.value)
    unbiased = unbiased_gradient(policy)
    return policy, unbiased


@app.cell
def _(
    gradient_alignment_by_lag,
    gradient_spread_by_lag,
    losses,
    per_sample_gradients,
    policy,
    typed_loss,
    unbiased,
):
    _no_ratio = typed_loss.read_loss(typed_loss.EXAMPLES["no ratio"]).function
    cosines, variances = {}, {}
    for _name, _loss in {**losses, "no ratio": _no_ratio}.items():
        _rows = per_sample_gradients(_loss, policy)
        cosines[_name] = gradient_alignment_by_lag(_rows, policy.lag, unbiased, bins=5).tolist()
        variances[_name] = gradient_spread_by_lag(_rows, policy.lag, bins=5).variance.tolist()
    return cosines, variances


@app.cell(hide_code=True)
def _(cosines, variances):
    _fresh = variances["PPO"][0]
    _panels = gradient_panels(
        cosines,
        {name: [value / _fresh for value in values] for name, values in variances.items()},
        losses=["PPO", "yours", "no ratio"],
    )
    columns(*map(mo.as_html, _panels))
    return


@app.cell(hide_code=True)
def _(cosines):
    mo.md(f"""
    ```python
    gradients = per_sample_gradients(loss, policy)
    gradient_alignment_by_lag(gradients, policy.lag, unbiased, bins=5)
    gradient_spread_by_lag(gradients, policy.lag, bins=5)
    ```

    The wrong loss passes this test. At lag 4 the cosine of **no ratio** is
    {cosines["no ratio"][4]:.2f}, that of PPO {cosines["PPO"][4]:.2f}: PPO leaves out tokens that
    have moved far enough. One gradient gives the direction of the next step, but not the point
    where a loss stops. The curves of the push show this point.
    """)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Train it

    The model adds two numbers below 100 (75,000 parameters, made by `tools/tiny_model.py`). Its
    most likely response is nearly always right, a sampled response in 36&nbsp;% of cases. Each run
    is a real run with a trainer, an inference server and a reward worker, and has 60 asynchronous
    steps. Its folder is in `runs/`, where notebook 7 finds it. Three seeds are the fewest with a
    useful interval: the interval of two seeds is more than three times as wide.
    """)
    return


@app.cell
def _():
    eta = mo.ui.slider(steps=[0, 1, 2, 4, 8], value=4, label="staleness bound η", show_value=True)
    return (eta,)


@app.cell
def _():
    seeds = mo.ui.slider(1, 5, 1, 3, label="seeds", show_value=True)
    return (seeds,)


@app.cell
def _(typed):
    train = mo.ui.run_button(label="Train yours and PPO", disabled=bool(typed.problem))
    return (train,)


@app.cell(hide_code=True)
def _(eta, seeds, train):
    mo.hstack([train, seeds, eta], justify="start", gap=2, wrap=True)
    return


@app.cell
def _():
    from areal_lab import compare_losses, load_config

    get_trained, set_trained = mo.state(None)
    return compare_losses, get_trained, load_config, set_trained


@app.cell
def _(eta, load_config):
    config = load_config("tiny", [f"eta={eta.value}"])
    return (config,)


@app.cell
def _(compare_losses, config, editor, eta, losses, seeds, set_trained, train):
    mo.stop(not train.value)
    # PPO is what the config asks for.
    comparison = compare_losses({"PPO": None, "yours": losses["yours"]}, config, seeds=seeds.value)
    with mo.status.progress_bar(
        total=comparison.total_steps, title="Starting", remove_on_exit=True
    ) as _bar:
        for _step in comparison:
            _bar.update(
                title=f"Run {_step.run} of {comparison.runs}: {_step.loss}, seed {_step.seed}",
                subtitle=f"reward {_step.report.reward_mean:.2f} at step {_step.report.step}",
            )
    set_trained((comparison.results, editor.value, eta.value))
    return


@app.cell(hide_code=True)
def _(get_trained):
    mo.stop(get_trained() is None, mo.md("*The rewards come here once all runs have ended.*"))
    trained, trained_text, trained_eta = get_trained()
    mo.vstack(
        [
            mo.callout(mo.md(failures(trained)), kind="warn") if failures(trained) else mo.md(""),
            reward_bands(trained.curves(), losses=["PPO", "yours"]),
            final_reward_rows(
                trained.final_rewards(),
                losses=["PPO", "yours"],
                start=trained.start_reward().mean if trained.start_reward() else None,
            ),
        ]
    )
    return trained, trained_eta, trained_text


@app.function(hide_code=True)
def failures(results):
    """The runs that failed, as Markdown; empty if none did."""
    return "\n\n".join(
        f"{run.loss}, seed {run.seed}: {run.error}" for run in results.runs if run.error
    )


@app.cell(hide_code=True)
def _(trained, trained_eta, trained_text):
    _difference = trained.differences("PPO").get("yours")
    _said = (
        f"Yours ends **{signed(_difference)}** from PPO, seed by seed."
        if _difference is not None and _difference.ci95 is not None
        else "There is no interval: that takes two seeds that both losses completed."
    )
    mo.vstack(
        [
            mo.md(f"{_said} With η = {trained_eta} that took {trained.wall_s:.0f} s."),
            mo.accordion({"Yours, as it was trained": mo.md(f"```python\n{trained_text}\n```")}),
        ],
        gap=0.3,
    )
    return


@app.cell(hide_code=True)
def _(differences):
    mo.md(rf"""
    ## Try this

    - Show **no ratio, good only** among the recorded losses: it has no ratio either, and trains
      only on responses with $A > 0$. It ends {signed(differences["no ratio, good only"])} from PPO.
      A loss needs a ratio mostly for bad responses.
    - Start from **no ratio** and train it with η = 0: the two lines are one. Without staleness
      $r = 1$, where $r A$ and $A \log \pi_\theta$ have the same gradient, so the two runs of a seed
      generate the same responses.
    - Train on bad responses only: replace `advantages` by `advantages.clamp(max=0)` in **no
      ratio**. The check passes, and the reward is 0 after twenty steps.

    ## The code
    """)
    return


@app.cell(hide_code=True)
def _(compare_losses, gradient_check, loss_surface, per_sample_gradients, typed_loss):
    mo.vstack(
        [
            mo.accordion(
                code_of(
                    typed_loss.read_loss,
                    gradient_check,
                    loss_surface,
                    per_sample_gradients,
                    compare_losses,
                )
            ),
            mo.md("Page: `docs/functional/per_sample_gradients.md`."),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 2 CPU s without torch. The checks below it load
    torch; the whole page takes 5 CPU s and 0.6 GB. The button starts real training: six runs, about
    13 s each on two idle cores, in under 1 GB.
    """)
    return


if __name__ == "__main__":
    app.run()
