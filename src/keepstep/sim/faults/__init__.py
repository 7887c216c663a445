"""What can go wrong with whom, while a world runs: `strikes.py` first."""
