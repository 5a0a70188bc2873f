"""Programs for a checkout, which are no part of the installed package."""
