"""The picture of a program as cards: the programs that it is judged on, and what is measured of a drawing."""
