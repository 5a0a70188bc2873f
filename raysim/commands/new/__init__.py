"""`raysim new`: write a package of the user's own parts, a copy of `template`."""
