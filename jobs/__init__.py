"""Programs for a checkout of the repository, which are not in the installed package."""
