"""What looks like a site and is none."""
