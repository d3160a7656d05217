"""Starting roles: local processes. The only place that spawns them."""
