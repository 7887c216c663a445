"""Telling the story of a world: `single.py` first."""
