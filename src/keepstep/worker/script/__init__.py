"""The user's script, which nobody has written for this. `variables` (with the graph of `nodes`
that `discovery` finds) and `streams` carry what it keeps; `position`, `batches` and `results`
lead a newcomer to the same place; `collectives` watches the front door of torch.distributed;
`refusals` names what cannot be protected."""
