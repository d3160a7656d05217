"""Headrace: RL post-training in which generator and trainer run at matching rates."""
