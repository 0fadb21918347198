"""The picture of a program: lanes (forward, backward, update) as columns, modules as rows, cards that open in place.

Read `card` first (the data, which `parts` makes), then `album` (the pictures of one program as one clicks through them), `plan` (places
cards in a pane of a given size, by what is in `layout`) and `svg` (draws them).
"""
