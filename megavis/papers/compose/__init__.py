"""Any composition of tokens, schedule, asking, density and condition, from YAML."""
