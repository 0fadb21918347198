"""Small programs that still show a fault: `program` cuts one out of another, `search` looks for the smallest, `source` writes it as Python."""
