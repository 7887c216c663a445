"""Ranks whose script knows nothing of Keepstep: `stopping` brings all to the same step,
`transparent` holds them there, `device` moves what they have on a GPU."""
