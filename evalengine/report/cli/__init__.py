"""What the commands `compare`, `gate`, `baseline` and `report` do with their words. No other part imports it."""
