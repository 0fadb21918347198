"""The parts of `plan`: geometry (`picture`), widths of texts (`measure`), faces of cards, rows, lanes, pills, edges, opened cards."""
