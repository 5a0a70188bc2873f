"""Your own parts for raysim: one of each kind, to be changed into what you need."""
