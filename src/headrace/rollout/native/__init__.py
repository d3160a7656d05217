"""The embedded engine: continuous batching on torch, CPU or one accelerator. One thread, no I/O but reading weights.

core.py       which request runs when: admission, prefill, decode, swap     (no tensor code)
running.py    one request's state
backend.py    the seam between core and a model's arithmetic
decoder.py    fast decoder of the Llama family
kernels.py    its norm and rotation on a CPU in one pass each (numba, optional)
weights.py    its weights: named arrays in, fused and prepacked linears out
kv.py         its KV cache
head.py       logits in float32
sampling.py   from logits to token ids and their log-probs
text.py       ids to text, stop strings
fallback.py   any other causal LM through transformers' own forward
loading.py    model folder to named tensors
"""
