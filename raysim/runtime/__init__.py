"""The runtimes of a run: workers in this process, or workers as Ray actors."""
