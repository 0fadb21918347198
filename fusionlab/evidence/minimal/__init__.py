"""Small programs that still show a fault: `program` cuts one out of another, `faults` says what it shows, `search` looks for the smallest,
`source` writes it as Python, `repro` the whole file.
"""
