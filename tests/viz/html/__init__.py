"""The report and its panes."""
