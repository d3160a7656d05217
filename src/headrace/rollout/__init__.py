"""Engines and episodes: everything between a prompt and a graded, token-exact sample."""
