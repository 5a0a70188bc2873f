"""The results of a run: history, tracking, progress, figures, reports."""
