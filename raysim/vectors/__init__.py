"""Parameters as one flat vector: layout, arithmetic in blocks, optimizers, inner products."""
