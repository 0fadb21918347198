"""The session and the widget."""
