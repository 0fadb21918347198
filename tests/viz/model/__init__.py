"""What a picture shows, as data."""
