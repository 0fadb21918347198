"""The division of a program into named parts, which `cards` shows.

Read `phases` first (forward, backward, update), then `nodes`, `sites` and `items` (what a reader takes for one thing), `frames` and
`instances` (which call and which layer it is in), `groups` and `places` (parts, and the rows they stand in), `runs` (equal neighbours),
`flows` (who reads what), `names` and `naming`, `strips`, `drawing` (the cards of one row) and `tree`,
which makes a picture's cards of it all.
"""
