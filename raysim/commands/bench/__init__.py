"""Implement `raysim bench`: compare raysim's speed with a plain PyTorch loop."""
