"""The concurrent loops of a run. Read pipeline.py first. Decisions come from flow; here they become I/O."""
