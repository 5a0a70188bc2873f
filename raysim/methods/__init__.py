"""One file per paper: its mathematics as functions, and the hooks that use them."""
