"""A run's results in the formats of other programs: model cards, trackers, documents."""
