"""What a run leaves: history, tracking, progress, figures, reports."""
