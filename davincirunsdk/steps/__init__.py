"""How far a worker's training is: what frameworks print, what a script says itself, and who lags behind."""
