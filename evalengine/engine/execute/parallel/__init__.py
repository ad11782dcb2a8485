"""A model over several ranks, a process each: rank 0 is the engine's own process, which tells the others what to do."""
