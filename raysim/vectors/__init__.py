"""Parameters as one flat vector: its layout, its arithmetic in blocks, optimisers, inner products."""
