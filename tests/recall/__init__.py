"""What a search finds of the zoo, and whether anything that looks like a site is passed over in silence (`looks_like_sites.py`)."""
