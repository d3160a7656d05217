"""Settings: pydantic schema, TOML in, resolved JSON out. No torch, no I/O beyond reading the recipe."""
