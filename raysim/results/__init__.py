"""Store and show the results of a run: history, tracking, progress, figures, reports."""
