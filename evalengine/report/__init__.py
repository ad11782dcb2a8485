"""Reports for people. They read records from disk, and never import the engine or torch.

From the ground up, each importing those before it: `read` (runs from disk), `stats`, `terminal`, `compare`, `html`,
`sweep`, `leaderboard`, `export`, `gate`, `python`; and `cli`, what the commands do.
"""
