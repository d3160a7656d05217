"""Task sources, episodes and rewards: text in, text out. No torch, no tokenizers."""
