"""A rank's process: the user's script, with everything that lets it be moved and replaced.

Rooms, from the top floor down; imports run downward only (import-linter keeps it):

    api          what the script calls: attach, and the session it gets
    step         one step or section as a transaction; recovery; a newcomer's way to its place
    transparent  the same for scripts that know nothing of Keepstep: held, and moved as images
    checkpoint   files: just-in-time and periodic
    vault        shards that no other rank has, kept in the memory of another node
    script       the user's script: its variables, streams, batches, position, results
    state        what a rank has, as bytes and digests, and how it is moved; the facts of a rank
    groups       process groups: solo or real, cut, staged, swapped; the commit fence
    device       the GPU, native code, memory of other processes
    line         talking: to the own agent, to buddies and other workers
"""
