"""What all passes share: pairs of forward and backward, other numbers, wider arithmetic, known numbers."""
