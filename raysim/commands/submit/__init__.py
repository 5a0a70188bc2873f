"""`raysim submit`: a job on a cluster."""
