"""A client's work on its worker: the loop, the step, the worker that keeps client states."""
