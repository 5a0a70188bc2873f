"""The loop of a run on virtual time: schedules, fleets, server, evaluation, checkpoints."""
