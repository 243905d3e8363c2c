"""How a result is told: JSON, tables, notes and pictures."""
