# /// script
# requires-python = ">=3.11"
# dependencies = ["areal_lab[train,notebooks]"]
#
# [tool.uv.sources]
# areal_lab = { path = "..", editable = true }
# ///

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Advantages")

with app.setup:
    import marimo as mo
    import numpy as np

    from areal_lab.widgets.advantage_charts import Curves, advantage_tables, rate_curves
    from areal_lab.widgets.chart_parts import columns
    from areal_lab.widgets.reward_table import clicked_rewards, reward_table
    from areal_lab.widgets.source import code_of


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Advantages

    *A reward says whether a response was correct. How hard does each estimator push on the
    response, and on which prompts does it push most?*

    **The usual answer:** an advantage is the reward on a common scale, and the scale is a matter of
    the learning rate. **But the scale decides which prompts are learned:** GRPO pushes the single
    right response of A seven times as hard as each right response of C, and in some estimators one
    more right response of D changes the numbers of every other prompt.

    Four prompts, from hard (A) to solved (D), have eight responses each; the small numbers are
    lengths in tokens. **Click a tile** to make a response right or wrong.
    """)
    return


@app.cell
def _():
    names = ["A", "B", "C", "D"]
    start = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ]
    lengths = [
        [1510, 310, 820, 1240, 560, 940, 700, 1130],
        [420, 650, 380, 900, 1220, 760, 1480, 540],
        [260, 340, 290, 450, 380, 520, 610, 1350],
        [180, 220, 150, 310, 240, 190, 270, 400],
    ]
    return lengths, names, start


@app.cell
def _(start):
    # What is framed at first: the last response of prompt D has just become right.
    get_history, set_history = mo.state(([*start[:3], [1, 1, 1, 1, 1, 1, 1, 0]], start))
    return get_history, set_history


@app.cell
def _(get_history):
    before, rewards = get_history()
    return before, rewards


@app.cell
def _(lengths, names, set_history, start):
    held = {"rewards": start}

    def _click(_):
        earlier = held["rewards"]
        held["rewards"] = clicked_rewards(tiles.selections, start, names=names)
        set_history((earlier, held["rewards"]))

    tiles = mo.ui.altair_chart(
        reward_table(start, names=names, lengths=lengths),
        on_change=_click,
        chart_selection=False,
        legend_selection=False,
    )
    tiles
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    ## Advantages of each estimator

    Blue pushes a response up, orange down. $\Sigma A^2$ is the squared size of a prompt's gradient,
    if the gradients of its responses are orthogonal. Three of ten estimators are shown: choose
    others. **Framed** numbers changed with the last
    click; at first, the last response of D has just become right.
    """)
    return


@app.cell
def _():
    from functools import partial

    import torch

    from areal_lab.functional import (
        dr_grpo_advantages,
        gdpo_advantages,
        gpg_advantages,
        group_advantages,
        grpo_advantages,
        lite_ppo_advantages,
        max_rl_advantages,
        opo_advantages,
        pass_at_k_advantages,
        prompt_weight,
        reinforce_plus_plus_advantages,
        reinforce_plus_plus_baseline_advantages,
        rloo_advantages,
        sum_then_normalize,
    )

    torch.set_num_threads(1)  # for small tensors, more threads wait longer than they compute

    return (
        dr_grpo_advantages,
        gdpo_advantages,
        gpg_advantages,
        group_advantages,
        grpo_advantages,
        lite_ppo_advantages,
        max_rl_advantages,
        opo_advantages,
        partial,
        pass_at_k_advantages,
        prompt_weight,
        reinforce_plus_plus_advantages,
        reinforce_plus_plus_baseline_advantages,
        rloo_advantages,
        sum_then_normalize,
        torch,
    )


@app.cell
def _(lengths, torch):
    length_tokens = torch.tensor(lengths).flatten()
    groups = torch.arange(4).repeat_interleave(8)
    mask = torch.arange(1600) < length_tokens[:, None]
    return groups, length_tokens, mask


@app.cell
def _(
    dr_grpo_advantages,
    gpg_advantages,
    grpo_advantages,
    length_tokens,
    lite_ppo_advantages,
    mask,
    max_rl_advantages,
    opo_advantages,
    partial,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
):
    estimators = {
        "GRPO": grpo_advantages,
        "LitePPO": lite_ppo_advantages,
        "Dr. GRPO": dr_grpo_advantages,
        "RLOO": rloo_advantages,
        "REINFORCE++": lambda r, _: reinforce_plus_plus_advantages(r, mask)[:, 0],
        "REINFORCE++, baseline": lambda r, g: reinforce_plus_plus_baseline_advantages(r, g, mask)[
            :, 0
        ],
        "OPO": partial(opo_advantages, length_tokens=length_tokens),
        "MaxRL": max_rl_advantages,
        "GPG": gpg_advantages,
        "Pass@k": pass_at_k_advantages,
    }
    return (estimators,)


@app.cell
def _(before, estimators, groups, rewards, torch):
    def tables_of(rows):
        flat = torch.tensor(rows, dtype=torch.float64).flatten()
        return {
            name: estimate(flat, groups).reshape(4, 8).numpy()
            for name, estimate in estimators.items()
        }

    tables = tables_of(rewards)
    earlier_tables = tables_of(before)
    return earlier_tables, tables


@app.cell
def _(estimators):
    shown = mo.ui.multiselect(
        list(estimators), value=["GRPO", "Dr. GRPO", "REINFORCE++"], label="estimators"
    )
    shown
    return (shown,)


@app.cell(hide_code=True)
def _(earlier_tables, names, shown, tables):
    _chosen = {name: tables[name] for name in shown.value or tables}
    advantage_tables(_chosen, names=names, before=earlier_tables)
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    As the page opens:

    - **GRPO** divides by each group's deviation, so A, solved once, has the $\Sigma A^2$ of B,
      solved four times: 7 for every mixed group. **Dr. GRPO** does not divide: A has less than half
      of B.
    - **D has no gradient** if an estimator compares a response with its group. **REINFORCE++** has
      no groups: it pushes all of D up, because D is easier than the other prompts.
    - **One more right response in D** changed only the numbers of D in GRPO, but those of all
      prompts in **LitePPO**, **GPG** and **REINFORCE++**, which use the whole batch.
    - **OPO** weighs its mean by length. **MaxRL** pushes the rare right response hardest.
      **Pass@k** pushes a single best response only.

    | | $A_i$ | library |
    | :--- | :--- | :--- |
    | GRPO | $(R_i - \bar R_g) / \sigma_g$ | `grpo_advantages` |
    | LitePPO | $(R_i - \bar R_g) / \sigma_{batch}$ | `lite_ppo_advantages` |
    | Dr. GRPO | $R_i - \bar R_g$ | `dr_grpo_advantages` |
    | RLOO | $R_i - \frac{1}{G-1} \sum_{j \ne i} R_j$ | `rloo_advantages` |
    | REINFORCE++ | whitened $R_i$ of all tokens | `reinforce_plus_plus_advantages` |
    | with baseline | whitened $R_i - \bar R_g$ | `reinforce_plus_plus_baseline_advantages` |
    | OPO | $R_i - \sum_j \lvert y_j \rvert R_j / \sum_j \lvert y_j \rvert$ | `opo_advantages` |
    | MaxRL | $(R_i - \bar R_g) / \bar R_g$ | `max_rl_advantages` |
    | GPG | $\alpha (R_i - \bar R_g)$, $\alpha$ of the mixed groups | `gpg_advantages` |
    | Pass@k | $(\max_j R_j - \max_{j \ne i} R_j) / \sigma_g$ | `pass_at_k_advantages` |

    ## Easy and hard prompts

    In expectation, the update of a prompt is a **weight** times the gradient of its success rate p.
    Here it is for every p, exactly; thin lines are groups of 256. LitePPO has the prompt in a batch
    with the four of the table.
    """)
    return


@app.cell
def _():
    group_size = mo.ui.slider(
        steps=[2, 4, 8, 16, 32, 64], value=8, label="group size G", show_value=True
    )
    group_size
    return (group_size,)


@app.cell
def _(
    dr_grpo_advantages,
    groups,
    grpo_advantages,
    lite_ppo_advantages,
    max_rl_advantages,
    partial,
    prompt_weight,
    rewards,
    torch,
):
    rates = np.linspace(0, 1, 101)

    def by_rate(size):
        at = partial(prompt_weight, success_rates=torch.as_tensor(rates), group_size=size)
        others = {"others": torch.tensor(rewards, dtype=torch.float64).flatten()}
        return {
            "GRPO": at(grpo_advantages),
            "Dr. GRPO": at(dr_grpo_advantages),
            "MaxRL": at(max_rl_advantages),
            "LitePPO": at(lite_ppo_advantages, **others, other_groups=groups),
        }

    return by_rate, rates


@app.cell
def _(by_rate, group_size):
    curves = by_rate(group_size.value)
    return (curves,)


@app.cell
def _(dr_grpo_advantages, grpo_advantages, max_rl_advantages, prompt_weight, rates, torch):
    large_groups = {
        name: prompt_weight(estimate, torch.as_tensor(rates), group_size=256)
        for name, estimate in (
            ("GRPO", grpo_advantages),
            ("Dr. GRPO", dr_grpo_advantages),
            ("MaxRL", max_rl_advantages),
        )
    }
    return (large_groups,)


@app.cell(hide_code=True)
def _(curves, large_groups, rates):
    _charts = rate_curves(
        rates,
        Curves(
            "weight of the prompt",
            {name: curve.weight.tolist() for name, curve in curves.items()},
            8,
            pale={name: curve.weight.tolist() for name, curve in large_groups.items()},
        ),
        Curves(
            "mean of |A|",
            {name: curve.size.tolist() for name, curve in curves.items()},
            2,
            pale={name: curve.size.tolist() for name, curve in large_groups.items()},
        ),
    )
    columns(*map(mo.as_html, _charts))
    return


@app.cell(hide_code=True)
def _(curves, group_size):
    _weights = {name: curve.weight[10].item() for name, curve in curves.items()}
    _mixed = curves["GRPO"].informative[10].item()
    mo.md(f"""
    With G = {group_size.value}, a prompt solved in 10 % of the attempts has weight
    {_weights["GRPO"]:.2f} in GRPO, {_weights["Dr. GRPO"]:.2f} in Dr. GRPO and
    {_weights["MaxRL"]:.2f} in MaxRL. It has both right and wrong responses, and therefore a
    gradient, in {100 * _mixed:.0f} % of the batches.

    ```python
    prompt_weight(grpo_advantages, rates, group_size={group_size.value}).weight
    ```

    A weight of 1 everywhere maximizes the mean success rate: Dr. GRPO up to $(G - 1) / G$, RLOO
    exactly. GRPO's deviation favors prompts that are almost never or almost always solved, in large
    groups without a bound. MaxRL, in large groups, maximizes the mean *logarithm* of the success
    rate. The scale is therefore not equivalent to a learning rate: it weighs prompts.

    ## Several rewards

    Here a second reward is for short responses. If rewards are summed before the division, a short
    wrong response is as good as a long right one. **GDPO** divides each reward by its own deviation
    first.
    """)
    return


@app.cell
def _():
    short = mo.ui.slider(
        200, 1600, 50, 600, label="short is up to (tokens)", show_value=True, full_width=False
    )
    short
    return (short,)


@app.cell
def _(gdpo_advantages, groups, lengths, rewards, short, sum_then_normalize, torch):
    both = torch.tensor(
        [
            [right, float(tokens <= short.value)]
            for row, row_lengths in zip(rewards, lengths, strict=True)
            for right, tokens in zip(row, row_lengths, strict=True)
        ],
        dtype=torch.float64,
    )
    two_rewards = {
        "GRPO of the sum": sum_then_normalize(both, groups).reshape(4, 8).numpy(),
        "GDPO": gdpo_advantages(both, groups).reshape(4, 8).numpy(),
    }
    return (two_rewards,)


@app.cell(hide_code=True)
def _(names, two_rewards):
    advantage_tables(two_rewards, names=names)
    return


@app.cell(hide_code=True)
def _(short, two_rewards):
    _summed, _gdpo = (two_rewards[name][0] for name in ("GRPO of the sum", "GDPO"))
    mo.md(f"""
    In prompt A the first response is right and has 1,510 tokens; the second is wrong and has 310.
    With short up to {short.value} tokens, the sum gives them {_summed[0]:.2f} and
    {_summed[1]:.2f}, GDPO {_gdpo[0]:.2f} and {_gdpo[1]:.2f}: being right is rarer there.

    ```python
    gdpo_advantages(rewards, groups)  # rewards: [samples, 2]
    ```

    ## Try this

    - Make all of A right, tile by tile. B does not change, but LitePPO pushes it harder with each
      click, 1.4 instead of 1.0 at the end, because the deviation of the batch falls.
    - Make one response of C wrong. REINFORCE++ pushes D, which is still all right, up harder; in
      GRPO D stays at 0.
    - Set the group size to 2. All curves are flat, also GRPO's: two responses contain no
      information about difficulty. At p = 0.1 they differ, and have a gradient, in only 18 % of the
      batches.

    ## The code
    """)
    return


@app.cell(hide_code=True)
def _(gdpo_advantages, group_advantages, grpo_advantages, lite_ppo_advantages, prompt_weight):
    mo.vstack(
        [
            mo.accordion(
                code_of(
                    group_advantages,
                    grpo_advantages,
                    lite_ppo_advantages,
                    gdpo_advantages,
                    prompt_weight,
                )
            ),
            mo.md("Page: `docs/functional/advantages.md`."),
        ]
    )
    return


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    **Cost of this page:** the first picture takes 1.0 CPU s without torch. The numbers below it
    load torch; the whole page takes 4 CPU s and 330 MB.
    """)
    return


if __name__ == "__main__":
    app.run()
