"""The picture of a program: lanes (forward, backward, update) as columns, modules as rows, cards that open where they stand.

Read `card` first (the data), then `phases`, `places` and `names` (which node is where, and what it is called), `tree` (from a graph to
cards), `flows` (what flows between them); `plan` places cards in a pane of a given size, `svg` draws them.
"""
