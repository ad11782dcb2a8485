"""What people read of a run. Reads records from disk: it never imports the engine, nor torch.

From the ground up, each importing those before it: `read` (runs from disk), `stats`, `terminal`, `compare`, `html`,
`sweep`, `leaderboard`, `export`, `gate`, `python`; and `cli`, what the commands do.
"""
