"""The commands `compare`, `gate`, `baseline` and `report`. No other part imports them."""
