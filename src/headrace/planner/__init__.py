"""The planner: predicts a run before it is paid for. Imports the real flow/ objects, never torch.

What is simulated is what runs: `simulate` feeds the same Controller that loop/ feeds, on a VirtualClock.

    facts (hardware, models, prices) -> cost (seconds and bytes) -> closed (screening) -> simulate (the best few)
    -> search (rank, constraints) -> plan (bands, what binds, marginal values) -> cli, HTML, recipe
"""
