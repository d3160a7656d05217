"""The heart: pure state machines that decide what starts, what trains and when weights swap.

Events in, decisions out; no asyncio, sockets, sleeps, tensors or files.
"""
