"""Different models on the same tasks: metrics with intervals, ranks, paired tests, means over groups, a history."""
