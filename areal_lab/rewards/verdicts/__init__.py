"""Verdicts about solutions: tests run in another process than the solution, and compare there.

    solution's cell  <--calls, as literals--  tests' cell --verdict--> `judge` in the reward worker
                     --values, exceptions-->

The solution answers "call f with these arguments" and nothing else: what the tests expect never
comes near it. `judge` has the call; `literals`, `solution` and `tests` run in the cells and import
little. What is judged, and where it ends: docs/sandbox.md. May import `rewards.sandbox`; imported
by reward functions.
"""
