"""The explorer. Read `session` first (everything but the screen) with `decided` (what is on, and undo) and `toggles`, then `widget`
(the screen) with `observed` (its traits), `messages` (what a browser asks), `stage` (the picture between two changes), `background`
(background work), `state_file`, `files` and `script` (what is saved).
"""
