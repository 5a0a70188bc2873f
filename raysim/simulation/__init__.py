"""The loop of a run on virtual time: schedules, fleets, the server, evaluation, checkpoints."""
