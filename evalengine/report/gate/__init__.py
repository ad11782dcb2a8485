"""May a change be merged? A run judged against a baseline by a policy."""
