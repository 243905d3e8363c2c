"""Rollouts from prompts to scored samples: engine assignment, and continuation after a loss.

May import agents, engines, rewards, resolve, data and control; imported by `pipeline` and
`pipeline.resume`.
"""
