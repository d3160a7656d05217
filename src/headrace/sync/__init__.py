"""Weight delivery: knows arrays and bytes, not trainers or engines."""
