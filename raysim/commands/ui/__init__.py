"""Implement `raysim ui`: send stored runs to MLflow's database, and show their charts."""
