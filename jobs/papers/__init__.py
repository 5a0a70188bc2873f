"""The published tables of four papers, our results next to them, and the pages made of both."""
