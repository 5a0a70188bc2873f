"""Your own parts for raysim: one example of each kind. Change them into what you need."""
