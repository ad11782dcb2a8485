"""Two or more runs of the same inputs side by side: are they the same; if not, where, and why."""
