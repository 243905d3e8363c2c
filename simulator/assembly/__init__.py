"""From a configuration to a `System`: check it, put its parts together, simulate it."""
