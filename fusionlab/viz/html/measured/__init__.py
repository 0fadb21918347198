"""What a page shows of measurements: buffers at the peak of memory, time by scope, two records side by side."""
