"""What is public, as its user meets it: what calls give back, names that are misspelt, what an error shows."""
