"""Where staleness hurts: the cells of a map, the rule made from them, and how both are told."""
