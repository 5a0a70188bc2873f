"""What every room may use: errors, files, random streams, checks of numbers."""
