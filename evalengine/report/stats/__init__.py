"""Statistics: paired tests, intervals, power, and the losses that a test can detect."""
