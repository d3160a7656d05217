"""Train-versus-engine diagnostics on plain NumPy arrays. No torch, no I/O, no state."""
