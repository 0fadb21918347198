"""How FusionLab speaks with whoever uses it: names it proposes, errors in a cell, progress, what results print as and save."""
