"""`raysim bench`: speed compared with a bare PyTorch loop."""
