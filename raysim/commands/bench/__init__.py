"""`raysim bench`: speed beside a bare PyTorch loop."""
