"""Compare the published tables of four papers with our results, and write pages on them."""
