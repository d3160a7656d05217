"""The learner and the pure functions it composes: advantages, losses, corrections, batching."""
