"""From a prompt to scored samples: which engine takes what, and what is kept when one is lost.

May import agents, engines, rewards, preflight, data and control; imported by `pipeline` and
`pipeline.resume`.
"""
