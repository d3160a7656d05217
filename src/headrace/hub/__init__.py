"""Model names to local folders in Hugging Face layout: registry, download, conversion, cache.

Only `convert` imports torch, and it runs in a process of its own.
"""
