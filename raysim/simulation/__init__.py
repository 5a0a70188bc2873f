"""The event loop on virtual time: schedules, fleets, the server's step, evaluation, checkpoints."""
