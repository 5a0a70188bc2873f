"""`raysim sweep`: a search on Ray Tune."""
