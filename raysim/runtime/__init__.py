"""Where workers run: in this process, or as Ray's actors."""
