"""`python -m raysim` is the command `raysim`."""

from raysim.cli import main

main()
