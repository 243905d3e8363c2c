"""Ways of a trainer's weights into engines; see `records` for what there is."""
