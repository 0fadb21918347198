"""What `plan` is made of: geometry (`picture`), widths of texts (`measure`), faces of cards, rows, lanes, pills, edges, opened cards."""
