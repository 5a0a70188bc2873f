"""The runtimes: workers in this process, or workers as Ray actors."""
