"""How programs fall into named parts: small programs, one for each kind that the rules know."""
