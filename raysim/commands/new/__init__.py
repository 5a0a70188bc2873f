"""`raysim new`: a package of the user's own, from the one in `template`."""
