# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[train,notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Ratio and clip")

with app.setup:
    import marimo as mo
    import numpy as np

    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.pushes import push_arrows, push_curves, push_fields, ratio_paths
    from areal_lab.widgets.ratio_plane import TokenRatios, axis_places, dragged_token, ratio_plane
    from areal_lab.widgets.source import code_of


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Ratio and clip

    *Three policies give a probability to a token: the behavior policy sampled it, an update starts
    from the proximal policy, and the trained policy moves. Which losses still have a gradient at
    the token, and how large is it?*

    **The usual answer:** the clip stops a token that has moved too far. **But too far from what?**
    The red point is a stale token at the start of an update. The trained policy has not moved yet
    ($r = 1$), but earlier updates made the token 1.5 times as likely since it was sampled
    ($w = 1.5$). Standard PPO clips $r \cdot w = 1.5$ and drops the token before the update.
    Decoupled PPO clips $r$ and trains on the token. **Drag the point.**
    """)
    return


@app.cell
def _():
    # What is being dragged is not drawn anew, or the pointer would lose it: the plane follows the
    # sliders, the sliders follow the plane, and all else follows the token.
    held = {"token": TokenRatios(1.0, 1.5)}
    get_token, set_token = mo.state(held["token"])
    get_slid, set_slid = mo.state(held["token"])
    get_dragged, set_dragged = mo.state(held["token"])
    return get_dragged, get_slid, get_token, held, set_dragged, set_slid, set_token


@app.cell
def _():
    sign = mo.ui.radio(
        {"A = +1, a good token": 1.0, "A = -1, a bad token": -1.0},
        inline=True,
        value="A = +1, a good token",
    )
    return (sign,)


@app.cell
def _():
    clip = mo.ui.slider(0.05, 0.5, 0.05, 0.2, label="ε", show_value=True)
    return (clip,)


@app.cell
def _(get_dragged, held, set_slid, set_token):
    def _slide(**changed):
        held["token"] = held["token"]._replace(**changed)
        set_token(held["token"])
        set_slid(held["token"])

    ratio = mo.ui.slider(
        steps=axis_places(),
        value=get_dragged().ratio,
        label="r",
        show_value=True,
        on_change=lambda value: _slide(ratio=value),
    )
    weight = mo.ui.slider(
        steps=axis_places(),
        value=get_dragged().weight,
        label="w",
        show_value=True,
        on_change=lambda value: _slide(weight=value),
    )
    return ratio, weight


@app.cell(hide_code=True)
def _(clip, ratio, sign, weight):
    mo.hstack([sign, clip, ratio, weight], justify="start", gap=2, wrap=True)
    return


@app.cell(hide_code=True)
def _():
    formulas = mo.md(r"""
    **PPO, one old policy** (orange)

    $\min\big(r w A,\ \mathrm{clip}(r w, 1 \pm \epsilon)\, A\big)$

    `anchored_at_behavior(ppo)`

    **Decoupled PPO** (blue)

    $w \min\big(r A,\ \mathrm{clip}(r, 1 \pm \epsilon)\, A\big)$

    `decoupled_ppo`

    $r = \pi_\theta / \pi_{prox}, \quad w = \pi_{prox} / \pi_{behav}$

    On the dotted lines the trained policy equals the proximal ($r = 1$) or the behavior policy
    ($r w = 1$).
    """)
    return (formulas,)


@app.cell
def _(clip, formulas, get_slid, held, set_dragged, set_token, sign):
    def _drag(_):
        held["token"] = dragged_token(plane.selections, held["token"])
        set_token(held["token"])
        set_dragged(held["token"])

    get_slid()
    plane = mo.ui.altair_chart(
        ratio_plane(held["token"], clip_epsilon=clip.value, advantage=sign.value),
        on_change=_drag,
        chart_selection=False,
        legend_selection=False,
    )
    columns(plane, formulas, least_px=420)
    return


@app.cell
def _(get_token):
    token = get_token()
    return (token,)


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## The push on this token

    The gradient of a loss can move $\log \pi_\theta$ only. The arrows are the negative gradient:
    the direction in which descent pushes the token. The pale bar is $r w A$, the push of importance
    sampling without a trust region.
    """)
    return


@app.cell
def _():
    from functools import partial

    import torch

    from areal_lab.functional import (
        anchored_at_behavior,
        cispo,
        decoupled_ppo,
        dual_clip_ppo,
        gradient_check,
        grpo,
        gspo,
        loss_surface,
        policy_loss,
        ppo,
        ratio_path,
        sapo,
    )
    from areal_lab.functional.losses import retellings

    torch.set_num_threads(1)  # for small tensors, more threads wait longer than they compute

    return (
        anchored_at_behavior,
        cispo,
        decoupled_ppo,
        dual_clip_ppo,
        gradient_check,
        grpo,
        gspo,
        loss_surface,
        partial,
        policy_loss,
        ppo,
        ratio_path,
        retellings,
        sapo,
        torch,
    )


@app.cell
def _(anchored_at_behavior, cispo, clip, decoupled_ppo, dual_clip_ppo, gspo, partial, ppo, sapo):
    losses = {
        "PPO": anchored_at_behavior(ppo, clip_epsilon=clip.value),
        "decoupled PPO": partial(decoupled_ppo, clip_epsilon=clip.value),
        "dual clip, c = 3": partial(dual_clip_ppo, clip_epsilon=clip.value),
        "CISPO": partial(cispo, clip_epsilon=(1.0, clip.value)),
        "SAPO": sapo,
        "GSPO": gspo,
    }
    return (losses,)


@app.cell
def _(loss_surface, losses, sign, token, torch):
    pushes = {
        name: -loss_surface(
            loss,
            ratios=torch.tensor([token.ratio], dtype=torch.float64),
            weights=torch.tensor([token.weight], dtype=torch.float64),
            advantages=torch.tensor([sign.value], dtype=torch.float64),
            response_tokens=100,
        ).gradient.item()
        for name, loss in losses.items()
    }
    return (pushes,)


@app.cell(hide_code=True)
def _(pushes, sign, token):
    push_arrows(pushes, unclipped=token.ratio * token.weight * sign.value)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ```python
    push = -loss_surface(loss, ratios=r, weights=w, advantages=A, response_tokens=100).gradient
    ```

    CISPO has the same upper ε as the other losses here and no lower one (its usual cap is a weight
    of 5). SAPO and GSPO have the numbers of their papers. GSPO uses whole responses: the token is
    one of 100, and the other 99 are on policy.

    ## The whole plane

    Arrows show the direction of the push; a hollow dot has no gradient. All arrows are horizontal,
    because no update can change $w$.
    """)
    return


@app.cell
def _(loss_surface, losses, sign, torch):
    field_ratios = np.geomspace(0.25, 4, 13)
    field_weights = np.geomspace(0.25, 4, 7)
    fields = {
        name: -loss_surface(
            loss,
            ratios=torch.as_tensor(field_ratios),
            weights=torch.as_tensor(field_weights),
            advantages=torch.tensor([sign.value], dtype=torch.float64),
            response_tokens=100,
        )
        .gradient[:, :, 0]
        .numpy()
        for name, loss in losses.items()
    }
    return field_ratios, field_weights, fields


@app.cell(hide_code=True)
def _(field_ratios, field_weights, fields):
    _planes = push_fields(fields, field_ratios.tolist(), field_weights.tolist())
    columns(*map(mo.as_html, _planes))
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    - **PPO** ends at a diagonal, **decoupled PPO** at a vertical line. At $w = 1$ they agree.
    - **Dual clip** differs for a bad token only: it has no push if $r$ exceeds $c = 3$.
    - **CISPO** has no hollow dots. The push of **SAPO** decreases gradually.
    - **GSPO** ends at 1.04: its ε of 0.0004 bounds the geometric mean of 100 ratios, of which only
      this one moves. Inside the bound each token gets the same push, whatever its own ratio.

    ## Common wrong statements

    Switch a statement on to see its effect (red, dashed) and the effect of the loss (blue). A test
    in `tests/functional/losses/test_retellings.py` refutes each of them; `docs/retellings.md` has
    the sources and more statements.
    """)
    return


@app.cell
def _():
    told = mo.ui.dictionary(
        {
            "product": mo.ui.switch(True, label="Decoupled PPO clips the product of both ratios."),
            "sides": mo.ui.switch(label="PPO has no gradient outside of 1 ± ε."),
            "inside": mo.ui.switch(label="The clip keeps the ratio within 1 ± ε."),
            "back": mo.ui.switch(label="A clipped token is pulled back into the range."),
            "bounded": mo.ui.switch(label="The clip bounds the push of every token."),
            "cispo": mo.ui.switch(label="CISPO drops clipped tokens."),
            "weight": mo.ui.switch(label="The weight w gets a gradient."),
            "gspo": mo.ui.switch(label="GSPO is PPO with a mean over the response."),
        }
    )
    return (told,)


@app.cell
def _(loss_surface, torch):
    line = np.geomspace(0.25, 4, 161)

    def along(loss, *, weight=1.0, advantage=1.0, response_tokens=1):
        surface = loss_surface(
            loss,
            ratios=torch.as_tensor(line),
            weights=torch.tensor([weight], dtype=torch.float64),
            advantages=torch.tensor([advantage], dtype=torch.float64),
            response_tokens=response_tokens,
        )
        return (-surface.gradient).flatten().tolist()

    return along, line


@app.cell
def _(along, clip, gradient_check, grpo, line, losses, partial, ratio_path, retellings):
    _real = losses["decoupled PPO"]
    _both = partial(retellings.both_sides_clipped, clip_epsilon=clip.value)
    _step = partial(ratio_path, weight=1.5, advantage=1.0, step_size=0.3, steps=6)
    _back = partial(retellings.pulled_back, clip_epsilon=clip.value)

    pictures = {
        "product": lambda: push_curves(
            line,
            along(retellings.clipped_product(clip_epsilon=clip.value), weight=1.5),
            along(_real, weight=1.5),
        ),
        "sides": lambda: push_curves(line, along(_both), along(_real)),
        "inside": lambda: ratio_paths(
            [min(r, 1 + clip.value) for r in _step(_real, ratio=1.0).tolist()],
            _step(_real, ratio=1.0).tolist(),
            clip_epsilon=clip.value,
        ),
        "back": lambda: ratio_paths(
            _step(_back, ratio=1.8).tolist(),
            _step(_real, ratio=1.8).tolist(),
            clip_epsilon=clip.value,
        ),
        "bounded": lambda: push_curves(
            line,
            [max(push, -1 - clip.value) for push in along(_real, advantage=-1.0)],
            along(_real, advantage=-1.0),
        ),
        "cispo": lambda: push_curves(line, along(_both), along(losses["CISPO"])),
        "weight": lambda: gradient_table(
            gradient_check(retellings.attached_weight), gradient_check(_real)
        ),
        "gspo": lambda: push_curves(
            line,
            along(partial(grpo, clip_epsilon=clip.value), response_tokens=100),
            along(losses["GSPO"], response_tokens=100),
        ),
    }
    return (pictures,)


@app.function(hide_code=True)
def gradient_table(retold, actual):
    """Largest gradient of each input, as Markdown."""
    rows = [
        f"| `{name}` | {retold.inputs[name].largest:.2f} | {gradient.largest:.2f} |"
        for name, gradient in actual.inputs.items()
    ]
    head = "| largest gradient by | as retold | as it is |\n| :--- | ---: | ---: |\n"
    return mo.md(head + "\n".join(rows))


@app.cell(hide_code=True)
def _():
    answers = {
        "product": r"""
    At $w = 1.5$ the product leaves the range at $r = 0.8$: a token that has not moved would
    already be lost. The proximal policy would cancel, which leaves standard PPO.

    `test_decoupled_ppo_does_not_clip_the_product_of_both_ratios`
    """,
        "sides": r"""
    Only on the side to which the advantage pushes: above $1 + \epsilon$ for a good token. One that
    became unlikely ($r = 0.5$) is pushed up all the same. The minimum does that.

    `test_the_clip_of_ppo_has_one_side_for_each_sign`
    """,
        "inside": r"""
    The push has its full size up to the edge, so one step of descent (of size 0.3, on this token
    alone) ends far beyond. In a model the gradients of all other tokens move it, too.

    `test_the_clip_does_not_keep_the_ratio_inside`
    """,
        "back": r"""
    A clipped token has a gradient of exactly 0 and stays where it is, at 1.8. Truly PPO
    (arXiv:1903.07940) adds a rollback because PPO has none.

    `test_a_clipped_token_is_not_pulled_back`
    """,
        "bounded": r"""
    A bad token ($A = -1$) that became more likely is pushed down in proportion to $r$, without a
    bound: dual clip was made for it. No clip bounds the weight $w$, either.

    `test_the_clip_does_not_bound_the_push_of_a_bad_token`
    """,
        "cispo": r"""
    It bounds the weight of $\log \pi_\theta$ and keeps the gradient of every token. Without its
    stop-gradient it is $-\mathrm{clip}(r) A$, which does drop them.

    `test_cispo_drops_no_token`
    """,
        "weight": r"""
    Only $\log \pi_\theta$ may get one. With a gradient of its own, the weight doubles the push in
    the first minibatch of a step, where the proximal policy is the one that is trained.

    `test_the_weight_gets_no_gradient`, `test_a_weight_with_a_gradient_doubles_the_push`
    """,
        "gspo": r"""
    GSPO clips the geometric mean of all ratios of a response. Of 100 tokens, one that moves alone
    to $r = 1.05$ takes the gradient from all of them; inside, its own $r$ does not matter.

    `test_gspo_is_not_ppo_with_a_mean_over_the_response`
    """,
    }
    return (answers,)


@app.cell(hide_code=True)
def _(answers, pictures, told):
    mo.vstack(
        [
            mo.vstack([told[key], panel(pictures[key](), answers[key])]) if on else told[key]
            for key, on in told.value.items()
        ],
        gap=0.7,
    )
    return


@app.function(hide_code=True)
def panel(picture, answer):
    """A picture and what it shows, beside each other where there is room."""
    return columns(mo.as_html(picture), mo.md(answer))


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Try this

    - Switch to the bad token and drag it to $r = 3.17$, $w = 1$. PPO pushes it down three times as
      hard as a token on policy. Dual clip does not push it any more.
    - Drag along $w = 1$: PPO and decoupled PPO agree everywhere. Then drag along the dotted
      diagonal $r w = 1$: PPO never clips there, not even where decoupled PPO clips.
    - Set ε to 0.05 and count the hollow dots of SAPO. SAPO has no ε, so its range does not become
      narrower.

    ## The code
    """)
    return


@app.cell(hide_code=True)
def _(decoupled_ppo, gspo, loss_surface, policy_loss, retellings):
    mo.vstack(
        [
            mo.accordion(code_of(loss_surface, policy_loss, decoupled_ppo, gspo, retellings)),
            mo.md(
                "Pages: `docs/functional/losses.md`, `docs/functional/surface.md`, "
                "`docs/retellings.md`."
            ),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 1.1 CPU s without torch. The arrows below it load
    torch; the whole page takes 5 CPU s and 400 MB.
    """)
    return


if __name__ == "__main__":
    app.run()
