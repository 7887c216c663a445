"""What a world is like and what goes wrong in it, decided before it begins.

`world_plan.py` first.
"""
