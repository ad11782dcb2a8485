"""What people read of a run. Reads records from disk: it never imports the engine, nor torch."""
