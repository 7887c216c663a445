"""The parts of a world put together: nodes with their agents, the orchestrator, a scheduler.

`world.py` first. The core, the agents' machines and the protocol of ranks are the production ones.
"""
