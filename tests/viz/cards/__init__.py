"""Pictures of cards."""
