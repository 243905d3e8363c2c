"""Policy, supervised, preference and distillation losses, composed of the other rooms."""
