"""The explorer. Read `session` first (everything but the screen), then `widget` (the screen), `messages` (what a browser asks),
`toggles`, `stage` (the picture between two changes), `background` (work beside the notebook), `state_file`, `files` and `script`
(what is saved).
"""
