"""The published tables of four papers, and how our runs are put beside them."""
