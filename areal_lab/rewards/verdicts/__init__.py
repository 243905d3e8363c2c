"""Verdicts about solutions: tests run in another process than the solution, and compare there.

    solution's cell  <--calls, as literals--  tests' cell --verdict--> `judge` in the reward worker
                     --values, exceptions-->

The solution only answers "call f with these arguments": it never sees the expected values. `judge`
has the call; `literals`, `solution` and `tests` run in the cells and import little. What is tested,
and the limits: docs/sandbox.md. May import `rewards.sandbox`; imported by reward functions.
"""
