"""Implement `raysim bench`: measure raysim's speed, for example against a plain PyTorch loop."""
