"""The embedded engine: continuous batching on torch, CPU or one accelerator."""
