"""What a user measures on his own machine (`python -m evalengine bench ...`): whole runs of the engine."""
