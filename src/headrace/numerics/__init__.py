"""Train-versus-engine diagnostics on plain arrays. No torch."""
