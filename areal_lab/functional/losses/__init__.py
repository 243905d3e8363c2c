"""Policy, supervised, preference and distillation losses, composed of the other rooms.

May import every room of functional but `staleness`; imported by users and `training`.
"""
