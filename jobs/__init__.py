"""Hold programs for a checkout of the repository; they are not in the installed package."""
