"""What must hold in a world, looked at after every event: `check.py` first."""
