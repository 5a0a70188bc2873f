"""What the command line offers besides a single run."""
