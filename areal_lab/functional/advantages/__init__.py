"""From rewards to advantages and returns."""
